"""Long runs of the simulation: stopped and gone on with, bounded, and refused where the worlds are others."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest
from attrs import evolve

from kvx.core.errors import ConfigError, KvxError
from kvx_conformance import campaign
from kvx_conformance.campaign import Tally
from kvx_conformance.commands import sim
from kvx_conformance.sim import Summary, run_world

SIM = "import sys; from kvx_conformance.commands import sim; sys.exit(sim(sys.argv[1:]))"


PRESSES_CTRL_C = """
import os, signal
save = c.save
def pressed(tally, record):
    c.save = save
    save(tally, record)
    os.killpg(0, signal.SIGINT)
c.save = pressed
"""
"""When something is recorded for the first time, so that it is neither too early nor too late."""


def recorded(file: Path) -> Tally:
    return msgspec.json.decode(file.read_bytes(), type=Tally)


def wait_for(file: Path) -> None:
    until = time.monotonic() + 40
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)


def test_stopped_by_ctrl_c_and_gone_on_with_it_counts_every_world_once(tmp_path: Path) -> None:
    record, whole = tmp_path / "record", tmp_path / "whole.json"
    words = ["--first", "7000", "--seeds", "100", "--jobs", "2", "--record", str(record)]
    program = "import kvx_conformance.campaign as c; c._SAVE_S = 0; c.source_digest = lambda: 'x'\n"
    first = subprocess.run(
        [sys.executable, "-c", program + PRESSES_CTRL_C + SIM, *words],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert first.returncode == 130, first.stderr
    assert "the same command goes on from here" in first.stderr
    stopped = recorded(record)
    assert 0 < stopped.worlds < 100

    second = subprocess.run([sys.executable, "-c", program + SIM, *words], capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert f"going on after {stopped.worlds} of 100 worlds" in second.stderr
    assert sim([*words[:4], "--json", str(whole)]) == 0
    at_once, in_two = json.loads(whole.read_text()), recorded(record)
    assert (in_two.worlds, in_two.upto, in_two.beyond) == (100, 10, [])
    assert in_two.totals == {name: at_once[name] for name in campaign.COUNTED}
    assert (at_once["first"], at_once["seeds"], at_once["jobs"]) == (7000, 100, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_under_way_at_ctrl_c_is_counted(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally(0, 10_000, "x")
    taken: list[int] = []
    add = Tally.add

    def interrupted(self: Tally, number: int, summaries: list[Summary]) -> None:
        if not taken:
            os.kill(os.getpid(), signal.SIGINT)
        taken.append(number)
        add(self, number, summaries)

    monkeypatch.setattr(Tally, "add", interrupted)
    monkeypatch.setattr(campaign, "BATCH", 1)
    assert campaign.run(tally, jobs, None, print)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert taken[0] == 0 or jobs > 1
    assert len(set(taken)) == len(taken) == tally.worlds == tally.upto + len(tally.beyond)
    assert tally.worlds <= 1 if jobs == 1 else tally.worlds <= campaign._AHEAD * jobs


def test_a_killed_process_is_a_failure_with_a_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Killed(ProcessPoolExecutor):
        def submit(self, *_: object, **__: object) -> Future[object]:  # type: ignore[override]
            return super().submit(os._exit, 9)

    monkeypatch.setattr(campaign, "ProcessPoolExecutor", Killed)
    with pytest.raises(KvxError, match="was killed"):
        campaign.run(Tally(0, 100, "x"), 2, tmp_path / "record", print)
    assert recorded(tmp_path / "record").worlds == 0


def test_its_processes_end_with_it(tmp_path: Path) -> None:
    record = tmp_path / "record"
    program = "import kvx_conformance.campaign as c; c._SAVE_S = 0\n" + SIM
    words = ["--seeds", "100000", "--jobs", "2", "--record", str(record)]
    with subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE) as child:
        wait_for(record)
        child.kill()
        assert child.stdout is not None
        assert child.stdout.read() == b""  # comes when nobody holds the other end any more


def test_a_world_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(seed: int) -> Summary:
        raise ZeroDivisionError(seed)

    monkeypatch.setattr(campaign, "run_world", raises)
    with pytest.raises(ZeroDivisionError) as caught:
        campaign.run(Tally(7, 1, "x"), 1, None, print)
    assert caught.value.__notes__ == ["in the world of seed 7"]


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
    record.write_bytes(b'{"first": "\xff"}')
    assert sim(["--seeds", "20", "--record", str(record)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    campaign.save(Tally(0, 20, campaign.source_digest(), totals={"ok": 1}), record)
    assert sim(["--seeds", "20", "--record", str(record)]) == 2
    assert "not what was written" in capsys.readouterr().err


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
    for number, summaries in campaign._batches(tally, 2, threading.Event()):
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


def test_on_a_terminal_there_is_one_line_that_fits() -> None:
    ours, theirs = pty.openpty()
    program = "import kvx_conformance.campaign as c; c._BAR_S = 0\n" + SIM
    child = subprocess.Popen(
        [sys.executable, "-c", program, "--seeds", "60", "--jobs", "1"],
        stderr=theirs,
        env={**os.environ, "COLUMNS": "60"},
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 4096):
            written += piece
    except OSError:  # how a terminal says that its other end is closed
        pass
    finally:
        os.close(ours)
    assert child.wait(60) == 0
    bars = [bar for bar in written.decode().split("\r\x1b[K")[1:-1] if bar]
    assert len(bars) == 6
    assert bars[0].startswith(f"[{'###':<20}] 10 of 60 worlds, ")
    assert all("\n" not in bar and len(bar) == 59 for bar in bars), bars
    assert written.count(b"\n") == 1
