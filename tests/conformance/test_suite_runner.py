"""The runner on cases made for it: every verdict, both kinds of hang, death, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvx.core.model import Op
from kvx_conformance.suite import runner, stacks
from kvx_conformance.suite.case import Verdict
from kvx_conformance.suite.result import Result
from kvx_conformance.suite.runner import Run, Work, perform
from kvx_conformance.suite.subject import Feature, Subject
from kvx_conformance.suite.worker import Order

CASES = """
import contextlib, ctypes, os, subprocess, sys, threading, time
from kvx_conformance.suite.case import NotExercised, case

def one(name, **more):
    return case("KVX-ENV-001", name, "a case made for the runner", **more)

@one("passes")
def passes(context):
    print("not an answer", flush=True)
    context.check(context.rng.random() < 1 and context.folder.is_dir(), "never")

@one("fails")
def fails(context):
    sys.stderr.write("said before it failed\\n")
    context.check(False, "two is not three")

@one("asserts")
def asserts(context):
    context.checks += 1
    assert 1 == 2

@one("compares-nothing")
def compares_nothing(context): pass

@one("not-exercised")
def not_exercised(context): raise NotExercised("it ended before")

@one("breaks")
def breaks(context): raise KeyError("the suite's own")

@one("leaves")
def leaves(context): raise SystemExit(0)

@one("dies")
def dies(context): os._exit(3)

@one("hangs")
def hangs(context):
    context.check(True, "")
    try:
        with contextlib.suppress(Exception):
            threading.Event().wait()
    except Exception:
        pass

@one("hangs-natively")
def hangs_natively(context):
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)

@one("ends-badly")
def ends_badly(context):
    @contextlib.contextmanager
    def held():
        yield
        raise AssertionError("it is still open")
    context.enter(held())
    context.check(True, "")

@one("leaves-a-child")
def leaves_a_child(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
    print("child", child.pid, flush=True)
    threading.Thread(target=time.sleep, args=(600,)).start()
    context.check(False, "look at the child")

@one("slow")
def slow(context):
    time.sleep(0.5)
    context.check(True, "")
"""
GOOD = Subject("kvx_conformance.faults:dropping")


@pytest.fixture(autouse=True)
def _made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_cases.py").write_text(CASES)
    (tmp_path / "made_subjects.py").write_text(SUBJECTS)
    (tmp_path / "room").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "room"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def orders(*names: str, limit_s: float = 20.0) -> Work:
    return Work(tuple(Order(f"KVX-ENV-001.{name}", limit_s) for name in names))


def hanging(name: str) -> Work:
    """A case that hangs, and one after it that has all the time it needs."""
    return Work((*orders(name, limit_s=2.0).orders, *orders("passes").orders))


def perform_work(work: Work, jobs: int = 1, subject: Subject = GOOD) -> Run:
    made = Run(subject, lambda present: work, ("made_cases",))
    perform([made], jobs, lambda run, result: None)
    return made


def run(*names: str, jobs: int = 1, subject: Subject = GOOD) -> Run:
    return perform_work(orders(*names), jobs, subject)


def verdicts(made: Run) -> dict[str, Verdict]:
    return {name.partition(".")[2]: result.verdict for name, result in made.results.items()}


def only(made: Run) -> Result:
    (result,) = made.results.values()
    return result


def test_each_verdict_comes_from_what_happened() -> None:
    made = run(
        "passes", "fails", "asserts", "compares-nothing", "not-exercised", "breaks", "leaves", "ends-badly", jobs=2
    )
    assert verdicts(made) == {
        "passes": Verdict.PASS,
        "fails": Verdict.FAIL,
        "asserts": Verdict.FAIL,
        "compares-nothing": Verdict.NOT_EXERCISED,
        "not-exercised": Verdict.NOT_EXERCISED,
        "breaks": Verdict.ERROR,
        "leaves": Verdict.ERROR,
        "ends-badly": Verdict.FAIL,
    }
    results = {name.partition(".")[2]: result for name, result in made.results.items()}
    assert (results["passes"].checks, results["passes"].output) == (1, "")
    assert results["fails"].detail == "two is not three"
    assert "two is not three" in results["fails"].trace
    assert results["fails"].output == "said before it failed"
    assert results["ends-badly"].detail == "At its end: it is still open"
    assert not made.holds
    assert made.declared is not None and Op.WRITE in made.declared.ops


def test_a_case_that_hangs_fails_with_its_stacks_and_the_next_one_runs() -> None:
    made = perform_work(hanging("hangs"))
    assert verdicts(made) == {"hangs": Verdict.FAIL, "passes": Verdict.PASS}
    result = made.results["KVX-ENV-001.hangs"]
    assert result.detail == "It hangs: not over after 2 s."
    assert "threading.Event().wait()" in result.trace


def test_a_hang_in_native_code_ends_with_the_process_and_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "END_S", 0.0)  # nothing of it comes, and it is not waited for
    monkeypatch.setattr(runner, "_MARGIN_S", 0.0)
    monkeypatch.setattr(stacks, "ANSWER_S", 2.0)
    made = perform_work(hanging("hangs-natively"))
    assert verdicts(made) == {"hangs-natively": Verdict.FAIL, "passes": Verdict.PASS}
    result = made.results["KVX-ENV-001.hangs-natively"]
    assert "native code" in result.detail
    assert "in hangs_natively" in result.trace


def test_a_case_that_ends_its_process_fails() -> None:
    made = run("dies", "passes")
    assert verdicts(made) == {"dies": Verdict.FAIL, "passes": Verdict.PASS}
    assert made.results["KVX-ENV-001.dies"].detail == "Its process ended by itself (exit status 3)."


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    result = only(run("leaves-a-child"))
    child = int(result.output.split()[1])
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and _state(child) != "Z" and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists() or _state(child) == "Z"
    assert list((tmp_path / "room").iterdir()) == []


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


SUBJECTS = """
import time
from kvx import plugins
from kvx.core.errors import ConfigError
from kvx_conformance.faults import Wrapper

def refuses(options): raise ConfigError("it wants streams = 4")
def raises(options): raise ZeroDivisionError("no")
class Strange(Wrapper):
    @property
    def capabilities(self): return {"ops": ["write"], "teleports": True}
class Moody(Wrapper):
    @property
    def capabilities(self):
        import os
        from attrs import evolve
        return evolve(self.inner.capabilities, max_in_flight=os.getpid())
def dies(options):
    import os
    os.abort()
"""


@pytest.mark.parametrize(
    ("transport", "sentence"),
    [
        ("nowhere", "there is no transport 'nowhere'"),
        ("made_subjects:missing", "cannot be imported"),
        ("made_subjects:refuses", "it wants streams = 4"),
        ("made_subjects:raises", "raised ZeroDivisionError: no"),
        ("made_subjects:Strange", "capabilities"),
        ("made_subjects:dies", "SIGABRT"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_sentence(transport: str, sentence: str) -> None:
    made = run("passes", subject=Subject(transport))
    assert sentence in made.refused
    assert (made.results, made.holds) == ({}, False)


def test_a_subject_that_declares_something_else_each_time_is_refused() -> None:
    made = run("slow", "slow-too", jobs=2, subject=Subject("made_subjects:Moody"))
    assert "does not declare the same" in made.refused
    assert not made.holds


def test_settled_verdicts_come_first_and_count() -> None:
    settled = Result("KVX-ENV-001.fails", Verdict.DISABLED, "known")

    def choose(present: frozenset[Feature]) -> Work:
        return Work(orders("passes").orders, (settled,))

    made = Run(GOOD, choose, ("made_cases",))
    told: list[Result] = []
    perform([made], 1, lambda run, result: told.append(result))
    assert [result.verdict for result in told] == [Verdict.DISABLED, Verdict.PASS]
    assert made.holds


def test_several_subjects_share_the_workers_that_there_are() -> None:
    made = [Run(GOOD, lambda present: orders("passes", "fails"), ("made_cases",), jobs=1) for _ in range(3)]
    perform(made, 2, lambda run, result: None)
    assert [verdicts(one) for one in made] == [{"passes": Verdict.PASS, "fails": Verdict.FAIL}] * 3


INTERRUPTED = """
import sys
from kvx_conformance.suite.runner import Run, Work, ends_on_term, perform
from kvx_conformance.suite.subject import Feature, Subject
from kvx_conformance.suite.worker import Order
work = Work(tuple(Order(f"KVX-ENV-001.{name}", 600) for name in ("passes", "hangs-natively", "slow")))
run = Run(Subject("kvx_conformance.faults:dropping"), lambda present: work, ("made_cases",))
try:
    with ends_on_term():
        perform([run], 1, lambda run, result: print("reached", result.id, flush=True))
except KeyboardInterrupt:
    print(sorted(run.results), run.not_reached, run.holds, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_at_once_and_keeps_what_was_reached(tmp_path: Path, number: int) -> None:
    command: Sequence[str] = (sys.executable, "-c", INTERRUPTED)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached KVX-ENV-001.passes\n"
        os.kill(process.pid, number)
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert rest == "['KVX-ENV-001.passes'] ['KVX-ENV-001.hangs-natively', 'KVX-ENV-001.slow'] False\n"
    assert list((tmp_path / "room").iterdir()) == []
