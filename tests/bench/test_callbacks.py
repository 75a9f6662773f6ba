"""The callbacks bench drives real adapters on real instances, and says which floors are missed."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from kvx.bench import callbacks
from kvx.bench.cache import new_cache, pattern
from kvx.bench.callbacks import Shape, floors, options_of
from kvx.core.errors import PluginError, TransportError
from kvx.report import summary

SMALL = Shape(layers=2, blocks=4, block_bytes=4096)


@pytest.mark.parametrize("engine", ["reference", "vllm", "sglang"])
def test_each_adapter_is_driven_with_open_transfers_and_moving_loads(engine: str) -> None:
    found = callbacks.run(engine, opened=(0, 30), shape=SMALL, rounds=2, steps=4)
    assert found["verified"]
    assert found["bytes"] == SMALL.nbytes
    rows = [(row["open"], row["moving"], len(row["samples"])) for row in found["results"]]
    assert rows == [(0, False, 8), (0, True, 8), (30, False, 8), (30, True, 8)]
    for row in found["results"]:
        assert 0 < row["step_us"]["min"] <= row["step_us"]["median"] <= row["step_us"]["p99"]
        assert 0 < row["cpu_us"]["median"] <= row["step_us"]["max"]
    assert len(found["floors"]) == 6


def test_bytes_that_are_not_the_producers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "pattern", lambda *place: pattern(*place[:3], sample=1))
    assert not callbacks.run(opened=(0,), moving=(True,), shape=SMALL, rounds=1, steps=1)["verified"]


def test_a_load_that_fails_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "options_of", lambda name: evolve(options_of(name), peers=("192.0.2.1",)))
    with pytest.raises(TransportError, match="a load has failed"):
        callbacks.run(opened=(0,), moving=(True,), shape=SMALL, rounds=1, steps=1)


def test_floors_compare_the_tail_and_the_growth() -> None:
    def row(opened: int, moving: bool, *times: float) -> dict[str, object]:
        return {"open": opened, "moving": moving, "step_us": summary(times)}

    rows = [row(0, False, 100), row(10_000, False, 140), row(0, True, 200), row(10_000, True, 501)]
    assert [(floor["limit"], floor["value"], floor["met"]) for floor in floors(rows)] == [
        (150, 100, True),
        (150, 140, True),
        (500, 200, True),
        (500, 501, False),
        (2, pytest.approx(1.4), True),
        (2, pytest.approx(2.505), False),
    ]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        callbacks.run(opened=(-1,))
    with pytest.raises(ValueError, match="at least 1"):
        callbacks.run(rounds=0)
    with pytest.raises(ValueError, match="at least 1"):
        new_cache(1, 0, 1)
    with pytest.raises(PluginError, match="cannot be driven"):
        callbacks.run("builtins:object")


def test_a_pattern_tells_layers_blocks_and_samples() -> None:
    rows = np.concatenate([pattern(layer, 3, 64, sample) for layer in range(2) for sample in range(2)])
    assert len(np.unique(rows, axis=0)) == len(rows)
