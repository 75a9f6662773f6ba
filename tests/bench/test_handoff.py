"""The handoff bench moves a prefill's bytes in each mode, compares them, and says what was not hidden."""

from __future__ import annotations

import pytest

from kvx.bench import handoff
from kvx.bench.cache import pattern
from kvx.bench.handoff import MODES, Shape
from kvx.core.errors import PluginError

SMALL = {"layers": 4, "nbytes": 1 << 16, "pieces": 16}


def test_every_mode_hands_over_the_same_bytes() -> None:
    found = handoff.run(prefill_ms=4, repeat=2, **SMALL)
    assert [(row["mode"], row["verified"], len(row["samples"])) for row in found["results"]] == [
        (mode, True, 2) for mode in MODES
    ]
    for row in found["results"]:
        for name in ("prefill_ms", "transfer_ms", "exposed_ms", "total_ms"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
        assert row["total_ms"]["max"] >= row["prefill_ms"]["min"] + row["exposed_ms"]["min"]
    rows = {row["mode"]: row for row in found["results"]}
    for mode in ("pull", "pull-thread", "push"):
        assert rows[mode]["transfer_ms"] == rows[mode]["exposed_ms"]
    layerwise = rows["push-layerwise"]
    assert layerwise["transfer_ms"]["median"] > layerwise["exposed_ms"]["median"]
    assert [ratio["name"] for ratio in found["ratios"]] == [
        "exposed, push-layerwise over push",
        "exposed, push over pull-thread",
        "exposed, pull-thread over pull",
    ]
    assert [ratio.get("limit") for ratio in found["ratios"]] == [0.2, 1.0, None]


@pytest.mark.parametrize("mode", MODES)
def test_wrong_bytes_are_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "pattern", lambda *place: pattern(*place[:3], sample=place[3] + 1))
    (row,) = handoff.run(prefill_ms=1, modes=[mode], repeat=1, **SMALL)["results"]
    assert not row["verified"]


def test_the_pieces_are_no_neighbours() -> None:
    shape = Shape(layers=2, nbytes=1 << 12, pieces=16)
    ids = sorted(shape.ids(1))
    assert (ids, shape.block_bytes, shape.cache().shape) == ([0, 2, 4, 6, 8, 10, 12, 14], 256, (2, 16, 256))
    assert shape.ids(1) != shape.ids(2)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="equal pieces"):
        Shape(layers=3, nbytes=1 << 12, pieces=16)
    with pytest.raises(ValueError, match="no such mode: pul "):
        handoff.run(modes=["pul"])
    with pytest.raises(ValueError, match="at least 1"):
        handoff.run(repeat=0)
    with pytest.raises(PluginError, match="no transport"):
        handoff.run("nothing", **SMALL)
