"""Long runs of the simulation: stopped and gone on with, bounded, and refused where the worlds are others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from attrs import evolve

from kvx.core.errors import ConfigError
from kvx_conformance import campaign
from kvx_conformance.campaign import Tally
from kvx_conformance.commands import sim
from kvx_conformance.sim import run_world

SIM = "import sys; from kvx_conformance.commands import sim; sys.exit(sim(sys.argv[1:]))"


def recorded(file: Path) -> Tally:
    return msgspec.json.decode(file.read_bytes(), type=Tally)


def test_stopped_by_ctrl_c_and_gone_on_with_it_counts_every_world_once(tmp_path: Path) -> None:
    record, whole = tmp_path / "record", tmp_path / "whole.json"
    words = ["--first", "7000", "--seeds", "240", "--jobs", "2", "--record", str(record)]
    first = subprocess.Popen(
        [sys.executable, "-c", "import kvx_conformance.campaign as c; c._SAVE_S = 0\n" + SIM, *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not record.exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGINT)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "the same command goes on from here" in told
    stopped = recorded(record)
    assert 0 < stopped.worlds < 240

    second = subprocess.run([sys.executable, "-c", SIM, *words], capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert f"going on after {stopped.worlds} of 240 worlds" in second.stderr
    assert sim([*words[:4], "--json", str(whole)]) == 0
    at_once, in_two = json.loads(whole.read_text()), recorded(record)
    assert (in_two.worlds, in_two.upto, in_two.beyond) == (240, 24, [])
    assert in_two.totals == {name: at_once[name] for name in campaign.COUNTED}


def test_a_record_of_other_code_or_other_seeds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record"
    campaign.save(Tally(0, 20, "other"), record)
    assert sim(["--seeds", "20", "--record", str(record)]) == 2
    assert "is of other source code" in capsys.readouterr().err
    assert sim(["--seeds", "30", "--record", str(record)]) == 2
    assert "name another file" in capsys.readouterr().err
    record.write_text("{")
    assert sim(["--seeds", "20", "--record", str(record)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_record_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record"
    campaign.save(Tally(0, 20, "a"), record)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        campaign.save(Tally(0, 20, "b"), record)
    assert recorded(record).source == "a"


def test_what_is_kept_does_not_grow_with_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []

    class Pool:
        def __init__(self, *_: object, **__: object) -> None:
            self.open = 0

        def submit(self, *_: object) -> Future[list[object]]:
            self.open += 1
            under_way.append(self.open)
            future: Future[list[object]] = Future()
            future.set_result([])
            return future

        def shutdown(self, **_: object) -> None:
            pass

    pool = Pool()
    monkeypatch.setattr(campaign, "ProcessPoolExecutor", lambda *_, **__: pool)
    tally = Tally(0, 100_000, "x")
    for number, summaries in campaign._batches(tally, 2):
        pool.open -= 1
        tally.add(number, summaries)
    assert (tally.upto, tally.beyond) == (10_000, [])
    assert max(under_way) <= 16
    broken = run_world(1)
    for number in range(3000):
        tally.add(10_000 + number, [evolve(broken, seed=number, violations=("wrong",))])
    assert (len(tally.violations), tally.violated) == (campaign.KEPT, 3000)


def test_where_nobody_watches_few_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(["--seeds", "60", "--jobs", "1"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
