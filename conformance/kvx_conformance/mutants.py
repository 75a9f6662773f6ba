"""`python -m kvx_conformance.mutants`: does a test fail when a rule is taken out of the code?

Works on temporary copies of a checkout. The tests that the mutants name run first without any
edit (they have to pass), then each with its mutant's edit (it has to fail); with `--worlds N` that
many simulated worlds are tried as well, which shows what the simulation alone would have found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from attrs import asdict, frozen

from kvx import report
from kvx_conformance.removals import MUTANTS, Mutant

COPIED = ("kvx", "transports", "adapters", "conformance", "tests", "docs", "pyproject.toml", "README.md")
ROOTS = (".", "transports", "adapters", "conformance")
LIMIT_S = 300.0
SIM = "import sys; from kvx_conformance.commands import sim; sys.exit(sim(sys.argv[1:]))"


@frozen
class Verdict:
    """What became of one mutant. `worlds`: how many simulated worlds failed (None: not tried)."""

    mutant: Mutant
    killed: bool
    why: str
    worlds: int | None
    seconds: float


class Tree:
    """A copy of the checkout in which a test can be run as if it were the original."""

    def __init__(self, source: Path, place: Path) -> None:
        self.place = place
        for name in COPIED:
            if (source / name).is_dir():
                shutil.copytree(source / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "evidence"))
            elif (source / name).exists():
                shutil.copy2(source / name, place / name)
        roots = os.pathsep.join(str(place / root) for root in ROOTS)
        self._env = {**os.environ, "PYTHONPATH": roots, "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Python in the copy. Raises subprocess.TimeoutExpired."""
        return subprocess.run(  # noqa: S603 - this interpreter, arguments of this file
            [sys.executable, *arguments],
            cwd=self.place,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def test(self, *tests: str) -> tuple[int, str]:
        """Exit status of pytest and its last line."""
        try:
            done = self.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", *tests)
        except subprocess.TimeoutExpired:
            return 1, f"no end within {LIMIT_S:g} s"
        lines = (done.stdout + done.stderr).strip().splitlines()
        return done.returncode, lines[-1] if lines else ""

    def worlds(self, number: int) -> int:
        """How many of that many worlds fail."""
        target = self.place / "sim.json"
        self.run("-c", SIM, "--seeds", str(number), "--jobs", "1", "--json", str(target))
        violations = json.loads(target.read_text())["violations"]
        return len({found["seed"] for found in violations})

    def edit(self, mutant: Mutant) -> str:
        """Apply a mutant; gives back the text before. Raises ValueError if the line is not there once."""
        path = self.place / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}")
        path.write_text(text.replace(mutant.old, mutant.new))
        return text


def judge(tree: Tree, mutant: Mutant, worlds: int) -> Verdict:
    """Run a mutant's test, which passes without it, with its edit."""
    started = time.monotonic()
    try:
        before = tree.edit(mutant)
    except ValueError as error:
        return Verdict(mutant, False, str(error), None, time.monotonic() - started)
    try:
        status, line = tree.test(mutant.test)
        failed = tree.worlds(worlds) if worlds else None
    finally:
        (tree.place / mutant.file).write_text(before)
    return Verdict(mutant, status == 1, line, failed, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: every mutant is killed; 1: one survives, or a test fails without any; 2: usage."""
    parser = argparse.ArgumentParser(
        prog="python -m kvx_conformance.mutants", description="Take rules out, one by one."
    )
    parser.add_argument("--only", metavar="TEXT", help="those whose rule is TEXT, or whose description has it")
    parser.add_argument("--worlds", type=int, default=0, metavar="N", help="try N simulated worlds as well")
    parser.add_argument("--tree", type=Path, default=Path.cwd(), metavar="DIR", help="the checkout (default: here)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help=f"mutants at a time (default: all cores, {cores})"
    )
    report.add_json_argument(parser)
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    chosen = [m for m in MUTANTS if not options.only or options.only == m.rule or options.only in m.removes]
    if not chosen or not (options.tree / "tests").is_dir():
        parser.error("no such mutant" if not chosen else f"{options.tree} is no checkout of kvx")
    verdicts, trees = [], SimpleQueue[Tree]()

    def with_a_tree(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return judge(tree, mutant, options.worlds)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="kvx-mutants-") as place, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            trees.put(tree := Tree(options.tree, Path(place) / str(number)))
        status, line = tree.test(*sorted({mutant.test for mutant in chosen}))
        if status != 0:
            sys.stderr.write(f"without any edit: {line}\n")
            return 1
        for verdict in pool.map(with_a_tree, chosen):
            verdicts.append(verdict)
            sys.stderr.write(_row(verdict) + "\n")
    survivors = [verdict for verdict in verdicts if not verdict.killed]
    sys.stderr.write(f"{len(verdicts) - len(survivors)} of {len(verdicts)} killed\n")
    if options.json:
        results = [{**asdict(v.mutant), "killed": v.killed, "why": v.why, "worlds": v.worlds} for v in verdicts]
        report.write(options.json, report.document("mutants", {"results": results}))
    return int(bool(survivors))


def _row(verdict: Verdict) -> str:
    mutant = verdict.mutant
    cells = [mutant.rule, mutant.removes, mutant.test, "yes" if verdict.killed else f"NO: {verdict.why}"]
    if verdict.worlds is not None:
        cells.append(f"{verdict.worlds} worlds")
    return " | ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
