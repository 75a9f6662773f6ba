"""The page is enough to write a second implementation: its formulas, done again here, give the golden bytes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvx.core.messages import KINDS
from kvx.core.model import Layout
from kvx_conformance import protocol_doc, rules
from kvx_conformance.catalogue import SCENARIOS

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "conformance/kvx_conformance/vectors/v1"
KEY = b"a shared secret"
NONCE = bytes(range(16))


def vector(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text())


def joined(*fields: bytes) -> bytes:
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def mac(*fields: bytes) -> bytes:
    return hmac.new(KEY, joined(*fields), hashlib.sha256).digest()


def test_the_proofs_are_what_the_page_says() -> None:
    golden = vector("proofs")
    proof = bytes.fromhex(golden["command_proof"])
    other = msgspec.msgpack.decode((VECTORS / "hello-2.bin").read_bytes())[4]["proof"]
    assert hashlib.sha256(joined(b"kvx key id 1", KEY)).hexdigest()[:8] == golden["key_id"]
    assert mac(b"kvx command 1", NONCE, b"release", b"kvx1.x", other) == proof
    for side in ("dialler", "acceptor"):
        said = mac(b"kvx hello 1", side.encode(), struct.pack(">Q", 1), NONCE, struct.pack(">Q", 2), other, b"00ff")
        assert said.hex() == golden[f"hello_proof {side}"]


def test_a_tickets_text_and_mac_are_what_the_page_says() -> None:
    text = (VECTORS / "ticket.bin").read_text()
    code = text.removeprefix("kvx1.")
    content = msgspec.msgpack.decode(base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)))
    assert list(content) == sorted(content) == ["grant", "key_id", "mac"]
    grant = dict(sorted(content["grant"].items()))
    grant["owner"] = dict(sorted(grant["owner"].items()))
    assert mac(b"kvx ticket 1", msgspec.msgpack.encode(grant)) == content["mac"]
    assert base64.b64encode(content["mac"]).decode() == vector("ticket")["ticket"]["mac"]


def test_the_fingerprint_is_what_the_page_says() -> None:
    layout = Layout("m", "bf16", "v", (), 8)
    text = "dtype=bf16\ngroups=0\nmodel=m\nvariant=v"
    assert layout.fingerprint() == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_an_envelope_is_what_the_page_says() -> None:
    version, kind, from_epoch, to_epoch, body = msgspec.msgpack.decode((VECTORS / "ack.bin").read_bytes())
    said = vector("ack")
    assert [version, kind, from_epoch, to_epoch] == [said[n] for n in ("version", "kind", "from_epoch", "to_epoch")]
    assert body == said["body"]


def test_each_field_of_each_message_is_in_the_table() -> None:
    text = protocol_doc.fields()
    for kind in KINDS.values():
        for name in kind.__annotations__:
            assert f"| `{name}` |" in text, (kind, name)
    assert "| `epoch` | int 0 to 2^63-1 | `0` |" in text
    assert "| `mode` | text: `push`, `pull` | required |" in text


@pytest.mark.parametrize("title", protocol_doc.SCENES)
def test_the_diagrams_show_a_whole_transfer(title: str) -> None:
    (diagram,) = [part for part in protocol_doc.sequences().split("### ") if part.startswith(title)]
    assert diagram.count("Hello 1") == (2 if "starts again" in title else 1)
    assert "Outcome(" in diagram
    assert "Released" in diagram


def test_diagrams_are_the_same_each_time() -> None:
    assert protocol_doc.sequences() == protocol_doc.sequences()


def test_sentences_have_ids_of_known_areas_that_come_once_and_bind() -> None:
    areas, found = rules.load()
    ids = [rule.id for rule in found]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & SCENARIOS.keys()
    assert {rule.area for rule in found} == areas.keys()
    for rule in found:
        assert re.fullmatch(r"KVX-[A-Z]{3}-[0-9]{3}", rule.id)
        assert re.search(r"\b(MUST|SHOULD|MAY|is good for|counts)\b", rule.text), rule.id
        assert set(rule.basis) <= {f"R{n}" for n in range(1, 16)}
    assert {basis for rule in found for basis in rule.basis} >= {f"R{n}" for n in range(1, 16)} - {"R12"}
