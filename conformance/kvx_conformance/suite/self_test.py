"""Does the suite find what is broken? It runs on subjects broken on purpose, and on correct ones.

The correct ones go first; what a case takes there says when it hangs elsewhere. Each broken one must be found by
a case that its author has named, a correct one by none.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from attrs import define, frozen

from kvx.core.errors import ConfigError
from kvx_conformance.suite.broken import Broken
from kvx_conformance.suite.case import CASES, Case, Level, Profile, Verdict
from kvx_conformance.suite.result import Result
from kvx_conformance.suite.runner import SUITE, Run, Work, perform
from kvx_conformance.suite.selection import ADAPTER, TRANSPORT, area
from kvx_conformance.suite.subject import Feature, Subject
from kvx_conformance.suite.worker import Order


class Kind(Enum):
    """Whose cases look at a subject."""

    TRANSPORT = "transport"
    INSTANCE = "instance"
    ADAPTER = "adapter"


SHIPPED = {
    Kind.TRANSPORT: "kvx_conformance.suite.broken_transports",
    Kind.INSTANCE: "kvx_conformance.suite.broken_instances",
    Kind.ADAPTER: "kvx_conformance.suite.broken_adapters",
}
"""The modules with the tables BROKEN_... (name to Broken) and CORRECT_... (name to Subject)."""
BUDGET_S = 30.0
WHOLE_S = 120.0
"""What a broken subject may spend on cases that are not named for it: usually, and where all are asked for."""
_FACTOR = 5.0
_LEAST_S = 3.0
"""On a broken subject a case that is not named hangs after this long, or _FACTOR times what a correct one takes."""


@frozen
class Specimen:
    """One subject of the self-test. `found_by` is empty for a correct one."""

    name: str
    subject: Subject
    cause: str = ""
    found_by: tuple[str, ...] = ()
    kind: Kind = Kind.TRANSPORT
    proves: tuple[str, ...] = ()

    @property
    def correct(self) -> bool:
        return not self.found_by

    def named(self, case: str) -> bool:
        """Whether this case has to find it, alone or with others."""
        return case in self.proves or case.startswith(self.found_by)

    def own(self, case: Case) -> bool:
        """Whether it is a core case of its kind."""
        kind = {TRANSPORT: Kind.TRANSPORT, ADAPTER: Kind.ADAPTER}.get(area(case), Kind.INSTANCE)
        return kind is self.kind and case.profile is Profile.CORE and case.level is Level.MUST


@define(eq=False)
class Matrix:
    """Who was found by which case."""

    rows: list[tuple[Specimen, Run]]

    def fields(self) -> dict[str, Any]:
        """As the JSON has it."""
        subjects = [_row(specimen, run) for specimen, run in self.rows]
        found = {case for row in subjects for case in row["finds"]}
        asked = {case for row in subjects if row["correct"] for case in row["ran"]}
        return {
            "holds": all(row["holds"] for row in subjects),
            "broken": sum(not row["correct"] for row in subjects),
            "found": sum(row["holds"] for row in subjects if not row["correct"]),
            "correct": sum(row["correct"] for row in subjects),
            "cases": sorted(found),
            "unproven": sorted(asked - found),
            "subjects": subjects,
        }


def subjects(only: Sequence[str] = (), kinds: Collection[Kind] = frozenset(Kind)) -> list[Specimen]:
    """All that are shipped, correct ones first; of these kinds, and whose name contains one of these texts."""
    found: list[Specimen] = []
    for kind, module in SHIPPED.items():
        if kind not in kinds:
            continue
        shipped = importlib.import_module(module)
        correct: Mapping[str, Subject] = getattr(shipped, f"CORRECT_{kind.name}S")
        broken: Mapping[str, Broken] = getattr(shipped, f"BROKEN_{kind.name}S")
        found += [Specimen(name, subject, kind=kind) for name, subject in correct.items()]
        found += [
            Specimen(name, one.subject, one.cause, one.found_by, kind, one.proves) for name, one in broken.items()
        ]
    chosen = [one for one in found if not only or any(text in one.name for text in only)]
    if not chosen:
        raise ConfigError(f"no subject is called so; there are: {', '.join(one.name for one in found)}")
    return sorted(chosen, key=lambda one: not one.correct)


def columns() -> set[str]:
    """The cases that find somebody: of each name, or beginning of one, that is given for a subject the first case."""
    begins = [begin for one in subjects() for begin in one.found_by]
    return {min(found) for begin in begins if (found := [name for name in CASES if name.startswith(begin)])}


def perform_all(
    specimens: Sequence[Specimen],
    jobs: int,
    say: Callable[[str], None],
    modules: tuple[str, ...] = SUITE,
    columns: Collection[str] | None = None,
) -> Matrix:
    """Run every subject on the cases that are named for it, and on the core cases of its kind (of these `columns`).

    Raises KeyboardInterrupt with nothing left behind.
    """
    usual: dict[str, float] = {}
    asked = CASES if columns is None else columns

    def beside(one: Specimen) -> Collection[str]:
        """Each case of an adapter starts servers: unless all are asked for, a broken one meets those named for it."""
        return [] if columns is not None and one.kind is Kind.ADAPTER and not one.correct else asked

    def told(run: Run, result: Result) -> None:
        first = result.detail.partition("\n")[0]
        one = specimens_of[id(run)]
        say(f"{result.verdict.value:<15} {result.seconds:6.2f} s  {one.name}: {result.id} {first}")
        spent = sum(other.seconds for other in run.results.values() if not one.named(other.id))
        if not one.correct and spent > (WHOLE_S if columns is None else BUDGET_S):
            run.waiting.clear()

    rows = [(one, Run(one.subject, _chooser(one, beside(one), usual), modules)) for one in specimens]
    specimens_of = {id(run): one for one, run in rows}
    perform([run for one, run in rows if one.correct], jobs, told)
    for one, run in rows:
        if one.correct:
            for result in run.results.values():
                usual[result.id] = max(usual.get(result.id, 0.0), result.seconds)
    broken = [run for one, run in rows if not one.correct]
    for run in broken:
        run.jobs = 1
    perform(broken, jobs, told)
    return Matrix(rows)


def halves(content: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]], list[str]]]:
    """The subjects of each kind: a title, the rows, and the cases that find somebody among them."""
    for kind in Kind:
        rows = [row for row in content["subjects"] if row["kind"] == kind.value]
        if rows:
            yield f"{kind.value}s", rows, sorted({case for row in rows for case in row["finds"]})


def lines(content: Mapping[str, Any]) -> list[str]:
    """The matrix for a terminal: a row for each subject, a column for each case that finds one."""
    width = max(len(row["name"]) for row in content["subjects"])
    text = ["# found by a case that names the cause, x by another, h it hangs there, . not found, blank: not run"]
    for title, rows, columns in halves(content):
        text += ["", title]
        for row in rows:
            marks = "".join(mark(row, case) for case in columns)
            text.append(f"{'ok ' if row['holds'] else 'BAD'}  {row['name']:<{width}}  {marks}  {row['word']}")
        text += [f"{number:4}  {case}" for number, case in enumerate(columns, 1)]
    clean = all(row["holds"] for row in content["subjects"] if row["correct"])
    found = f"{content['found']} of {content['broken']} broken subjects are found by a case that names the cause"
    text += ["", f"{found}; {content['correct']} correct ones by {'none' if clean else 'SOME'}"]
    if content["unproven"]:
        text.append(f"{len(content['unproven'])} of the cases that ran turn red on none of them (JSON: `unproven`)")
    return text


def mark(row: Mapping[str, Any], case: str) -> str:
    """One cell of the matrix."""
    find = row["finds"].get(case)
    if find is None:
        return "." if case in row["ran"] else " "
    return "#" if find["named"] else "h" if find["hangs"] else "x"


def _chooser(
    one: Specimen, columns: Collection[str], usual: Mapping[str, float]
) -> Callable[[frozenset[Feature]], Work]:
    """Named cases first and with their whole time; of the others a hang is seen early."""

    def choose(present: frozenset[Feature]) -> Work:
        asked = [case for case in CASES.values() if one.named(case.id) or (case.id in columns and one.own(case))]
        cases = [case for case in asked if case.applies(present) and case.needs <= present]
        orders = []
        for case in sorted(cases, key=lambda case: not one.named(case.id)):
            early = max(_LEAST_S, _FACTOR * usual.get(case.id, case.limit_s))
            whole = one.correct or one.named(case.id)
            orders.append(Order(case.id, case.limit_s if whole else min(case.limit_s, early)))
        return Work(tuple(orders))

    return choose


def _short(detail: str) -> str:
    """For a matrix that is kept: the first line, without the folders of this run, which are gone."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S+", "(a folder of this run)", detail.partition("\n")[0])[:300]


def _row(one: Specimen, run: Run) -> dict[str, Any]:
    finds = {
        result.id: {
            "detail": _short(result.detail),
            "named": one.named(result.id),
            "hangs": "hangs" in result.detail[:9],
        }
        for result in sorted(run.results.values(), key=lambda result: result.id)
        if result.verdict is Verdict.FAIL
    }
    named = any(find["named"] for find in finds.values())
    missed = [case for case in one.proves if case not in finds]
    broke = sorted(result.id for result in run.results.values() if result.verdict is Verdict.ERROR)
    if run.refused:
        word = f"cannot be tested: {run.refused}"
    elif broke:
        word = f"the suite itself breaks in {', '.join(broke)}"
    elif one.correct:
        word = f"correct, but {len(finds)} cases find fault" if finds else "correct: no case finds fault"
    elif missed:
        word = f"NOT FOUND by {', '.join(missed)}: {one.cause}"
    else:
        word = one.cause if named else f"NOT FOUND by its cases: {one.cause}"
    holds = not run.refused and bool(run.results) and not broke and (not finds if one.correct else named and not missed)
    return {
        "name": one.name,
        "kind": one.kind.value,
        "correct": one.correct,
        "cause": one.cause,
        "found_by": list(one.found_by),
        "proves": list(one.proves),
        "holds": holds,
        "word": word,
        "ran": sorted(run.results),
        "finds": finds,
        "errors": broke,
        "seconds": round(sum(result.seconds for result in run.results.values()), 3),
    }
