"""What needs no NIXL: cutting, bounds, words, metadata, options."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core.errors import ConfigError, RemoteProtocolError, TransportError
from kvx.core.model import Descriptors, Region
from kvx_nixl.agent import NixlError, agent_of
from kvx_nixl.backends import LIBFABRIC, UCX
from kvx_nixl.checks import examine, locked_memory, providers, symbol_version
from kvx_nixl.efa import devices
from kvx_nixl.moves import bounds, note, read_note, split
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions
from kvx_nixl.words import Contact, Introduce, Landed, Reader, Ring, agents_of, encode

AGENT = b"nixlSerDes|Agent" + (5).to_bytes(8, "little") + b"a/0/1" + b"|Conns"


@settings(deadline=None)
@given(st.lists(st.integers(1, 900), min_size=1, max_size=20), st.integers(1, 700))
def test_split_pieces_hold_the_same_bytes(lengths: list[int], limit: int) -> None:
    starts = np.cumsum([0, *[length + 10 for length in lengths[:-1]]])
    table = np.array([[start, length, 3] for start, length in zip(starts, lengths, strict=True)], dtype=np.uint64)
    cut = split(table, limit)
    assert cut[:, 1].max() <= limit and cut.flags.c_contiguous and (cut[:, 2] == 3).all()
    bytes_of = [np.concatenate([np.arange(s, s + n) for s, n, _ in rows.astype(int)]) for rows in (table, cut)]
    assert np.array_equal(*bytes_of)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=80), st.integers(100, 400), st.integers(1, 9))
def test_posts_take_each_piece_once_and_are_bounded(lengths: list[int], nbytes: int, pieces: int) -> None:
    posts = list(bounds(np.array(lengths, dtype=np.uint64), nbytes, pieces))
    assert [index for start, stop, _ in posts for index in range(start, stop)] == list(range(len(lengths)))
    for start, stop, taken in posts:
        assert taken == sum(lengths[start:stop]) <= nbytes
        assert stop - start <= pieces


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_a_foreign_notification_is_no_note(data: bytes) -> None:
    found = read_note(data)
    assert found is None or note(*found) == data


def test_notes_come_back() -> None:
    assert read_note(note(2**63, 2**32 - 1)) == (2**63, 2**32 - 1)


@pytest.mark.parametrize("piece", [(1, 0, 1), (0, -1, 1), (0, 100, 1), (0, 99, 2), (0, 0, -1), (0, 2**62, 1)])
def test_addresses_of_nothing_else_than_registered_memory(piece: tuple[int, int, int]) -> None:
    regions = Regions.of([Region(0, 4096, 100), Region(7, 8192, 10, "cuda:3")])
    table, vram = regions.locate(Descriptors.of([(0, 99, 1), (7, 2, 8)]))
    assert table.tolist() == [[4195, 1, 0], [8194, 8, 3]] and vram.tolist() == [False, True]
    with pytest.raises(TransportError, match="not registered"):
        regions.locate(Descriptors.of([(0, 0, 1), piece]))


@pytest.mark.parametrize(
    "regions",
    [
        [Region(0, 4096, 8, "npu:0")],
        [Region(0, 4096, 8, "cuda:x")],
        [Region(0, 4096, 8), Region(0, 9000, 8)],
        [Region(0, 0, 8)],
        [Region(0, 2**63 - 4, 8)],
    ],
)
def test_regions_that_cannot_be(regions: list[Region]) -> None:
    with pytest.raises(TransportError):
        Regions.of(regions)


@pytest.mark.parametrize(
    "data", [b"", AGENT[:10], AGENT[:20], AGENT[:28], AGENT.replace(b"nixl", b"lxin"), b"\x80" * 99]
)
def test_metadata_of_no_agent(data: bytes) -> None:
    assert agent_of(AGENT) == "a/0/1"
    with pytest.raises(NixlError):
        agent_of(data)


def test_a_peer_cannot_introduce_damaged_metadata_or_another_ones_agent() -> None:
    name = agents_of("a#0", b"i" * 16) + "1"
    good = Introduce.of(name, AGENT, [])
    good.check("a#0", b"i" * 16)
    for bad in (
        msgspec.structs.replace(good, metadata=AGENT[:-1]),
        Introduce.of(agents_of("a#0", b"j" * 16) + "1", AGENT, []),
        Introduce.of(agents_of("b#0", b"i" * 16) + "1", AGENT, []),
    ):
        with pytest.raises(RemoteProtocolError):
            bad.check("a#0", b"i" * 16)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_a_stream_of_anything_ends_in_one_kind_of_error(data: bytes) -> None:
    reader = Reader()
    try:
        reader.feed(data)
    except RemoteProtocolError:
        return
    assert len(data) < 4 or int.from_bytes(data[:4]) + 4 > len(data) or reader


def test_words_are_cut_wherever_the_stream_breaks() -> None:
    words = [Ring(True, 5), Landed(3, [0, 1, 2**32 - 1]), Ring(False, 0)]
    stream = b"".join(encode(word) for word in words)
    reader = Reader()
    assert [word for byte in stream for word in reader.feed(bytes([byte]))] == words
    with pytest.raises(RemoteProtocolError, match="allowed"):
        reader.feed((4097).to_bytes(4))


@pytest.mark.parametrize(
    "values",
    [
        [2, "UCX", "127.0.0.1", 1, b"i" * 16],
        [1, "LIBFABRIC", "127.0.0.1", 1, b"i" * 16],
        [1, "UCX", "localhost", 1, b"i" * 16],
        [1, "UCX", "127.0.0.1", 0, b"i" * 16],
        [1, "UCX", "127.0.0.1", 1, b"i" * 15],
        [1, "UCX"],
        {"version": 1},
    ],
)
def test_metadata_that_cannot_be_used(values: Any) -> None:
    good = [1, "UCX", "127.0.0.1", 1, b"i" * 16]
    assert Contact.decode(msgspec.msgpack.encode(good), "UCX").port == 1
    for data in (msgspec.msgpack.encode(values), msgspec.msgpack.encode(good)[:-1], b""):
        with pytest.raises(TransportError):
            Contact.decode(data, "UCX")


@pytest.mark.parametrize(
    "section",
    [
        {"streams": 2},
        {"port": True},
        {"port": 70000},
        {"tls": 3},
        {"params": {"a": 1}},
        {"preload": "x"},
        {"preload": [1]},
        {"insecure": 1},
        {"post_bytes": 1},
        {"call_s": 0},
    ],
)
def test_options_that_cannot_be(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options.of(section)


def test_without_a_secret_nothing_of_nixl_leaves_loopback() -> None:
    closed, open_ = Options.of({}), Options.of({"secret": b"s" * 16, "tls": "rc", "devices": "mlx5_0:1"})
    assert UCX.params(closed) == {"engine_config": "NET_DEVICES=lo"}
    assert UCX.params(open_) == {"engine_config": "TLS=rc,NET_DEVICES=mlx5_0:1"}
    assert UCX.params(Options.of({"trusted_network": True})) == {}
    LIBFABRIC.check(open_)
    with pytest.raises(ConfigError, match="trusted_network"):
        LIBFABRIC.check(closed)


def test_efa_devices_are_told_from_other_verbs_devices(tmp_path: Any) -> None:
    for name, driver in (("rdmap1", "efa"), ("mlx5_0", "mlx5_core"), ("rdmap0", "efa")):
        target = tmp_path / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        device = tmp_path / "infiniband" / name / "device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(target)
    assert devices(tmp_path / "infiniband") == ["rdmap0", "rdmap1"]
    assert devices(tmp_path / "nothing") == []


def test_the_digest_is_over_all_of_the_metadata() -> None:
    assert Introduce.of("a", AGENT, []).digest == hashlib.blake2b(AGENT, digest_size=16).digest()


def test_the_newest_symbol_version_counts() -> None:
    assert symbol_version(b"FABRIC_1.0\0FABRIC_1.10\0FABRIC_1.9\0") == 10
    assert symbol_version(b"libfabric") is None


def test_locked_memory_matters_where_there_is_a_device() -> None:
    assert locked_memory(resource.RLIM_INFINITY, True).ok and locked_memory(8 << 20, False).ok
    low = locked_memory(8 << 20, True)
    assert not low.ok and "memlock" in low.fix


def test_efa_devices_need_their_provider() -> None:
    assert providers(["tcp", "efa"], ["rdmap0"]).ok and providers(["tcp"], []).ok
    without = providers(["tcp"], ["rdmap0"])
    assert not without.ok and without.fix


def test_where_nixl_is_not_installed_it_is_one_line_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx_nixl.checks._nixl", lambda: None)
    (only,) = examine({})
    assert only.ok and "kvx[nixl]" in only.detail
