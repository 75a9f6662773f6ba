"""Which cases a run asks for, and what is said of those that it leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from kvx.core.errors import ConfigError
from kvx_conformance.suite import standard
from kvx_conformance.suite.case import CASES, Case, Level, Profile, Verdict
from kvx_conformance.suite.result import Result
from kvx_conformance.suite.runner import Work, limit_s
from kvx_conformance.suite.subject import Feature
from kvx_conformance.suite.worker import Order

TRANSPORT = "TRN"
ADAPTER = "ADP"
"""The areas whose cases look at a transport alone, and at an engine's servers. All others look at an instance."""
_RANK = {profile: rank for rank, profile in enumerate(Profile)}


@frozen
class Selection:
    """What whoever runs the suite has asked for. Raises ConfigError where it names no case."""

    profile: Profile = Profile.CORE
    strict: bool = False
    """SHOULD cases too."""
    only: tuple[str, ...] = ()
    """Parts of ids; empty: all."""
    exempt: Mapping[str, str] = field(factory=dict)
    """Reasons, by id: these cases are not run."""
    adapter: bool | None = False
    """The cases of an engine's servers, or all others; None: both."""
    pace: float = 1.0

    def __attrs_post_init__(self) -> None:
        unknown = sorted(set(self.exempt) - set(CASES) - set(standard.load()))
        if unknown:
            raise ConfigError(f"--exempt {unknown[0]}: there is no such case (`kvx conformance list` shows all)")
        empty = sorted(name for name, reason in self.exempt.items() if not reason.strip())
        if empty:
            raise ConfigError(f"--exempt {empty[0]} needs a reason, which the report shows: --exempt {empty[0]}=REASON")
        if not self.cases():
            raise ConfigError("no case is asked for: `kvx conformance list` shows the ids, profiles and levels")

    def cases(self) -> list[Case]:
        """All cases that are asked for, in the order of their ids."""
        return sorted((case for case in CASES.values() if self._asks(case)), key=lambda case: case.id)

    def divide(self, present: frozenset[Feature]) -> Work:
        """The cases to run on a subject with these features, and the verdicts on those that are not."""
        orders: list[Order] = []
        settled: list[Result] = []
        for case in self.cases():
            missing = sorted(feature.value for feature in case.needs - present)
            if case.id in self.exempt:
                settled.append(Result(case.id, Verdict.DISABLED, self.exempt[case.id].strip()))
            elif not case.applies(present):
                continue
            elif missing:
                detail = f"Needs {' and '.join(missing)}, which is not declared."
                settled.append(Result(case.id, Verdict.SKIP_UNDECLARED, detail))
            else:
                orders.append(Order(case.id, limit_s(case, self.pace)))
        return Work(tuple(orders), tuple(settled))

    def _asks(self, case: Case) -> bool:
        return (
            (self.adapter is None or (area(case) == ADAPTER) is self.adapter)
            and _RANK[case.profile] <= _RANK[self.profile]
            and (self.strict or case.level is Level.MUST)
            and (not self.only or any(text in case.id for text in self.only))
        )


def area(case: Case) -> str:
    """The letters in its id: `TRN` of `KVX-TRN-004.zero-length`."""
    return case.rule.split("-")[1]
