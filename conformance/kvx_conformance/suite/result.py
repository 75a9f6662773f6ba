"""What came of one case, as a worker tells it and as a report shows it."""

from __future__ import annotations

from attrs import frozen

from kvx_conformance.suite.case import Verdict

BAD = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.NOT_EXERCISED})
"""A run in which one of these comes up does not hold."""


@frozen
class Result:
    """The verdict on one case. `seconds` counts the case and its end; `checks` what it compared."""

    id: str
    verdict: Verdict
    detail: str = ""
    """Why, in a sentence for the subject's author; empty for a pass."""
    seconds: float = 0.0
    checks: int = 0
    trace: str = ""
    """Where: a traceback, or of a case that hangs the stacks of all threads and processes."""
    output: str = ""
    """The end of what the subject and its processes wrote to stderr and stdout meanwhile."""
