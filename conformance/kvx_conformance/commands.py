"""`kvx sim`: how many random worlds hold, on the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvx import report
from kvx.core.errors import ConfigError
from kvx_conformance import campaign
from kvx_conformance.campaign import COUNTED, Tally
from kvx_conformance.shrink import shrink
from kvx_conformance.sim import run_world

SHOWN = 5
"""Failed seeds of which it is said how to see why."""


def sim(argv: list[str]) -> int:
    """Run the simulation. Exit status 0: all worlds hold; 1: one does not; 2: usage; 130: interrupted."""
    options = _parser().parse_args(argv)
    if options.seed is None and (options.trace or options.shrink or options.only):
        _say("kvx sim: --trace, --shrink and --only need --seed")
        return 2
    try:
        return _one(options) if options.seed is not None else _many(options)
    except (ConfigError, ValueError) as error:
        _say(f"kvx sim: {error}")
        return 2


def _one(options: argparse.Namespace) -> int:
    if options.shrink:
        return _shrink(options.seed, options.only)
    tally = Tally(options.seed, 1, campaign.source_digest())
    tally.add(0, [run_world(options.seed, _say if options.trace else None, options.only)])
    return _told(tally, 1, options.json)


def _many(options: argparse.Namespace) -> int:
    tally = campaign.resume(options.first, options.seeds, options.record)
    if tally.worlds:
        _say(f"going on after {tally.worlds} of {tally.seeds} worlds")
    interrupted = campaign.run(tally, options.jobs, options.record, _say)
    if interrupted and options.record is not None:
        _say("stopped; the same command goes on from here")
    status = _told(tally, options.jobs, options.json)
    return 130 if interrupted else status


def _told(tally: Tally, jobs: int, json: str | None) -> int:
    """Print what came of it. Exit status 1: a world does not hold."""
    counts = ", ".join(f"{number} {name}" for name, number in tally.totals.items())
    _say(f"{tally.worlds} worlds, {counts} in {tally.seconds:.1f} s")
    for seed, text in tally.violations:
        _say(f"seed {seed}: {text}")
    for seed in list(dict.fromkeys(seed for seed, _ in tally.violations))[:SHOWN]:
        _say(f"to see why: kvx sim --seed {seed} --shrink")
    if json:
        report.write(json, report.document("sim", {"jobs": jobs, **_fields(tally)}))
    return int(bool(tally.violated))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvx sim", description="Live through random worlds of instances that crash, stall and lose one another."
    )
    parser.add_argument("--seeds", type=_positive, default=300, metavar="N", help="how many worlds (default 300)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happens in it")
    parser.add_argument(
        "--only", type=_names, metavar="E,E", help="with --seed: play these elements of the world and no others"
    )
    parser.add_argument("--shrink", action="store_true", help="with --seed: find the fewest elements that still fail")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep how far it has come; the same command goes on from there"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=_positive, default=cores, metavar="N", help=f"processes to use (default: all cores, {cores})"
    )
    report.add_json_argument(parser)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _shrink(seed: int, only: Sequence[str] | None) -> int:
    """Tell the smallest world that fails as this one does."""
    shrunk = shrink(seed, only)
    if shrunk is None:
        _say(f"the world of seed {seed} holds")
        return 0
    for line in shrunk.story:
        _say(line)
    _say(f"\nof the elements of this world these are enough, {shrunk.left_out} can be left out:")
    for name, what in shrunk.elements.items():
        _say(f"  {name}: {what}")
    for violation in shrunk.summary.violations:
        _say(f"seed {seed}: {violation}")
    _say(f"to see it again: {shrunk.command}")
    return 1


def _fields(tally: Tally) -> dict[str, object]:
    return {
        "first": tally.first,
        "seeds": tally.seeds,
        "source": tally.source,
        "worlds": tally.worlds,
        **{name: tally.totals[name] for name in COUNTED},
        "violated": tally.violated,
        "violations": [{"seed": seed, "text": text} for seed, text in tally.violations],
        "seconds": round(tally.seconds, 3),
    }


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
