"""`kvx sim`: how many random worlds hold, on the command line."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import closing

from kvx import report
from kvx_conformance.shrink import shrink
from kvx_conformance.sim import Summary, run_world

BATCH = 10
"""Worlds that one process lives through before it reports."""
SHOWN = 5
"""Failed seeds of which it is said how to see why."""
COUNTED = (
    *("transfers", "ok", "failed", "aborts", "crashes", "deaths", "restarts", "cuts", "stalls", "duplicates"),
    *("reuses", "quarantined"),
)


def sim(argv: list[str]) -> int:
    """Run the simulation. Exit status 0: all worlds hold; 1: one does not; 2: usage; 130: interrupted."""
    options = _parser().parse_args(argv)
    started = time.monotonic()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    if options.seed is None and (options.trace or options.shrink or options.only):
        _say("kvx sim: --trace, --shrink and --only need --seed")
        return 2
    results: list[Summary] = []
    status = 0
    try:
        if options.shrink:
            return _shrink(options.seed, options.only)
        if options.trace or options.only:
            results.append(run_world(options.seed, _say if options.trace else None, options.only))
        else:
            with closing(_run(seeds, options.jobs)) as worlds:
                for summary in worlds:
                    results.append(summary)
                    _progress(results, len(seeds), started)
    except KeyboardInterrupt:
        status = 130
    except ValueError as unknown:
        _say(f"kvx sim: {unknown}")
        return 2
    fields = _fields(results, time.monotonic() - started)
    _say(", ".join(f"{fields[name]} {name}" for name in ("worlds", *COUNTED)) + f" in {fields['seconds']} s")
    violations = [(summary.seed, text) for summary in results for text in summary.violations]
    for seed, text in violations:
        _say(f"seed {seed}: {text}")
    for seed in dict.fromkeys(seed for seed, _ in violations[:SHOWN]):
        _say(f"to see why: kvx sim --seed {seed} --shrink")
    if options.json:
        report.write(options.json, report.document("sim", fields))
    return status or int(bool(violations))


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
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="processes to use (default 1)")
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


def _run(seeds: Sequence[int], jobs: int) -> Generator[Summary, None, None]:
    if jobs == 1:
        yield from map(run_world, seeds)
        return
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    pool = ProcessPoolExecutor(jobs, initializer=_ignore_interrupt)
    try:
        waiting: set[Future[list[Summary]]] = {pool.submit(_batch, batch) for batch in batches}
        while waiting:
            done, waiting = wait(waiting, return_when="FIRST_COMPLETED")
            for future in done:
                yield from future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batch(seeds: Sequence[int]) -> list[Summary]:
    return [run_world(seed) for seed in seeds]


def _ignore_interrupt() -> None:
    """Ctrl-C reaches the whole group; the parent alone decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _progress(results: Sequence[Summary], total: int, started: float) -> None:
    if len(results) % 50 == 0 and len(results) < total:
        rate = len(results) / max(time.monotonic() - started, 1e-9)
        bad = sum(bool(summary.violations) for summary in results)
        _say(f"{len(results)} of {total} worlds, {rate:.0f} each second, {bad} violated")


def _fields(results: list[Summary], seconds: float) -> dict[str, object]:
    results.sort(key=lambda summary: summary.seed)
    return {
        "worlds": len(results),
        **{name: sum(getattr(summary, name) for summary in results) for name in COUNTED},
        "violations": [{"seed": summary.seed, "text": text} for summary in results for text in summary.violations],
        "seconds": round(seconds, 3),
    }


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
