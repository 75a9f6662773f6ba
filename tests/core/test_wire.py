"""Bytes of the wire: golden vectors, round trips, and what bad bytes do.

`python tests/core/test_wire.py` writes the vectors that are missing. They are only ever added:
a changed one needs a new protocol version.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core import wire
from kvx.core.errors import LocalProtocolError, RemoteProtocolError
from kvx.core.messages import KINDS, Ack, Command, Done, Envelope, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import (
    BlockTable,
    CacheGroup,
    Grant,
    InstanceInfo,
    LayerSpec,
    Layout,
    Mode,
    Packing,
    Peer,
    Reason,
    Ticket,
)

VECTORS = Path(__file__).parents[2] / "conformance" / "kvx_conformance" / "vectors" / "v1"
KEY = b"a shared secret"
EPOCH = 0x1122334455667788
FINGERPRINT = "ca60d62bb6cf1c4ba714c5a306e5ae9b"
LAYOUT = Layout(
    model="toy",
    dtype="bfloat16",
    variant="test",
    groups=(
        CacheGroup(0, "full", 16, (LayerSpec("layers.0", 0, 4096, 8192, 16384),), 2, 4, Packing.HEADS_TOKENS),
        CacheGroup(1, "mla", 32, (LayerSpec("layers.1", 1, 0, 512, 512),), 1, 1, replicated=True),
    ),
    num_blocks=1000,
    tp_rank=1,
    tp_size=2,
)
INFO = InstanceInfo("host-a:5700", 1, EPOCH, "host-a:5701", LAYOUT, ("tcp", "nixl-ucx"), ("host-a:5700", "host-a:5701"))
GRANT = Grant(
    "t-1",
    Peer("host-b:5700", 0),
    EPOCH,
    3,
    Mode.PUSH,
    (2, 1),
    BlockTable.of([7, 8, 300], [70000]),
    77,
    29.5,
    "[::1]:5700",
)
PULL = evolve(GRANT, mode=Mode.PULL)
NONCE = bytes(range(16))
PROOF = bytes(range(32))

HELLO_3 = Hello(3, echo=NONCE, proof=PROOF, fingerprint=FINGERPRINT, info=INFO, metadata={"tcp": b"\x00m", "a": b""})

SAMPLES: dict[str, Message] = {
    "hello-1": Hello(1, (1,), EPOCH, NONCE, "0badcafe"),
    "hello-2": Hello(2, (1, 2), EPOCH, NONCE, "0badcafe", NONCE[::-1], PROOF, FINGERPRINT, {"dtype": "x"}),
    "hello-3": HELLO_3,
    "hello-refusal": Hello(2, (1,), EPOCH, refusal=Reason.LAYOUT, detail="dtype differs"),
    "grant": GrantMessage(GRANT, (0, 1), "00ff"),
    "grant-prompt": GrantMessage(GRANT, (0, 1), "00ff", "7d1a"),
    "renew": Renew(("t-1", "t-2"), echo=True),
    "done": Done("t-1", (0, 3), (2, 1), "00ff", "crc:1"),
    "ack": Ack("t-1", False, Reason.LEASE_ENDED, "too late", "{}"),
    "revoke": Revoke("t-1", Reason.PREEMPTED, "preempted"),
    "stopped": Stopped("t-1", Reason.ABORTED),
    "command": Command("release", "kvx1.x", NONCE, PROOF),
}


def sealed(message: Message) -> Envelope:
    return Envelope(wire.VERSION, EPOCH, 42, message)


def proofs() -> dict[str, str]:
    facts = {"own_epoch": 1, "own_nonce": NONCE, "peer_epoch": 2, "peer_nonce": PROOF, "fingerprint": "00ff"}
    return {
        "key_id": wire.key_id(KEY),
        "hello_proof dialler": wire.hello_proof(KEY, dialler=True, **facts).hex(),  # type: ignore[arg-type]
        "hello_proof acceptor": wire.hello_proof(KEY, dialler=False, **facts).hex(),  # type: ignore[arg-type]
        "command_proof": wire.command_proof(KEY, NONCE, "release", "kvx1.x", PROOF).hex(),
    }


def described(message: Message) -> dict[str, Any]:
    kind = next(number for number, cls in KINDS.items() if cls is type(message))
    head = {"version": 1, "kind": kind, "from_epoch": EPOCH, "to_epoch": 42}
    return {**head, "body": json.loads(msgspec.json.encode(message))}


def packed(*values: object) -> bytes:
    return msgspec.msgpack.encode(values)


# ------------------------------------------------------------------------ golden vectors


def test_every_kind_has_a_vector() -> None:
    assert {type(message) for message in SAMPLES.values()} == set(KINDS.values())
    assert {path.stem for path in VECTORS.glob("*.bin")} == {*SAMPLES, "ticket"}


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_of_version_1_do_not_change(name: str) -> None:
    golden = (VECTORS / f"{name}.bin").read_bytes()
    assert wire.encode(sealed(SAMPLES[name])) == golden
    assert wire.decode(golden) == sealed(SAMPLES[name])
    assert json.loads((VECTORS / f"{name}.json").read_text()) == described(SAMPLES[name])


def test_ticket_of_version_1_does_not_change() -> None:
    golden = (VECTORS / "ticket.bin").read_text()
    assert wire.ticket_text(wire.make_ticket(PULL, KEY)) == golden
    facts = json.loads((VECTORS / "ticket.json").read_text())
    assert wire.parse_ticket(golden) == msgspec.convert(facts["ticket"], Ticket)
    assert wire.ticket_holds(wire.parse_ticket(golden), base64.b64decode(facts["key"]))


def test_proofs_of_version_1_do_not_change() -> None:
    assert json.loads((VECTORS / "proofs.json").read_text()) == proofs()


# --------------------------------------------------------------------------- round trips


def names(low: int = 0, high: int = 24) -> st.SearchStrategy[str]:
    return st.text(min_size=low, max_size=high)


counts = st.integers(0, 2**40)
epochs = st.integers(0, 2**63 - 1)
ranks = st.integers(0, 65535)
transfers = names(1)
reasons = st.sampled_from(Reason)
nonces = st.binary(min_size=16, max_size=64)
proof_bytes = st.sampled_from([b"", PROOF])
legs = st.lists(ranks, max_size=4, unique=True).map(tuple)


@st.composite
def grants(draw: st.DrawFn, mode: Mode) -> Grant:
    groups = draw(st.lists(st.lists(counts, max_size=4), max_size=3))
    first = tuple(draw(counts) for _ in groups)
    owner = Peer(draw(names(1)), draw(ranks))
    lease = draw(st.floats(0, 86400))
    return Grant(
        draw(transfers), owner, draw(epochs), draw(counts), mode, first, BlockTable.of(*groups), draw(counts), lease,
        draw(names(3)),
    )  # fmt: skip


@st.composite
def infos(draw: st.DrawFn) -> InstanceInfo:
    layer = st.builds(LayerSpec, names(), counts, counts, counts, counts)
    heads = st.integers(1, 65536)
    groups = tuple(
        draw(
            st.builds(
                CacheGroup, st.just(index), names(), st.integers(1, 2**20), st.lists(layer, max_size=2).map(tuple),
                heads, heads, st.sampled_from(Packing), st.booleans(),
            )
        )
        for index in range(draw(st.integers(0, 2)))
    )  # fmt: skip
    tp_size, pp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tp_rank, pp_rank = (draw(st.integers(0, tp_size - 1)), draw(st.integers(0, pp_size - 1)))
    stages = draw(st.sampled_from([(), (("a", "b"),) * pp_size]))
    layout = Layout(
        draw(names()), "f", "v", groups, draw(counts), tp_rank, tp_size, pp_rank, pp_size, 0, draw(st.integers(1, 9)),
        stages,
    )  # fmt: skip
    addresses = draw(st.sampled_from([(), ("h:1",) * layout.ranks]))
    transports = draw(st.lists(names(), max_size=2).map(tuple))
    return InstanceInfo(draw(names(1)), layout.rank, draw(epochs), draw(names(3)), layout, transports, addresses)


def hellos() -> st.SearchStrategy[Hello]:
    return st.builds(
        Hello,
        step=st.integers(1, 4),
        versions=st.lists(counts, max_size=3).map(tuple),
        epoch=epochs,
        nonce=nonces,
        key_id=names(),
        echo=st.one_of(st.just(b""), nonces),
        proof=proof_bytes,
        fingerprint=names(),
        facts=st.dictionaries(names(), names(), max_size=2),
        info=st.none() | infos(),
        metadata=st.dictionaries(names(), st.binary(max_size=9), max_size=2),
        refusal=st.none() | reasons,
        detail=names(),
    )


messages: st.SearchStrategy[Message] = st.one_of(
    hellos(),
    st.builds(GrantMessage, grants(Mode.PUSH), legs, names(), st.just(msgspec.UNSET) | names()),
    st.builds(Renew, st.lists(transfers, max_size=3).map(tuple), st.booleans()),
    st.builds(Done, transfers, legs, st.lists(counts, max_size=3).map(tuple), names(), names()),
    st.builds(Ack, transfers, st.booleans(), st.none() | reasons, names(), names()),
    st.builds(Revoke, transfers, reasons, names()),
    st.builds(Stopped, transfers, reasons, names()),
    st.builds(Command, names(), names(), nonces, proof_bytes),
)
envelopes = st.builds(Envelope, st.just(1), epochs, epochs, messages)


@given(envelopes)
def test_what_is_encoded_is_decoded(envelope: Envelope) -> None:
    assert wire.decode(wire.encode(envelope)) == envelope


@given(grants(Mode.PULL), st.binary(max_size=40))
def test_a_ticket_survives_the_router(grant: Grant, key: bytes) -> None:
    ticket = wire.parse_ticket(wire.ticket_text(wire.make_ticket(grant, key)))
    assert ticket.grant == grant
    assert wire.ticket_holds(ticket, key)
    assert not wire.ticket_holds(ticket, key + b"x")


# ------------------------------------------------------------------------------ bad bytes


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_remote_protocol_error_only(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(data)


@settings(max_examples=400)
@given(st.data())
def test_mutated_frames_decode_or_raise_remote_protocol_error(data: st.DataObject) -> None:
    frame = bytearray(wire.encode(sealed(data.draw(st.sampled_from(list(SAMPLES.values()))))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
        if not frame:
            break
    try:
        envelope = wire.decode(bytes(frame))
    except RemoteProtocolError:
        return
    assert wire.decode(wire.encode(envelope)) == envelope


@given(st.text(max_size=100) | st.text(max_size=100).map(lambda text: "kvx1." + text))
def test_arbitrary_text_is_no_ticket(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.parse_ticket(text)


@given(st.data())
def test_a_changed_ticket_does_not_hold(data: st.DataObject) -> None:
    text = wire.ticket_text(wire.make_ticket(PULL, KEY))
    at = data.draw(st.integers(5, len(text) - 1))
    other = data.draw(st.characters(codec="ascii"))
    changed = text[:at] + other + text[at + 1 :]
    try:
        ticket = wire.parse_ticket(changed)
    except RemoteProtocolError:
        return
    # The last character has bits that mean nothing, and an unknown field is ignored.
    assert not wire.ticket_holds(ticket, KEY) or ticket == wire.make_ticket(PULL, KEY)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "not an envelope"),
        (packed(2, 1, 0, 0, {}), "protocol version 2"),
        (packed(2, 1, 0, 0, {}, "new"), "protocol version 2"),
        (packed(1, 99, 0, 0, {}), "unknown kind of message: 99"),
        (packed(1, 3, -1, 0, {}), "not an envelope"),
        (packed(1, 3, 0, 2**63, {}), "not an envelope"),
        (packed(1, 3, 0, 0, []), "bad Renew"),
        (packed(1, 3, 0, 0, {"transfers": ["t"] * (wire.MAX_RENEWED + 1)}), "65537 transfers"),
        (packed(1, 3, 0, 0, {}) + b"\x00", "trailing"),
        (packed(1, 5, 0, 0, {"transfer": "", "ok": True}), "bad Ack"),
        (b"\xdd\x7f\xff\xff\xff\x01", "not an envelope"),
        (b"\x95\x01\x03\x00\x00\x81\xa9transfers\xdd\x7f\xff\xff\xff\xa1t", "truncated"),
        (b"\x95\x01\x03\x00\x00\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", "recursion"),
        (bytes(wire.MAX_FRAME + 1), "are allowed"),
    ],
)  # fmt: skip
def test_the_refusal_says_what_is_wrong(frame: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        wire.decode(frame)


def group(index: int) -> CacheGroup:
    return evolve(LAYOUT.groups[0], index=index)


def hello_with(**changes: Any) -> Hello:
    return evolve(HELLO_3, info=evolve(INFO, layout=evolve(LAYOUT, **changes)))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (GrantMessage(PULL, (0,), ""), "travels as a ticket"),
        (GrantMessage(evolve(GRANT, first=(1,)), (0,), ""), "1 first positions for 2 groups"),
        (GrantMessage(evolve(GRANT, first=(0,) * 65, blocks=BlockTable(((),) * 65)), (0,), ""), "65 groups"),
        (GrantMessage(evolve(GRANT, first=(0,), blocks=BlockTable.of(range(2**20 + 1))), (0,), ""), "1048577 blocks"),
        (GrantMessage(GRANT, (1, 1), ""), "twice"),
        (GrantMessage(GRANT, tuple(range(5000)), ""), "5000 legs"),
        (Done("t", (1, 1), (0,), ""), "twice"),
        (Done("t", (1,), (0,) * 65, ""), "65 groups"),
        (Command("drain", "", b"short", PROOF), "nonce of 5 bytes"),
        (Command("drain", "", NONCE, b"short"), "proof of 5 bytes"),
        (Hello(1, (1,)), "step 1 without a nonce"),
        (Hello(5), "bad Hello"),
        (Hello(4, echo=b"short"), "echo of 5 bytes"),
        (Hello(4, proof=b"short"), "proof of 5 bytes"),
        (Hello(1, (1,) * 2000, nonce=NONCE), "2000 versions"),
        (Hello(1, (1,), nonce=NONCE, facts={str(i): "" for i in range(2000)}), "2000 facts"),
        (Hello(4, metadata={str(i): b"" for i in range(2000)}), "2000 transports"),
        (evolve(HELLO_3, info=evolve(INFO, rank=0)), "rank 0, but its layout says 1"),
        (evolve(HELLO_3, info=evolve(INFO, addresses=("a:1",))), "1 addresses for 2 ranks"),
        (hello_with(dp_rank=1), "dp_rank 1 of 1"),
        (hello_with(pp_rank=0, stages=(("a",), ("b",))), "2 stages for pp_size 1"),
        (hello_with(groups=(group(1),)), "not numbered"),
        (hello_with(groups=tuple(map(group, range(65)))), "65 groups"),
        (hello_with(groups=(evolve(group(0), layers=LAYOUT.groups[0].layers * 4097),)), "4097 layers"),
        (hello_with(stages=(("a",) * 4097,)), "4097 layers"),
    ],
)
def test_well_typed_nonsense_is_refused(message: Message, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        wire.decode(wire.encode(sealed(message)))


def test_a_newer_peer_may_add_fields_reasons_and_elements() -> None:
    body = {"transfer": "t", "ok": False, "reason": "moon phase", "detail": "", "body": "", "colour": [1, {"a": 2}]}
    assert wire.decode(packed(1, 5, 1, 2, body, "more")) == Envelope(1, 1, 2, Ack("t", False, Reason.OTHER))


def test_a_long_detail_is_cut_and_a_long_frame_refused() -> None:
    refused = wire.decode(wire.encode(sealed(Ack("t", False, None, "x" * 5000)))).message
    assert isinstance(refused, Ack)
    assert refused.detail == "x" * wire.MAX_DETAIL
    with pytest.raises(LocalProtocolError, match="a frame holds"):
        wire.encode(sealed(Ack("t", True, body="x" * wire.MAX_FRAME)))
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        wire.encode(sealed(Ack("t", True, body="\ud800")))


# ------------------------------------------------------------------------ proofs, tickets


def test_each_field_changes_the_proof() -> None:
    base: dict[str, Any] = {
        "key": KEY,
        "dialler": True,
        "own_epoch": 1,
        "own_nonce": b"aa",
        "peer_epoch": 2,
        "peer_nonce": b"bb",
        "fingerprint": "cc",
    }
    changes: list[dict[str, Any]] = [
        {},
        {"key": b"other"},
        {"dialler": False},
        {"own_epoch": 2, "peer_epoch": 1},
        {"own_epoch": 3},
        {"peer_epoch": 3},
        {"own_nonce": b"aab", "peer_nonce": b"b"},
        {"own_nonce": b"a", "peer_nonce": b"abb"},
        {"peer_nonce": b"bbc", "fingerprint": "c"},
        {"fingerprint": ""},
    ]
    made = {wire.hello_proof(**{**base, **change}) for change in changes}
    assert len(made) == len(changes)
    assert {len(proof) for proof in made} == {wire.PROOF_BYTES}


def test_fields_of_a_command_cannot_be_shifted() -> None:
    made = {
        wire.command_proof(KEY, b"ch", "ab", "c", b"n"),
        wire.command_proof(KEY, b"ch", "a", "bc", b"n"),
        wire.command_proof(KEY, b"cha", "b", "c", b"n"),
        wire.command_proof(KEY, b"ch", "ab", "", b"cn"),
        wire.command_proof(b"", b"ch", "ab", "c", b"n"),
    }
    assert len(made) == 5


def test_proof_holds_only_where_it_is_equal() -> None:
    assert wire.proof_holds(PROOF, PROOF)
    assert not wire.proof_holds(PROOF, PROOF[:-1])
    assert not wire.proof_holds(PROOF, b"")


def test_key_id_names_a_key_and_no_key() -> None:
    assert wire.key_id(b"") == ""
    assert wire.key_id(b"a") != wire.key_id(b"b")
    assert len(wire.key_id(b"a")) == 8


def test_a_ticket_of_whole_seconds_holds_after_the_journey() -> None:
    ticket = wire.make_ticket(evolve(PULL, lease_s=30), KEY)
    assert wire.ticket_holds(wire.parse_ticket(wire.ticket_text(ticket)), KEY)


def test_a_ticket_without_key_is_still_checked() -> None:
    ticket = wire.make_ticket(PULL, b"")
    assert ticket.key_id == ""
    assert wire.ticket_holds(ticket, b"")
    assert not wire.ticket_holds(evolve(ticket, grant=evolve(PULL, tokens=1)), b"")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kvx1." + "A" * wire.MAX_TICKET, "characters"),
        ("kvx2.AAAA", "does not start with"),
        (wire.ticket_text(wire.make_ticket(GRANT, KEY)), "not for pull"),
        (wire.ticket_text(wire.make_ticket(evolve(PULL, first=()), KEY)), "0 first positions"),
        (wire.ticket_text(wire.make_ticket(PULL, KEY))[:-8], "not a ticket"),
    ],
)
def test_the_refusal_of_a_ticket_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        wire.parse_ticket(text)


def _write_missing() -> None:
    ticket = wire.make_ticket(PULL, KEY)
    made: dict[str, tuple[bytes, Any]] = {
        name: (wire.encode(sealed(message)), described(message)) for name, message in SAMPLES.items()
    }
    facts = {"key": base64.b64encode(KEY).decode(), "ticket": json.loads(msgspec.json.encode(ticket))}
    made["ticket"] = (wire.ticket_text(ticket).encode(), facts)
    made["proofs"] = (b"", proofs())
    for name, (data, value) in made.items():
        binary, text = VECTORS / f"{name}.bin", VECTORS / f"{name}.json"
        if data and not binary.exists():
            binary.write_bytes(data)
        if not text.exists():
            text.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    _write_missing()
