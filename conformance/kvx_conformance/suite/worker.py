"""The process that runs cases, one after another in its main thread, for `kvx_conformance.suite.runner`.

Line by line in JSON: a Setup comes, an Answer tells what the subject declares; each Order is answered by a
Result. What the subject prints goes to the log, never into the answers. A case whose time is over is ended by an
exception in the main thread; where native code lets none through, the runner ends the process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import msgspec
from attrs import frozen

from kvx.core.errors import KvxError
from kvx.core.model import Capabilities
from kvx_conformance.suite import stacks
from kvx_conformance.suite.case import CASES, Case, Context, NotExercised, Verdict
from kvx_conformance.suite.result import Result
from kvx_conformance.suite.subject import Subject

END_S = 10.0
"""How long the end of a case may take: what it has entered is left, whatever came of it."""
_PR_SET_PDEATHSIG = 1


@frozen
class Setup:
    """What a worker is for. `modules` define the cases; `folder` is for their files."""

    subject: Subject
    modules: tuple[str, ...]
    folder: str
    seed: int
    pace: float


@frozen
class Order:
    """Run this case; it hangs if it takes longer than `limit_s`."""

    case: str
    limit_s: float


@frozen
class Answer:
    """Exactly one of them: what the subject declares, why it cannot be tested, or what came of a case."""

    declared: Capabilities | None = None
    refused: str | None = None
    result: Result | None = None


class Overdue(BaseException):
    """The time is over; the text is all threads' stacks before this one's was unwound.

    It is no Exception, so that the guards around a subject's calls do not take it for the subject's.
    """


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a subject prints is no answer
    os.set_inheritable(answers, False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stacks.answer_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner alone decides what Ctrl-C means
    signal.signal(signal.SIGALRM, _overdue)
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    for module in setup.modules:
        importlib.import_module(module)
    answer = _declare(setup.subject)
    _say(answers, answer)
    while answer.declared is not None and (line := sys.stdin.buffer.readline()):
        order = msgspec.json.decode(line, type=Order)
        with TemporaryDirectory(dir=setup.folder, prefix="case-", ignore_cleanup_errors=True) as folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder  # whatever else is written ends with the case
            result = run(CASES[order.case], setup, answer.declared, Path(folder), order.limit_s)
        _say(answers, Answer(result=result))
    sys.stderr.flush()
    os._exit(0)  # threads that a subject has left must not keep the process


def run(case: Case, setup: Setup, declared: Capabilities, folder: Path, limit_s: float) -> Result:
    """Run one case under its deadline, in the main thread."""
    chance = random.Random(f"{setup.seed} {case.id}")  # noqa: S311 - data of a test, the same for the same seed
    context = Context(setup.subject, declared, folder, chance, setup.pace)
    started = time.monotonic()
    verdict, detail, trace = _attempt(lambda: case.run(context), limit_s, folder)
    end_verdict, end_detail, end_trace = _attempt(context.close, END_S * max(1.0, setup.pace), folder)
    if verdict in (Verdict.PASS, Verdict.NOT_EXERCISED) and end_verdict is not Verdict.PASS:
        verdict, detail, trace = end_verdict, f"At its end: {end_detail}", end_trace
    if verdict is Verdict.PASS and not context.checks:
        verdict, detail = Verdict.NOT_EXERCISED, "It compared nothing."
    return Result(case.id, verdict, detail, round(time.monotonic() - started, 3), context.checks, trace)


def _attempt(call: Callable[[], object], limit_s: float, folder: Path) -> tuple[Verdict, str, str]:
    try:
        return _judge(call, limit_s)
    except Overdue as over:
        return Verdict.FAIL, f"It hangs: not over after {limit_s:g} s.", f"{over}\n{stacks.logs(folder)}".strip()


def _judge(call: Callable[[], object], limit_s: float) -> tuple[Verdict, str, str]:
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        call()
    except AssertionError as finding:
        return Verdict.FAIL, str(finding) or "An assertion does not hold.", traceback.format_exc()
    except NotExercised as reason:
        return Verdict.NOT_EXERCISED, str(reason), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the other cases shall run
        return Verdict.ERROR, f"{type(error).__name__}: {error}", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Verdict.PASS, "", ""


def _overdue(number: int, frame: FrameType | None) -> None:
    here = stacks.of_this_process(frame, __file__)
    stacks.ask(stacks.descendants(os.getpid()))
    raise Overdue(here)


def _declare(subject: Subject) -> Answer:
    try:
        transport = subject.make_transport("kvx-conformance")
        try:
            declared = transport.capabilities
        finally:
            transport.close()
        subject.opener()
        if subject.engine:
            subject.driver()
    except KvxError as error:
        return Answer(refused=str(error))
    except Exception as error:  # noqa: BLE001 - the factory is foreign code
        text = f"making {subject.transport!r} raised {type(error).__name__}: {error}"
        return Answer(refused=f"{text}\n{traceback.format_exc()}")
    return _checked(declared)


def _checked(declared: object) -> Answer:
    """What it declares is one frozen record of kvx's own type, with nothing else in it."""
    try:
        same = msgspec.json.decode(msgspec.json.encode(declared), type=Capabilities) == declared
    except (TypeError, ValueError) as error:
        return Answer(refused=f"the transport's `capabilities` are not what kvx.core.model.Capabilities holds: {error}")
    if not isinstance(declared, Capabilities) or not same:
        return Answer(refused=f"the transport's `capabilities` are {type(declared).__name__}, not Capabilities")
    return Answer(declared=declared)


def _say(answers: int, answer: Answer) -> None:
    line = msgspec.json.encode(answer) + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
