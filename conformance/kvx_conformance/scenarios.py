"""The words of a scenario: what engines say, which fault strikes at which event, what must come of it.

A scenario is data. `staged` plays it on simulated endpoints with a virtual clock, `processes` on
real processes behind a proxy; both fill the same table, which is compared with what is written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, assert_never

from attrs import field, frozen

from kvx.core.model import Reason
from kvx_conformance.actor import Call, Shape

LIMITS: Mapping[str, float] = {
    "lease_s": 4.0,
    "patience_s": 8.0,
    "part_gap_s": 3.0,
    "op_timeout_s": 2.0,
    "drain_limit_s": 0.8,
    "grace_s": 1.4,
    "quarantine_s": 0.5,
    "transfer_max_s": 20.0,
    "keepalive_s": 0.5,
    "lost_s": 1.5,
    "ack_wait_s": 2.5,
    "handshake_s": 1.5,
}
"""The bounds of every wait at pace 1, seconds: options of the same names."""


class Plane(Enum):
    """What runs between two instances."""

    CONTROL = "control"
    DATA = "data"


class Act(Enum):
    """What happens to a connection at the event that a Break names."""

    CUT = "cut"  # both ends see it closed; what triggered is lost
    TRUNCATE = "truncate"  # half of what triggered arrives, then the same
    HALF_CLOSE = "half-close"  # the receiver sees the end of the stream, the other direction stays open
    HOLD = "hold"  # nothing of this plane passes any more, in both directions, until Heal
    LANE = "lane"  # the same for this one connection: the others overtake it
    DELAY = "delay"  # this plane stands still for DELAY_S
    DUPLICATE = "duplicate"  # the message arrives twice
    FLIP = "flip"  # one bit is another one


DELAY_S = 0.6
"""Shorter than any bound of LIMITS."""
LIMIT_S = 40.0
"""How long any wait of a scenario may take at pace 1; every bound of kvx lies far below."""


@frozen
class Break:
    """Do `act` when this passes: the first message of kind `on`, or byte `on` since now, from instance `sender`."""

    plane: Plane
    sender: str
    on: str | int
    act: Act


@frozen
class Fired:
    """Wait until every Break so far has happened."""


@frozen
class Heal:
    """What was held passes, in its order."""


@frozen
class Wait:
    """Wait until `condition` (see `actor.holds`) is met at every rank of `who`."""

    who: str
    condition: str
    transfer: str = "t"


@frozen
class Signal:
    """kill (-9), stop or cont: every process of an instance."""

    who: str
    what: str


@frozen
class Start:
    """A killed instance starts again, at the same address with a new epoch."""

    who: str


@frozen
class Garbage:
    """Hostile bytes on every listening socket of an instance."""

    who: str


@frozen
class Expect:
    """Wait for the outcome that is due here; a row of the table.

    `reasons` empty: ok, and at a consumer every byte right. Several reasons: a race decides which.
    `released` False: the outcome is there and the blocks are not (quarantine).
    """

    who: str
    reasons: frozenset[Reason] = frozenset()
    transfer: str = "t"
    released: bool = True


Step = Call | Break | Fired | Heal | Wait | Signal | Start | Garbage | Expect


@frozen
class Scenario:
    """One sequence of steps, with a stable id."""

    id: str
    title: str
    steps: tuple[Step, ...]
    hazards: tuple[str, ...] = ()
    """The entries of the catalogue of known faults whose kind this is."""
    shapes: Mapping[str, Shape] = field(factory=lambda: {"p": Shape(), "d": Shape()})
    secrets: Mapping[str, str] = field(factory=dict)
    region_access: bool = False
    """The transport can neither forbid nor fence."""
    integrity: bool = False


@frozen
class Row:
    """What one Expect, or the end, found."""

    who: str
    transfer: str
    outcome: str
    released: bool
    intact: bool
    """At a consumer that is told ok: every byte is right. At the end: no block was touched while it had no owner."""

    def __str__(self) -> str:
        kept = "released" if self.released else "not released"
        return f"{self.who} {self.transfer or '-'}: {self.outcome}, {kept}" + (
            "" if self.intact else ", BYTES ARE WRONG"
        )


def row(expect: Expect, ranks: Iterable[Mapping[str, Any]]) -> tuple[Row, str]:
    """The row of an Expect, from what the ranks of its instance say, and the actual reasons with details."""
    found = list(ranks)
    texts = {_outcome(expect, one) for one in found}
    intact = bool(expect.reasons) or all(one["right"] is not False for one in found)
    details = "; ".join(sorted({f"{one['reason']}: {one['detail']}" for one in found if one["reason"]}))
    released = {bool(one["released"]) for one in found}
    text = texts.pop() if len(texts) == 1 else "mixed: " + ", ".join(sorted(texts))
    return Row(expect.who, expect.transfer, text, released == {True}, intact), details


def expected(expect: Expect) -> Row:
    outcome = f"failed ({_names(expect.reasons)})" if expect.reasons else "ok"
    return Row(expect.who, expect.transfer, outcome, expect.released, True)


def at_rest(who: str, *, full: bool = True, intact: bool = True) -> Row:
    """The last row of every instance that lives: nothing open, every block back, none touched."""
    return Row(who, "", "at rest", full, intact)


def table(scenario: Scenario) -> list[Row]:
    """The whole table that is due."""
    rows = [expected(step) for step in scenario.steps if isinstance(step, Expect)]
    return rows + [at_rest(who) for who in survivors(scenario)]


def survivors(scenario: Scenario) -> list[str]:
    """The instances that live at the end."""
    dead: set[str] = set()
    for step in scenario.steps:
        if isinstance(step, Signal) and step.what == "kill":
            dead.add(step.who)
        elif isinstance(step, Start):
            dead.discard(step.who)
    return [who for who in scenario.shapes if who not in dead]


def _outcome(expect: Expect, one: Mapping[str, Any]) -> str:
    if one["outcome"] != "failed":
        return str(one["outcome"])
    known = expect.reasons and Reason(one["reason"]) in expect.reasons
    return f"failed ({_names(expect.reasons) if known else one['reason']})"


def _names(reasons: Iterable[Reason]) -> str:
    return "|".join(sorted(reason.value for reason in reasons))


class StuckError(AssertionError):
    """A wait of a scenario did not end."""


class Performance(ABC):
    """One scenario under way: `run` takes the steps, a subclass knows what each of them means.

    `pace` stretches every bound, for machines on which a process may have to wait for its turn.
    """

    def __init__(self, scenario: Scenario, pace: float = 1.0) -> None:
        self.scenario = scenario
        self.limits = {name: seconds * pace for name, seconds in LIMITS.items()}
        self.limit_s = LIMIT_S * pace
        self.pace = pace
        self.rows: list[Row] = []
        self.details: list[str] = []
        """Beside each row: the reasons as they were given, or what is wrong."""

    def run(self) -> list[Row]:
        """Play it to the end and return its table. Raises StuckError where a wait does not end."""
        for who in self.scenario.shapes:
            self.start(who)
        for step in self.scenario.steps:
            self.step(step)
        for who in survivors(self.scenario):
            self.wait(who, "rest", "")
            flaws, full = self.end(who)
            self.rows.append(at_rest(who, full=full, intact=not flaws))
            self.details.append("; ".join(flaws))
        return self.rows

    def step(self, step: Step) -> None:
        match step:
            case Call():
                self.call(step)
            case Break():
                self.arm(step)
            case Fired():
                self.fired()
            case Heal():
                self.heal()
            case Wait(who=who, condition=condition, transfer=transfer):
                self.wait(who, condition, transfer)
            case Signal(who=who, what=what):
                self.signal(who, what)
            case Start(who=who):
                self.start(who)
            case Garbage(who=who):
                self.garbage(who)
            case Expect(who=who, transfer=transfer):
                self.wait(who, "outcome", transfer)
                if step.released:
                    self.wait(who, "released", transfer)
                found, details = row(step, self.tell(who, transfer))
                self.rows.append(found)
                self.details.append(details)
            case _:
                assert_never(step)

    def lease_s(self, call: Call) -> float:
        return self.limits["lease_s"] if call.lease_s is None else call.lease_s * self.pace

    @abstractmethod
    def start(self, who: str) -> None: ...

    @abstractmethod
    def call(self, call: Call) -> None: ...

    @abstractmethod
    def arm(self, what: Break) -> None: ...

    @abstractmethod
    def fired(self) -> None: ...

    @abstractmethod
    def heal(self) -> None: ...

    @abstractmethod
    def wait(self, who: str, condition: str, transfer: str) -> None: ...

    @abstractmethod
    def signal(self, who: str, what: str) -> None: ...

    @abstractmethod
    def garbage(self, who: str) -> None: ...

    @abstractmethod
    def tell(self, who: str, transfer: str) -> list[dict[str, Any]]:
        """What each rank says of one transfer (`actor.Actor.row`)."""

    @abstractmethod
    def end(self, who: str) -> tuple[list[str], bool]:
        """What was wrong at this instance, and whether its pools are full."""
