"""The transport bench measures verified copies, and notices one that is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from kvx.bench.baselines.plain_socket import deal
from kvx.bench.slab import Slab
from kvx.bench.transport import run
from kvx.core.errors import PluginError


@pytest.mark.parametrize("pieces", [1, 64])
def test_every_lane_copies_and_is_compared(pieces):
    found = run(("tcp",), ("write", "read"), nbytes=1 << 20, pieces=pieces, repeat=2)
    lanes = {(result["name"], result["op"]) for result in found["results"]}
    assert lanes == {(name, op) for name in ("socket", "tcp") for op in ("write", "read")} | {("memcpy", "write")}
    for result in found["results"]:
        assert result["verified"]
        assert (result["bytes"], result["pieces"], len(result["samples"])) == (1 << 20, pieces, 2)
        speed = result["gbps"]
        assert 0 < speed["min"] <= speed["median"] <= speed["p99"] <= speed["max"]
    assert [(ratio["name"], ratio["op"]) for ratio in found["ratios"]] == [("tcp", "write"), ("tcp", "read")]
    assert all(ratio["median"] > 0 for ratio in found["ratios"])


@pytest.mark.parametrize("pieces", [1, 16])
def test_a_slab_tells_samples_places_and_gaps(pieces):
    slab, other = Slab(4096, pieces, seed=1), Slab(4096, pieces, seed=2)
    slab.fill(5)
    assert slab.matches(5)
    assert not slab.matches(6)
    for source, destination in zip(slab.views, other.views, strict=True):
        destination[:] = source
    assert other.matches(5)
    first, last = slab.views[0], slab.views[-1]
    first[0] ^= 1
    assert not slab.matches(5)
    first[0] ^= 1
    last[-1] ^= 1
    assert not slab.matches(5)


def test_a_byte_in_a_gap_is_noticed():
    slab = Slab(4096, 16, seed=1)
    memory = np.asarray(slab._rows)
    memory[3, -1] = 1
    assert not slab.matches(0)


@pytest.mark.parametrize("sizes", [[10], [3, 3, 4], [1] * 10, [9, 1]])
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_shares_of_the_streams_are_everything_in_order(sizes, streams):
    memory = memoryview(bytes(range(10)))
    ends = np.cumsum(sizes)
    dealt = deal([memory[end - size : end] for end, size in zip(ends, sizes, strict=True)], streams)
    assert len(dealt) <= streams
    assert b"".join(b"".join(share) for share in dealt) == bytes(range(10))


def test_bad_arguments():
    with pytest.raises(ValueError, match="equal pieces"):
        run(nbytes=10, pieces=3, repeat=1)
    with pytest.raises(ValueError, match="repeat"):
        run(repeat=0)
    with pytest.raises(PluginError, match="no transport"):
        run(("nothing",), nbytes=64, repeat=1)
