"""What is seen on stderr while cases run."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from attrs import define, field

from kvx_conformance.suite.result import BAD, Result
from kvx_conformance.suite.runner import Run

_LINE_S = 0.1
"""How often the line that overwrites itself is drawn, on a terminal."""
_WIDTH = 78


@define(eq=False)
class Progress:
    """One line for each case, or for each that does not pass under a line that counts; as a context manager."""

    total: int
    verbose: bool
    _done: int = 0
    _bad: int = 0
    _started: float = field(factory=time.monotonic)
    _drawn: float = 0.0
    _terminal: bool = field(factory=sys.stderr.isatty)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def told(self, run: Run, result: Result) -> None:
        """Hear one result."""
        self._done += 1
        bad = result.verdict in BAD
        self._bad += bad
        if self.verbose or bad:
            self._clear()
            text = f"{result.verdict.value:<15} {result.seconds:6.2f} s  {result.id}"
            first = result.detail.partition("\n")[0]
            sys.stderr.write(f"{text}{': ' + first if first else ''}\n")
        if self._terminal and time.monotonic() - self._drawn > _LINE_S:
            self._drawn = time.monotonic()
            self._clear()
            spent = self._drawn - self._started
            sys.stderr.write(f"{self._done} of {self.total} cases, {self._bad} bad, {spent:.0f} s")
        sys.stderr.flush()

    def _clear(self) -> None:
        if self._terminal:
            sys.stderr.write("\r" + " " * _WIDTH + "\r")
