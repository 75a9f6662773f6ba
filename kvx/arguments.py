"""What the commands of `kvx` have in common: how they are added, which values they take, how they print."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvx import report

Command = Callable[[argparse.Namespace], int]
"""Returns the exit status."""


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def pair(text: str) -> tuple[str, object]:
    """`KEY=VALUE`; what is no TOML value is a text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def port(text: str) -> int:
    """Of TCP."""
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return number


def seconds(text: str) -> float:
    """Above 0, at most an hour."""
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600 seconds")
    return number


def add_command(commands: Any, name: str, run: Command, text: str, *, json: bool = True) -> argparse.ArgumentParser:
    """`kvx NAME`, which calls `run` and, with `json`, can print one JSON object."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    if json:
        report.add_json_argument(parser)
    parser.set_defaults(run=run)
    return parser


def emit(arguments: argparse.Namespace, command: str, fields: Mapping[str, Any], lines: Sequence[str]) -> None:
    """The object where `--json` asks for it, and lines for a person unless it goes to stdout."""
    if arguments.json is not None:
        report.write(arguments.json, report.document(command, fields))
    if arguments.json != "-":
        sys.stdout.write("".join(f"{line}\n" for line in lines))
