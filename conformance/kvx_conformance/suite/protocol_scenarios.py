"""The scenarios of the catalogue as cases: real processes on both sides, a proxy between them, the table that is due.

A scenario's case has its id as a name, under the sentence that it is about. Those of the hazards that an
implementation has to show first, and that no other core case shows, are core; the others are resilience.
"""

from __future__ import annotations

from collections.abc import Callable

from kvx.core.model import Mode, Role
from kvx_conformance.actor import Call
from kvx_conformance.catalogue import SCENARIOS
from kvx_conformance.live import Live, ProgramError
from kvx_conformance.scenarios import Break, Plane, Scenario, Signal, StuckError, table
from kvx_conformance.suite.case import Context, Finding, Profile, case
from kvx_conformance.suite.subject import Feature

ABOUT = {
    "KVX-DAT-001": ("MOV-001", "MOV-002", "MOV-014", "MOV-015"),
    "KVX-DAT-002": ("CUT-009", "CUT-010", "CUT-011", "CUT-012"),
    "KVX-DAT-004": ("REF-005", "REF-006"),
    "KVX-DAT-005": ("MOV-003", "MOV-004"),
    "KVX-LEG-001": ("MOV-009", "MOV-010", "MOV-011"),
    "KVX-LEG-003": ("ABT-012",),
    "KVX-LEG-004": ("ABT-011", "ABT-003"),
    "KVX-LEG-005": ("MOV-007", "MOV-008"),
    "KVX-BND-002": ("MOV-005", "MOV-006"),
    "KVX-BND-003": ("MOV-012", "REF-003"),
    "KVX-UNK-003": ("MOV-013",),
    "KVX-GRT-003": ("CUT-001", "CUT-005"),
    "KVX-GRT-004": ("LSE-003",),
    "KVX-RVK-001": ("ABT-001", "ABT-002", "ABT-009", "DIE-010"),
    "KVX-RVK-002": ("ABT-010",),
    "KVX-RVK-004": ("ABT-008",),
    "KVX-RVK-006": ("ABT-004", "ABT-005"),
    "KVX-RVK-007": ("ABT-007",),
    "KVX-TKT-002": ("DIE-005",),
    "KVX-TKT-003": ("REF-001", "REF-002"),
    "KVX-TKT-004": ("LSE-002",),
    "KVX-TKT-005": ("ABT-006",),
    "KVX-ACK-002": ("LSE-004", "DIE-011"),
    "KVX-ACK-003": ("CUT-004", "CUT-007", "CUT-008"),
    "KVX-ACK-005": ("CUT-003", "DIE-009"),
    "KVX-ACK-006": ("CUT-016", "CUT-017"),
    "KVX-EPO-003": ("DIE-001", "DIE-003", "DIE-007", "DIE-013"),
    "KVX-EPO-005": ("CUT-002", "CUT-006", "DIE-015"),
    "KVX-EPO-006": ("CUT-015", "DIE-004", "DIE-008", "DIE-012", "DIE-014"),
    "KVX-FEN-002": ("DIE-002",),
    "KVX-FEN-003": ("CUT-013",),
    "KVX-TIM-001": ("LSE-001", "DIE-006"),
    "KVX-TIM-005": ("LSE-005", "CUT-014"),
    "KVX-TIM-006": ("LSE-006", "MOV-016"),
    "KVX-HEL-001": ("REF-009",),
    "KVX-HEL-005": ("REF-004",),
    "KVX-HEL-008": ("CUT-018", "CUT-019"),
    "KVX-DRN-001": ("REF-007",),
    "KVX-ENV-002": ("REF-008",),
}
"""The scenarios that each sentence is shown by."""
CORE = {
    *("MOV-001", "MOV-003", "MOV-005", "MOV-007", "MOV-009", "MOV-011", "MOV-014"),
    *("ABT-001", "ABT-009", "ABT-010", "CUT-009", "DIE-001"),
}
_LIMIT_S = 60.0


def needs(scenario: Scenario) -> set[Feature]:
    """What a transport must have for the table to be due: it is written for one that can forbid."""
    calls = [step for step in scenario.steps if isinstance(step, Call)]
    found = {Feature.WRITE if call.mode is Mode.PUSH else Feature.READ for call in calls}
    data = any(isinstance(step, Break) and step.plane is Plane.DATA for step in scenario.steps)
    taken_back = any(c.do == "abort" and c.mode is Mode.PUSH and c.role is Role.CONSUMER for c in calls)
    if data:
        found.add(Feature.RELAY)
    if not scenario.region_access and (data or taken_back or any(isinstance(s, Signal) for s in scenario.steps)):
        found.add(Feature.FORBID)
    return found


def _run(scenario: Scenario) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        pace = context.pace
        live = context.enter(Live(scenario, context.folder, pace, context.subject))
        try:
            rows = live.run()
        except (StuckError, ProgramError) as problem:
            raise Finding(str(problem)) from problem
        for number, (row, due) in enumerate(zip(rows, table(scenario), strict=True)):
            context.check(row == due, f"{row}; due is {due}; {live.details[number]}")

    run.__qualname__ = f"scenario {scenario.id}"
    return run


def _define() -> None:
    for rule, numbers in ABOUT.items():
        for number in numbers:
            scenario = SCENARIOS[f"KVX-{number}"]
            case(
                rule,
                number.lower(),
                f"Two processes: {scenario.title}.",
                profile=Profile.CORE if number in CORE else Profile.RESILIENCE,
                needs=needs(scenario),
                limit_s=_LIMIT_S,
            )(_run(scenario))


_define()
