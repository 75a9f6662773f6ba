"""The command line: parses, calls, prints. Exit status 0 good, 1 the checked thing fails, 2 usage or configuration."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import asdict

from kvx import __version__, demo, doctor, drift, plugins, up
from kvx.address import format_address
from kvx.arguments import Command, add_command, count, emit, pair, port, seconds
from kvx.bench import command as bench
from kvx.config import Options
from kvx.core import wire
from kvx.core.errors import ConfigError, KvxError, PluginError, RemoteProtocolError
from kvx.core.messages import Ack
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.operator import ask
from kvx.router.metrics import render
from kvx.traffic import families

COMMANDS = "kvx.commands"
"""Entry-point group of further commands: callables `(argv: list[str]) -> int`."""

_LOOK_S = 0.2
"""Pause between two looks at an instance that is being drained."""

_ABOUT = """\
kvx moves the KV cache of LLM requests between prefill and decode instances.

Begin with `kvx demo`, which shows on this machine that it works, and `kvx doctor`, which says what
is missing. An instance is started by its engine, with kvx as its connector: docs/quickstart.md.
Options come from the engine's settings, from KVX_* variables and from the TOML file that
KVX_CONFIG names: docs/configuration.md.
"""
_EXAMPLES = """\
examples:
  kvx doctor
  kvx status 127.0.0.1:5700
  kvx release "$TICKET"
  kvx router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --mode push
  kvx bench transport --bytes 67108864 --pieces 64 --json bench.json

exit status: 0 good, 1 what was checked or asked for failed, 2 usage or configuration
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error that a person can mend is one sentence on stderr."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    words = list(sys.argv[1:] if argv is None else argv)
    further = {entry.name: entry for entry in importlib.metadata.entry_points(group=COMMANDS)}
    try:
        if words and words[0] in further:
            return _further(further[words[0]])(words[1:])
        arguments = _parser(sorted(further)).parse_args(words)
        return cast(Command, arguments.run)(arguments)
    except (ConfigError, PluginError) as error:
        return _fail(error, 2)
    except KvxError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: KvxError, status: int) -> int:
    print(f"kvx: {error}", file=sys.stderr)
    return status


def _further(entry: importlib.metadata.EntryPoint) -> Callable[[list[str]], int]:
    try:
        return cast("Callable[[list[str]], int]", entry.load())
    except ImportError as error:
        raise PluginError(f"command {entry.name!r} needs something that is not installed: {error}") from error


def _parser(further: Sequence[str]) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("kvx", description=_ABOUT, epilog=_EXAMPLES, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"kvx {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in further:
        commands.add_parser(name, help=f"see `kvx {name} --help`", add_help=False)

    health = add_command(commands, "doctor", _doctor, "what works in this environment, and what to do about the rest")
    health.add_argument(
        "--engine-interface",
        metavar="WHEEL",
        help="instead: does the adapter fit this release of its engine? a wheel, a folder or an installed distribution",
    )

    status = add_command(commands, "status", _operate, "ask an instance for its open transfers and counters")
    drain = add_command(commands, "drain", _operate, "let an instance finish its transfers and take no new ones")
    release = add_command(commands, "release", _operate, "give back the blocks that a ticket holds")
    for one, verb in ((status, "status"), (drain, "drain")):
        one.add_argument("address", metavar="HOST:PORT", help="control address of one rank (option advertise)")
        one.set_defaults(verb=verb)
    release.add_argument("ticket", metavar="TICKET", help="the text under kvx.ticket in a prefill answer")
    release.set_defaults(verb="release")
    status.add_argument("--metrics", action="store_true", help="print what its transports did, as Prometheus reads it")
    drain.add_argument(
        "--grace-s", type=seconds, default=60.0, metavar="S", help="open transfers may run for S seconds (default 60)"
    )
    drain.add_argument(
        "--wait-s", type=seconds, metavar="S", help="then wait until none is open, S seconds at most (default: do not)"
    )
    for one in (status, drain, release):
        one.add_argument(
            "--timeout-s", type=seconds, default=10.0, metavar="S", help="longest wait, seconds (default 10)"
        )

    shown = add_command(
        commands, "demo", _demo, "real servers on this machine: are the tokens those of a single instance?"
    )
    shown.add_argument("--engine", default="reference", metavar="E", help="whose servers (default reference)")
    shown.add_argument("--mode", choices=("push", "pull", "both"), default="both", help="default both, or what E can")
    shown.add_argument("--requests", type=count, default=20, metavar="N", help="for each mode (default 20)")
    shown.add_argument("--transport", default="tcp", metavar="NAME", help="what moves the bytes (default tcp)")
    shown.add_argument(
        "--option", action="append", default=[], type=pair, metavar="KEY=VALUE", help="of the transport; a TOML value"
    )

    kept = add_command(commands, "up", _up, "a local cluster with a router, kept until Ctrl-C", json=False)
    kept.add_argument("--engine", default="reference", metavar="E", help="whose servers (default reference)")
    kept.add_argument("--prefill", type=count, default=1, metavar="N", help="prefill servers (default 1)")
    kept.add_argument("--decode", type=count, default=1, metavar="N", help="decode servers (default 1)")
    kept.add_argument("--mode", choices=("push", "pull", "auto"), default="auto", help="default auto")
    kept.add_argument(
        "--model", default="", metavar="PATH", help="as the engine takes it (default: a small random one)"
    )
    kept.add_argument("--port", type=port, metavar="P", help="the router's (default: any free one)")
    kept.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="more arguments for each engine server")

    router = add_command(
        commands, "router", _router, "one HTTP address in front of prefill and decode instances", json=False
    )
    router.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL[=HOST:PORT]",
        help="a prefill instance, as often as there are any; its control address is asked for where it is not given; "
        "http+dns://NAME:PORT means all addresses of a name, also those that come later",
    )
    router.add_argument("--decode", action="append", default=[], metavar="URL", help="the same for decode instances")
    router.add_argument(
        "--pools", metavar="FILE", help="a TOML file with both lists instead, followed while the router runs"
    )
    router.add_argument(
        "--mode",
        choices=("push", "pull", "auto"),
        default="auto",
        help="auto chooses for each request: docs/operations.md (default auto)",
    )
    router.add_argument("--verbose", action="store_true", help="log each choice: mode, instances, and why")
    router.add_argument("--engine", metavar="E", help="whose HTTP dialect (default: OpenAI's as vLLM extends it)")
    router.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1)")
    router.add_argument("--port", type=port, default=8000, help="default 8000")
    router.add_argument("--api-key-file", metavar="FILE", help="ask clients for this key, and show it to the instances")
    router.add_argument("--insecure", action="store_true", help="listen beyond loopback without a key")
    for option, default, text in (
        ("--connect-s", 5.0, "to connect to an instance"),
        ("--prefill-s", 600.0, "for the whole prefill leg"),
        ("--idle-s", 600.0, "for the next piece of a decode instance's answer; one that is not streamed is one piece"),
        ("--queue-s", 60.0, "for a request that waits for room"),
        ("--stall-s", 2.0, "for a prefilled prompt that waits for a decode instance: then no further one is prefilled"),
        ("--drain-s", 20.0, "for open requests when the router is told to stop"),
    ):
        router.add_argument(
            option, type=seconds, default=default, metavar="S", help=f"limit {text} (default {default:g})"
        )

    router.add_argument("--room", type=count, default=256, metavar="N", help="open legs at an instance (default 256)")
    router.add_argument(
        "--queue-limit", type=count, default=1024, metavar="N", help="requests that wait for room (default 1024)"
    )

    bench.add(commands)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.engine_interface is not None:
        return _interface(arguments)
    checks = doctor.examine(plugins.load())
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{'ok ' if check.ok else 'BAD'}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"     {'':<{width}}  -> {check.fix}")
    emit(arguments, "doctor", {"checks": [asdict(check) for check in checks]}, lines)
    return 0 if all(check.ok for check in checks) else 1


def _interface(arguments: argparse.Namespace) -> int:
    verdict = drift.examine(plugins.load().interfaces().values(), arguments.engine_interface)
    tested = "tested" if verdict.is_tested else f"not tested: kvx is made for {verdict.tested}"
    lines = [
        f"{verdict.engine} {verdict.version} ({tested}), compared with {verdict.reference}",
        *(
            f"{'BAD' if one.breaks else '-  '}  {one.change:<7}  {one.name}\n{'':14}{one.detail}"
            for one in verdict.differences
        ),
        "The adapter fits." if verdict.fits else "The adapter does not fit.",
    ]
    emit(arguments, "doctor.interface", {**asdict(verdict), "fits": verdict.fits}, lines)
    return 0 if verdict.fits else 1


def _operate(arguments: argparse.Namespace) -> int:
    secret = Options.load().secret
    match arguments.verb:
        case "release":
            address, argument = _ticket_address(arguments.ticket), arguments.ticket
        case "drain":
            address, argument = arguments.address, f"{arguments.grace_s:g}"
        case _:
            address, argument = arguments.address, ""
    answer = ask(address, arguments.verb, argument, secret=secret, timeout_s=arguments.timeout_s)
    if answer.ok and arguments.verb == "drain" and arguments.wait_s is not None:
        answer = _drained(arguments, secret)
    body = _body(address, answer)
    reason = answer.reason.value if answer.reason else ""
    outcome = {"ok": answer.ok, "reason": reason, "detail": answer.detail, "body": body}
    text = json.dumps(body, indent=2) if body else answer.detail or reason or "done"
    if answer.ok and arguments.verb == "status" and arguments.metrics:
        text = render(families(address, body)).rstrip()
    emit(arguments, arguments.verb, {"outcome": outcome}, [text])
    return 0 if answer.ok else 1


def _drained(arguments: argparse.Namespace, secret: bytes) -> Ack:
    """An instance's status once no transfer is open there. Raises KvxError where one still is after `--wait-s`."""
    until = time.monotonic() + arguments.wait_s
    while True:
        answer = ask(arguments.address, "status", secret=secret, timeout_s=arguments.timeout_s)
        left = _body(arguments.address, answer).get("open")
        if not answer.ok or not left:
            return answer
        if time.monotonic() >= until:
            raise KvxError(f"{arguments.address} still has {len(left)} open transfers after {arguments.wait_s:g} s")
        time.sleep(_LOOK_S)


def _body(address: str, answer: Ack) -> dict[str, Any]:
    try:
        body = json.loads(answer.body or "{}")
    except ValueError as error:
        raise RemoteProtocolError(f"{address} answered with what is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RemoteProtocolError(f"{address} answered with what is no JSON object")
    return body


def _demo(arguments: argparse.Namespace) -> int:
    mode = None if arguments.mode == "both" else Mode(arguments.mode)
    transport, section = arguments.transport, dict(arguments.option)
    results = demo.run(arguments.engine, mode, arguments.requests, _say, transport, section)
    fields = {"engine": arguments.engine, "transport": transport, "modes": [result.fields() for result in results]}
    emit(arguments, "demo", fields, ["", *demo.table(results), "", demo.verdict(results)])
    return 0 if all(result.good for result in results) else 1


def _up(arguments: argparse.Namespace) -> int:
    up.run(
        arguments.engine,
        prefill=arguments.prefill,
        decode=arguments.decode,
        mode=_mode(arguments.mode),
        model=arguments.model,
        port=arguments.port,
        arguments=arguments.arguments,
        say=_say,
    )
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mode(text: str) -> Mode | None:
    return None if text == "auto" else Mode(text)


def _router(arguments: argparse.Namespace) -> int:
    try:
        from kvx.router import app, settings, upstream
    except ImportError as error:
        raise PluginError(f"kvx router needs aiohttp ({error}): pip install 'kvx[router]'") from error
    found = plugins.load()
    mode = _mode(arguments.mode)
    key = settings.check_exposure(arguments.host, arguments.api_key_file, insecure=arguments.insecure)
    file = settings.PoolFile(Path(arguments.pools)) if arguments.pools else None
    if file is not None and (arguments.prefill or arguments.decode):
        raise ConfigError("--pools names all instances: give either it or --prefill and --decode")
    listing = file.read() if file else settings.Listing(arguments.prefill, arguments.decode)
    driver = found.driver(arguments.engine) if arguments.engine else None
    ready = settings.Settings(
        listing=listing,
        mode=mode,
        modes=settings.able(mode, driver.modes if driver else frozenset(Mode)),
        dialect=driver.dialect if driver else CompletionsDialect(),
        wish=found.choose_mode,
        options=Options.load(),
        limits=upstream.Limits(connect_s=arguments.connect_s, prefill_s=arguments.prefill_s, idle_s=arguments.idle_s),
        flow=settings.Flow(
            room=arguments.room,
            queue=arguments.queue_limit,
            queue_s=arguments.queue_s,
            stall_s=arguments.stall_s,
        ),
        host=arguments.host,
        port=arguments.port,
        api_key=key,
        drain_s=arguments.drain_s,
        pool_file=file,
    )
    if arguments.verbose:
        logging.getLogger("kvx.router").setLevel(logging.INFO)
    _say(f"kvx router: http://{format_address(arguments.host, arguments.port)}")
    app.serve(ready)
    return 0


def _ticket_address(text: str) -> str:
    try:
        return wire.parse_ticket(text).grant.address
    except RemoteProtocolError as error:
        raise ConfigError(str(error)) from error
