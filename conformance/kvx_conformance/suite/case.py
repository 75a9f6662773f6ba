"""A case: one attempt to break one sentence of the protocol, and what may come of it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TypeVar

from attrs import define, field, frozen

from kvx.core.model import Capabilities
from kvx_conformance import rules
from kvx_conformance.suite.subject import Feature, Subject, features

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Profile(Enum):
    """How much is asked. Each one contains those before it."""

    CORE = "core"
    RESILIENCE = "resilience"
    SOAK = "soak"


class Level(Enum):
    """How the sentence binds."""

    MUST = "MUST"
    SHOULD = "SHOULD"


class Verdict(Enum):
    """What came of a case. Only `pass` is good; a run holds if there is no fail, error or not_exercised."""

    PASS = "pass"  # noqa: S105 - a verdict, no secret
    FAIL = "fail"
    SKIP_UNDECLARED = "skip_undeclared"
    """The subject does not declare what the case needs."""
    DISABLED = "disabled"
    """Left out by whoever runs the suite, with a reason."""
    ERROR = "error"
    """The suite itself broke."""
    NOT_EXERCISED = "not_exercised"
    """The case ran and compared nothing, or what it is about did not happen."""


class Finding(AssertionError):
    """The subject broke the sentence; the text says how, and is shown to its author."""


class NotExercised(Exception):
    """What the case is about did not happen, for instance an operation ended before it could be cancelled."""


@define(eq=False)
class Context:
    """What one case has while it runs: the subject, a folder, chance, and a count of what it compared."""

    subject: Subject
    declared: Capabilities
    folder: Path
    rng: random.Random
    pace: float = 1.0
    """By what every bound of an instance is stretched, for a machine that is busy."""
    checks: int = 0
    _stack: ExitStack = field(factory=ExitStack)

    @property
    def features(self) -> frozenset[Feature]:
        return features(self.declared, self.subject)

    def check(self, holds: object, problem: str) -> None:
        """Compare something that the sentence is about. Raises Finding."""
        self.checks += 1
        if not holds:
            raise Finding(problem)

    def enter(self, what: AbstractContextManager[T]) -> T:
        """Have it until the case ends, whatever comes of it."""
        return self._stack.enter_context(what)

    def close(self) -> None:
        """End everything that was entered; what a subject breaks in its own end is a Finding of this call."""
        self._stack.close()


@frozen
class Case:
    """One case. Its id is the sentence's with a name: `KVX-TRN-004.zero-length`, and never changes."""

    rule: str
    name: str
    title: str
    """What is done and what must come of it, in one sentence, for somebody who reads only the report."""
    profile: Profile
    run: Callable[[Context], None]
    needs: frozenset[Feature]
    lacks: frozenset[Feature]
    """Proves the refusal where these are not declared; has no place where they are."""
    limit_s: float
    """A case that takes longer hangs."""

    @property
    def id(self) -> str:
        return f"{self.rule}.{self.name}"

    @property
    def sentence(self) -> str:
        return _sentences()[self.rule].text

    @property
    def level(self) -> Level:
        return Level.MUST if "MUST" in self.sentence else Level.SHOULD

    def applies(self, declared: frozenset[Feature]) -> bool:
        return not self.lacks & declared


@cache
def _sentences() -> dict[str, rules.Rule]:
    return {rule.id: rule for rule in rules.load()[1]}


CASES: dict[str, Case] = {}
"""All cases by id, in the order of their definition; filled when `kvx_conformance.suite.all` is imported."""


def case(
    rule: str,
    name: str,
    title: str,
    *,
    profile: Profile = Profile.CORE,
    needs: Iterable[Feature] = (),
    lacks: Iterable[Feature] = (),
    limit_s: float = 20.0,
) -> Callable[[Callable[[Context], None]], Callable[[Context], None]]:
    """Make a function a case of the standard suite. Raises ValueError for an id that is taken or names no sentence."""

    def add(run: Callable[[Context], None]) -> Callable[[Context], None]:
        made = Case(rule, name, title, profile, run, frozenset(needs), frozenset(lacks), limit_s)
        if made.id in CASES or not _NAME.fullmatch(name) or rule not in _sentences():
            raise ValueError(f"{made.id}: taken, badly named, or no sentence of rules.toml")
        CASES[made.id] = made
        return run

    return add
