from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvx import demo
from kvx.core.model import Mode
from kvx.demo import Result
from kvx.driver import SmallModel

SMALL = SmallModel((), (), 16, range(3, 2000))


def result(mode: Mode = Mode.PUSH, **changed: Any) -> Result:
    fields = {"requests": 20, "tokens_equal": 20, "control_tokens_equal": 0, "transfers_ok": 20, "bytes": 3 << 20}
    return Result(**{"mode": mode, **fields, "ttft_ms": {"median": 12.34}, **changed})


def test_prompts_lie_around_block_borders_and_never_repeat() -> None:
    work = demo.prompts(SMALL, 20, 0)
    lengths = [len(prompt) for prompt in work]
    assert {(length + 1) % 16 for length in lengths} == {0, 1, 2}
    assert min(lengths) == 15
    assert 14 * 16 <= max(lengths) < 16 * 16
    assert all(token in SMALL.tokens for prompt in work for token in prompt)
    assert demo.prompts(SMALL, 20, 0) == work
    others = demo.prompts(SMALL, 20, 1)
    assert not {tuple(prompt[:15]) for prompt in work} & {tuple(prompt[:15]) for prompt in others}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "Good: "),
        ({"control_tokens_equal": 19}, "Good: "),
        ({"tokens_equal": 19}, "BAD: with push, tokens differ"),
        ({"control_tokens_equal": 20}, "nothing is proven"),
        ({"transfers_ok": 18}, "BAD: 2 transfers of push failed"),
    ],
)
def test_what_is_good_and_what_is_said(changed: dict[str, Any], said: str) -> None:
    one = result(**changed)
    assert one.good == said.startswith("Good")
    assert said in demo.verdict([result(Mode.PULL), one])


def test_the_table_is_for_a_person() -> None:
    head, line = demo.table([result(control_tokens_equal=1)])
    assert head.split("  ")[0] == "mode"
    assert line.split() == ["push", "20", "of", "20", "1", "of", "20", "12.3", "ms", "3.0", "MiB"]


def test_the_event_log_tells_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EVENTS_S", 0.0)
    path = tmp_path / "events.jsonl"
    lines = [
        {"ok": True, "mode": "push", "bytes": 5},
        {"ok": False, "mode": "push", "bytes": 7},
        {"ok": True, "mode": "pull", "bytes": 9},
        {"ok": True, "mode": "push", "bytes": 1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert demo._received(path, Mode.PUSH, 3) == [5, 1]
    assert demo._received(tmp_path / "none", Mode.PUSH, 1) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_demo_of_the_reference_engine(tmp_path: Path, evidence: Callable[[str, Mapping[str, Any]], None]) -> None:
    command = [sys.executable, "-m", "kvx", "demo", "--engine", "reference", "--mode", "both", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # one object and nothing else
    assert (told["schema"], told["engine"]) == ("kvx.demo/1", "reference")
    evidence("demo_reference", {"modes": told["modes"]})
    assert [one["mode"] for one in told["modes"]] == ["push", "pull"]
    for one in told["modes"]:
        assert (one["requests"], one["tokens_equal"], one["control_tokens_equal"]) == (20, 20, 0)
        assert one["bytes"] > 0
        assert set(one["ttft_ms"]) == {"min", "mean", "median", "p99", "max"}
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("kvx-cluster-")] == []  # only logs stay
