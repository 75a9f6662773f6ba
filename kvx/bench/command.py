"""`kvx bench`: what can be measured, with what sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from kvx.arguments import add_command, count, emit, pair
from kvx.core.errors import ConfigError


def add(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure a part of kvx on this machine")
    benches = bench.add_subparsers(title="benches", metavar="BENCH", required=True)
    moving = add_command(benches, "transport", _transport, "verified copies between two processes, beside baselines")
    moving.add_argument("--transports", default="tcp", metavar="A,B", help="transports to measure (default tcp)")
    moving.add_argument("--op", default="read,write", metavar="OPS", help="read, write or both (default read,write)")
    moving.add_argument("--bytes", type=count, default=64 << 20, metavar="N", help="bytes per copy (default 64 MiB)")
    moving.add_argument("--pieces", type=count, default=1, metavar="N", help="pieces per copy (default 1)")
    moving.add_argument("--repeat", type=count, default=10, metavar="N", help="rounds (default 10)")
    moving.add_argument(
        "--option",
        action="append",
        default=[],
        type=pair,
        metavar="NAME:KEY=VALUE",
        help="of one of the transports; a TOML value",
    )
    planning = add_command(benches, "planner", _planner, "pure planning: which bytes of which blocks")
    planning.add_argument("--blocks", type=count, default=1024, metavar="N", help="blocks per request (default 1024)")
    planning.add_argument("--layers", type=count, default=32, metavar="N", help="layers (default 32)")
    planning.add_argument("--layout", choices=("fresh", "fragmented", "random"), help="one case instead of all")
    planning.add_argument("--floors", action="store_true", help="instead: the sizes and cases that have a bar")
    calls = add_command(benches, "callbacks", _callbacks, "what an adapter costs its engine in each step")
    calls.add_argument("--engine", default="reference", metavar="E", help="whose adapter (default reference)")
    calls.add_argument("--open", type=int, metavar="N", help="one number of open transfers (default 0, 100 and 10,000)")
    calls.add_argument("--moving", action="store_true", help="only while 64 MiB loads move (default idle as well)")
    calls.add_argument("--rounds", type=count, default=50, metavar="N", help="of 40 steps each (default 50)")
    handing = add_command(benches, "handoff", _handoff, "what part of a transfer a prefill does not hide")
    handing.add_argument("--transport", default="tcp", metavar="NAME", help="what moves the bytes (default tcp)")
    handing.add_argument("--layers", type=count, default=32, metavar="N", help="default 32")
    handing.add_argument("--bytes", type=count, default=64 << 20, metavar="N", help="in all (default 64 MiB)")
    handing.add_argument("--pieces", type=count, default=1024, metavar="N", help="in all (default 1024)")
    handing.add_argument("--prefill-ms", type=count, default=100, metavar="N", help="on a quiet machine (default 100)")
    handing.add_argument(
        "--modes", default="pull,pull-thread,push,push-layerwise", metavar="A,B", help="default all four"
    )
    handing.add_argument("--repeat", type=count, default=25, metavar="N", help="rounds (default 25)")


def _transport(arguments: argparse.Namespace) -> int:
    from kvx.bench import transport

    options: dict[str, dict[str, object]] = {}
    for name, value in arguments.option:
        of, _, key = name.rpartition(":")
        options.setdefault(of, {})[key] = value
    if unknown := options.keys() - set(arguments.transports.split(",")):
        raise ConfigError(f"--option is for {', '.join(sorted(unknown)) or 'none'}, which is not in --transports")
    fields = _measured(
        transport.run,
        transports=arguments.transports.split(","),
        ops=arguments.op.split(","),
        nbytes=arguments.bytes,
        pieces=arguments.pieces,
        repeat=arguments.repeat,
        options=options,
    )
    lines = [
        f"{row['name']:<15} {row['op']:<6} {row['gbps']['median']:8.2f} GB/s{'' if row['verified'] else ' WRONG BYTES'}"
        for row in fields["results"]
    ]
    lines += [
        f"{row['name']:<15} {row['op']:<6} {row['median']:8.2f} of the speed of {row['to']}" for row in fields["ratios"]
    ]
    emit(arguments, "bench.transport", fields, lines)
    return 0 if all(row["verified"] for row in fields["results"]) else 1


def _planner(arguments: argparse.Namespace) -> int:
    from kvx.bench import planner

    cases = (arguments.layout,) if arguments.layout else planner.CASES
    sizes = {"blocks": arguments.blocks, "layers": arguments.layers, "cases": cases}
    fields = _measured(planner.floors) if arguments.floors else _measured(planner.run, **sizes)
    emit(arguments, "bench.planner", fields, planner.lines(fields))
    return 0


def _callbacks(arguments: argparse.Namespace) -> int:
    from kvx.bench import callbacks

    fields = _measured(
        callbacks.run,
        engine=arguments.engine,
        opened=callbacks.OPEN if arguments.open is None else (arguments.open,),
        moving=(True,) if arguments.moving else (False, True),
        rounds=arguments.rounds,
    )
    emit(arguments, "bench.callbacks", fields, callbacks.lines(fields))
    return 0 if fields["verified"] else 1


def _handoff(arguments: argparse.Namespace) -> int:
    from kvx.bench import handoff

    fields = _measured(
        handoff.run,
        transport=arguments.transport,
        layers=arguments.layers,
        nbytes=arguments.bytes,
        pieces=arguments.pieces,
        prefill_ms=arguments.prefill_ms,
        modes=arguments.modes.split(","),
        repeat=arguments.repeat,
    )
    emit(arguments, "bench.handoff", fields, handoff.lines(fields))
    return 0 if all(row["verified"] for row in fields["results"]) else 1


def _measured(run: Callable[..., Mapping[str, Any]], **sizes: Any) -> Mapping[str, Any]:
    """A bench's fields; sizes that it cannot work with are the user's mistake."""
    try:
        return run(**sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
