"""Runs cases in worker processes: hands them out, watches their deadlines, and leaves nothing behind.

A worker that does not answer in time is asked for its stacks and killed with its process group; its case is a
fail, and a fresh worker goes on. A fresh one also follows each case that did not pass: what a broken subject
has left in the process shall not spoil the next verdict.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import msgspec
from attrs import define, evolve, field, frozen

from kvx.core.model import Capabilities
from kvx_conformance.suite import stacks
from kvx_conformance.suite.case import Case, Verdict
from kvx_conformance.suite.result import BAD, Result
from kvx_conformance.suite.subject import Feature, Subject, features
from kvx_conformance.suite.worker import END_S, Answer, Order, Setup

READY_S = 60.0
"""How long a worker may take to import everything and to make the subject once."""
_MARGIN_S = 5.0
"""After a case's own deadline, which the worker keeps by itself unless it hangs in native code."""
_LEAVE_S = 1.0
_OUTPUT_TAIL = 8000
SUITE = ("kvx_conformance.suite.all",)
"""The modules whose import defines the standard cases."""


@frozen
class Work:
    """What shall be done to a subject of such features: cases to run, and those settled without."""

    orders: tuple[Order, ...]
    settled: tuple[Result, ...] = ()


@define(eq=False)
class Run:
    """One subject, and what has come of its cases so far."""

    subject: Subject
    choose: Callable[[frozenset[Feature]], Work]
    modules: tuple[str, ...] = SUITE
    seed: int = 1
    pace: float = 1.0
    provisional: frozenset[str] = frozenset()
    """Cases whose verdicts are reported and not counted."""
    jobs: int | None = None
    """Workers that this run may have at the same time; None: as many as there are."""
    declared: Capabilities | None = None
    refused: str = ""
    """Why nothing could be tested; empty: it could."""
    results: dict[str, Result] = field(factory=dict)
    work: Work | None = None
    waiting: deque[Order] = field(factory=deque)

    @property
    def holds(self) -> bool:
        """Whether the subject could be tested, every case was reached, and no verdict that counts is bad."""
        reached = self.work is not None and not self.refused and not self.not_reached
        counted = (result for result in self.results.values() if result.id not in self.provisional)
        return reached and not any(result.verdict in BAD for result in counted)

    @property
    def not_reached(self) -> list[str]:
        """Cases without a verdict, since the run was interrupted."""
        return [order.case for order in self.work.orders if order.case not in self.results] if self.work else []

    def begin(self, declared: Capabilities) -> None:
        """The first worker's word counts; a subject that says something else later is refused."""
        if self.declared is None:
            self.declared = declared
            self.work = self.choose(features(declared, self.subject))
            self.results.update({result.id: result for result in self.work.settled})
            self.waiting.extend(self.work.orders)
        elif declared != self.declared:
            self.refuse("it does not declare the same capabilities each time it is made")

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason
        self.waiting.clear()


Told = Callable[[Run, Result], None]


def limit_s(case: Case, pace: float) -> float:
    """A case's deadline, seconds, on a machine of this pace."""
    return case.limit_s * max(1.0, pace)


def perform(runs: Sequence[Run], jobs: int, told: Told) -> None:
    """Do all runs, with at most `jobs` workers at a time; `told` hears each result as it comes.

    Whatever ends this, KeyboardInterrupt included, ends all workers; what was reached stands in the runs.
    """
    with (
        TemporaryDirectory(prefix="kvx-conformance-", ignore_cleanup_errors=True) as folder,
        selectors.DefaultSelector() as selector,
    ):
        workers: list[_Worker] = []
        try:
            while True:
                while len(workers) < jobs and (run := _next(runs, workers)):
                    workers.append(_Worker.start(run, Path(folder)))
                    selector.register(workers[-1].answers, selectors.EVENT_READ, workers[-1])
                if not workers:
                    return
                deadline = min(worker.deadline for worker in workers)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    key.data.hear(told)
                for worker in workers:
                    if worker.wanted and worker.deadline <= time.monotonic():
                        worker.overdue(told)
                for worker in [worker for worker in workers if not worker.wanted]:
                    selector.unregister(worker.answers)
                    workers.remove(worker)
                    worker.end()
        finally:
            for worker in workers:
                worker.end(wait_s=0.0)


def _next(runs: Sequence[Run], workers: Sequence[_Worker]) -> Run | None:
    """The run that shall have another worker: one with work to spare, of those the one with fewest workers."""

    def count(run: Run) -> int:
        return sum(worker.run is run for worker in workers)

    def spare(run: Run) -> bool:
        coming = sum(worker.run is run and worker.order is None for worker in workers)
        work = len(run.waiting) > coming if run.declared is not None else not run.refused
        return work and (run.jobs is None or count(run) < run.jobs)

    return min(filter(spare, runs), key=count, default=None)


@define(eq=False)
class _Worker:
    """The runner's end of one worker process."""

    run: Run
    process: subprocess.Popen[bytes]
    log: Path
    deadline: float
    order: Order | None = None
    """The case that it runs now."""
    wanted: bool = True
    _log_from: int = 0
    _came: bytearray = field(factory=bytearray)

    @classmethod
    def start(cls, run: Run, folder: Path) -> _Worker:
        log = folder / f"worker-{time.monotonic_ns()}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                (sys.executable, "-m", "kvx_conformance.suite.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                process_group=0,
            )
        worker = cls(run, process, log, time.monotonic() + READY_S)
        worker._send(Setup(run.subject, run.modules, str(folder), run.seed, run.pace))
        return worker

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def hear(self, told: Told) -> None:
        """Take what it has said, and give it the next case."""
        data = os.read(self.answers.fileno(), 1 << 20)
        if not data:
            status = self._status()
            self._settle(
                told, f"Its process ended by itself ({status}).", f"the process that makes it ended ({status})"
            )
            return
        self._came += data
        while b"\n" in self._came and self.wanted:
            line, _, rest = bytes(self._came).partition(b"\n")
            self._came = bytearray(rest)
            self._take(msgspec.json.decode(line, type=Answer), told)

    def overdue(self, told: Told) -> None:
        """Have its stacks, and give it up."""
        stacks.ask([self.process.pid, *stacks.descendants(self.process.pid)])
        limit = self.order.limit_s if self.order else READY_S
        self._settle(
            told,
            f"It hangs in native code: not over after {limit:g} s, and no exception reaches it.",
            f"making it takes longer than {READY_S:g} s",
        )

    def end(self, wait_s: float = _LEAVE_S) -> None:
        """End the process, and whatever else is in its group."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not self.order and wait_s:
                self.process.wait(wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.answers.close()
        self.log.unlink(missing_ok=True)

    def _take(self, answer: Answer, told: Told) -> None:
        if answer.declared is not None:
            before = set(self.run.results)
            self.run.begin(answer.declared)
            for name in self.run.results.keys() - before:
                told(self.run, self.run.results[name])
        elif answer.result is not None and self.order is not None:
            result = answer.result
            good = result.verdict not in BAD
            self._keep(result if good else evolve(result, output=self._output()), told)
            self.order = None
            self.wanted = good
        else:
            self.run.refuse(answer.refused or "its worker speaks out of turn")
        if not self.run.waiting:
            self.wanted = False
        if self.wanted:
            self._give()

    def _give(self) -> None:
        self.order = self.run.waiting.popleft()
        self._log_from = self.log.stat().st_size
        self.deadline = time.monotonic() + self.order.limit_s + END_S * max(1.0, self.run.pace) + _MARGIN_S
        self._send(self.order)

    def _settle(self, told: Told, detail: str, refusal: str) -> None:
        """The process is lost: a case that it ran has failed; without one the subject cannot be tested."""
        self.wanted = False
        output = self._output()
        if self.order is None:
            self.run.refuse(f"{refusal}\n{output}".strip())
        else:
            spent = (
                self.order.limit_s + END_S * max(1.0, self.run.pace) + _MARGIN_S - (self.deadline - time.monotonic())
            )
            self._keep(Result(self.order.case, Verdict.FAIL, detail, round(spent, 3), trace=output), told)

    def _keep(self, result: Result, told: Told) -> None:
        self.run.results[result.id] = result
        told(self.run, result)

    def _output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self._log_from, self.log.stat().st_size - _OUTPUT_TAIL))
            return file.read().decode(errors="replace").strip()

    def _status(self) -> str:
        try:
            status = self.process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return "it closed its answers"
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def _send(self, what: Setup | Order) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # its death is told by the end of its answers
            self.process.stdin.write(msgspec.json.encode(what) + b"\n")
            self.process.stdin.flush()


@contextlib.contextmanager
def ends_on_term() -> Generator[None]:
    """SIGTERM ends the block like Ctrl-C, so that nothing of it is left behind."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
