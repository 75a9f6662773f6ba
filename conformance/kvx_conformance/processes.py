"""`python -m kvx_conformance.processes`: every scenario on simulated endpoints and on real processes.

Both tables of outcomes must be the one that the scenario names. Exit status 0: all are; 1: one is
not; 2: usage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from attrs import asdict, frozen

from kvx import report
from kvx_conformance.catalogue import SCENARIOS
from kvx_conformance.live import Live
from kvx_conformance.scenarios import LIMITS, Row, Scenario, table
from kvx_conformance.staged import Play

PACES = (1.0, 3.0, 8.0)
"""How far the bounds are stretched in one try after the other."""
PAUSE = 0.1
"""Share of `lost_s` that counts as a pause: several such in a row are silence."""
_MEASURE_S = 0.005


@frozen
class Verdict:
    """One scenario, both ways."""

    id: str
    title: str
    hazards: tuple[str, ...]
    rows: list[Row]
    """What real processes did."""
    reasons: list[str]
    """Beside each row, as they gave them."""
    simulated: list[Row]
    simulated_reasons: list[str]
    holds: bool
    """Both tables are the one that the scenario names."""
    problem: str
    pace: float
    """By what the bounds of `LIMITS` were stretched."""
    void: list[str]
    """What went wrong at a faster pace, while processes of this machine had to wait for their turn."""
    simulated_s: float
    real_s: float


def judge(scenario: Scenario, folder: Path) -> Verdict:
    """Play one scenario both ways and compare the tables.

    A scenario says nothing of a process that waits for a processor longer than a bound. So a table
    that differs is tried again with longer bounds, but only if such a pause was measured.
    """
    void: list[str] = []
    for pace in PACES:
        with Pauses() as pauses:
            verdict = _play(scenario, folder, pace, void)
        if verdict.holds or pauses.longest_s < PAUSE * pace * LIMITS["lost_s"]:
            break
        void.append(f"pause of {pauses.longest_s:.2f} s: {verdict.problem}")
    return verdict


def _play(scenario: Scenario, folder: Path, pace: float, void: list[str]) -> Verdict:
    due = table(scenario)
    problems: list[str] = []
    play = Play(scenario, pace)
    simulated_s = _timed(play.run, "simulated", problems)
    with Live(scenario, folder, pace) as live:
        real_s = _timed(live.run, "real", problems)
    for name, performance in (("simulated", play), ("real", live)):
        for number, (row, wanted) in enumerate(zip(performance.rows, due, strict=False)):
            if row != wanted:
                problems.append(f"{name} {row}; due is {wanted}; {performance.details[number]}")
    return Verdict(
        id=scenario.id,
        title=scenario.title,
        hazards=scenario.hazards,
        rows=live.rows,
        reasons=live.details,
        simulated=play.rows,
        simulated_reasons=play.details,
        holds=not problems and play.rows == live.rows == due,
        problem="; ".join(problems),
        pace=pace,
        void=list(void),
        simulated_s=round(simulated_s, 3),
        real_s=round(real_s, 3),
    )


class Pauses:
    """Measures how long a thread that wants to run every few milliseconds had to wait, at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pauses", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _measure(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_MEASURE_S):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last - _MEASURE_S)
            last = now


def _timed(run: Callable[[], object], name: str, problems: list[str]) -> float:
    began = time.monotonic()
    try:
        run()
    except (AssertionError, OSError) as error:
        problems.append(f"{name}: {error}")
    return time.monotonic() - began


def play_all(scenarios: Sequence[Scenario], jobs: int) -> Iterator[Verdict]:
    """Verdicts in order. Most of a scenario is waiting, so several run at once."""
    with tempfile.TemporaryDirectory(prefix="kvx-scenarios-") as folder, ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda scenario: judge(scenario, Path(folder)), scenarios)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvx_conformance.processes", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="scenarios, by default all")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default 2)")
    report.add_json_argument(parser)
    options = parser.parse_args(argv)
    unknown = [name for name in options.ids if name not in SCENARIOS]
    if unknown or options.jobs < 1:
        parser.error(f"no scenarios: {', '.join(unknown)}" if unknown else "--jobs has to be at least 1")
    chosen = [SCENARIOS[name] for name in options.ids or SCENARIOS]
    verdicts = []
    for verdict in play_all(chosen, options.jobs):
        verdicts.append(verdict)
        sys.stderr.write(_line(verdict))
    wrong = [verdict for verdict in verdicts if not verdict.holds]
    sys.stderr.write(f"{len(verdicts)} scenarios, {len(wrong)} do not hold\n")
    if options.json:
        fields = {"scenarios": len(verdicts), "equal": len(verdicts) - len(wrong), "limits": dict(LIMITS)}
        report.write(options.json, report.document("processes", {**fields, "table": [_record(v) for v in verdicts]}))
    return int(bool(wrong))


def _record(verdict: Verdict) -> dict[str, object]:
    tables = {"rows": [str(row) for row in verdict.rows], "simulated": [str(row) for row in verdict.simulated]}
    return {**asdict(verdict), **tables}


def _line(verdict: Verdict) -> str:
    mark = "holds" if verdict.holds else "FAILS"
    outcomes = ", ".join(f"{row.who} {row.transfer} {row.outcome}" for row in verdict.rows if row.transfer)
    lines = [f"{verdict.id} {mark} {verdict.real_s:6.2f} s  {verdict.title}: {outcomes}"]
    lines += [f"    void: {problem}" for problem in verdict.void]
    lines += [f"    {verdict.problem}"] if verdict.problem else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
