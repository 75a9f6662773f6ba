"""`python -m kvx_conformance.fuzz`: hostile bytes and hostile peers, and what they do to whom.

Each target takes its share of the inputs. A finding is an exception that is not the typed one, an
honest transfer that fails afterwards, or memory that grows. The same seed gives the same inputs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from attrs import asdict, frozen

from kvx import report
from kvx_conformance.fuzz_core import Decoder, Envelopes, HostilePeer, Tickets
from kvx_conformance.fuzz_live import LiveInstance
from kvx_conformance.fuzz_ports import ControlPort, DataPort

GROWTH_BYTES = 64 << 20
"""Resident memory that a target may add after its first fifth; tables with a bound fill up before."""
CHECKS = 20
"""How often in its run each target has to serve an honest user."""


class Target(Protocol):
    """One thing that takes bytes or messages from outside."""

    def feed(self) -> bool:
        """Give it one input; whether it was taken. Raises whatever must not happen."""

    def check(self) -> None:
        """Raise AssertionError if it does not serve honest users any more."""

    def close(self) -> None: ...


@frozen
class Finding:
    """What went wrong; the run of the same target, seed and number of inputs shows it again."""

    target: str
    number: int
    error: str


@frozen
class Result:
    """`taken` inputs were read, the other ones refused with a typed error."""

    target: str
    inputs: int
    taken: int
    checks: int
    seconds: float
    grown_bytes: int


def _traffic(random: Random, skip: int = 0) -> list[bytes]:
    """What kvx_tcp says on its data connections, without the first `skip` bytes of each piece."""
    port = DataPort(random, "tcp")
    try:
        return [piece[skip:] for piece in port.traffic()]
    finally:
        port.close()


TCP_HEADER = 32
"""Bytes of a frame's header in kvx_tcp."""
TARGETS: Mapping[str, tuple[float, Callable[[Random], Target]]] = {
    "envelopes": (0.37, Envelopes),
    "tickets": (0.15, Tickets),
    "tcp-header": (0.1, lambda random: Decoder(random, "kvx_tcp.frames:Frame.decode", _traffic(random), TCP_HEADER)),
    "tcp-hello": (0.1, lambda random: Decoder(random, "kvx_tcp.frames:Hello.decode", _traffic(random, TCP_HEADER))),
    "tcp-open": (0.1, lambda random: Decoder(random, "kvx_tcp.frames:decode_open", _traffic(random, TCP_HEADER))),
    "control-port": (0.04, ControlPort),
    "data-port": (0.04, lambda random: DataPort(random, "tcp")),
    "hostile-peer": (0.05, HostilePeer),
    "live-instance": (0.05, LiveInstance),
}
"""Each target's share of the inputs. Decoders of plugins are named, not imported: the suite knows no plugin."""


def run(name: str, inputs: int, seed: int) -> tuple[Result, list[Finding]]:
    """Give one target its inputs; it is made anew after a finding, and given up after five."""
    make = TARGETS[name][1]
    random = Random(f"{seed} {name}")  # noqa: S311 - the same inputs for the same seed
    target, findings, taken, checks = make(random), list[Finding](), 0, 0
    started, settled, every = time.monotonic(), 0, max(1, inputs // CHECKS)
    for number in range(inputs):
        try:
            taken += target.feed()
            if (number + 1) % every == 0:
                target.check()
                checks += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            trace = "".join(traceback.format_exception(error, limit=-3))
            findings.append(Finding(name, number, trace))
            target.close()
            if len(findings) == 5:
                break
            target = make(random)
        if number == inputs // 5:
            settled = _resident()
    grown = _resident() - settled
    target.close()
    if grown > GROWTH_BYTES:
        findings.append(Finding(name, inputs, f"memory has grown by {grown} bytes"))
    return Result(name, inputs, taken, checks, round(time.monotonic() - started, 1), grown), findings


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: nothing was found; 1: something was; 2: usage."""
    parser = argparse.ArgumentParser(prog="python -m kvx_conformance.fuzz", description="Hostile bytes, hostile peers.")
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="in all (default 20000)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which inputs (default 1)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; it gets all inputs")
    report.add_json_argument(parser)
    options = parser.parse_args(argv)
    chosen = options.target or list(TARGETS)
    whole = sum(TARGETS[name][0] for name in chosen)
    results, findings = [], list[Finding]()
    for name in chosen:
        result, found = run(name, max(1, round(options.inputs * TARGETS[name][0] / whole)), options.seed)
        results.append(result)
        findings += found
        sys.stderr.write(f"{name}: {result.inputs} inputs, {result.taken} taken, {len(found)} findings, ")
        sys.stderr.write(f"{result.seconds} s, {result.grown_bytes / 1e6:.1f} MB more\n")
    for finding in findings:
        sys.stderr.write(f"{finding.target}, input {finding.number}: {finding.error}\n")
    if options.json:
        fields = {
            "seed": options.seed,
            "inputs": sum(result.inputs for result in results),
            "results": [asdict(result) for result in results],
            "findings": [asdict(finding) for finding in findings],
        }
        report.write(options.json, report.document("fuzz", fields))
    return int(bool(findings))


if __name__ == "__main__":
    logging.getLogger("kvx").setLevel(logging.CRITICAL)  # a line for each bad input helps nobody
    sys.exit(main())
