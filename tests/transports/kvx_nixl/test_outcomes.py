"""A side of a pair is stopped or killed in mid-transfer: what each of them reports, and when."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvx.cluster import free_ports
from kvx.core.model import Mode, Role
from kvx_conformance.suite.servers import SHORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BYTES = 256 << 20
TRIES = 8
LIMIT_S = 60.0
"""More than the longest of the bounds, on a machine that is busy."""


class Side:
    """One instance in a process of its own."""

    def __init__(self, transport: str, section: dict[str, Any], fill: int) -> None:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.heard: list[dict[str, Any]] = []
        self._rest = b""
        options = {"listen": self.address, "transports": [transport], transport: section, **SHORT}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_program.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.say(options=options, bytes=BYTES, fill=fill)

    def say(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hears(self, *events: str, limit_s: float = LIMIT_S) -> dict[str, Any] | None:
        """The first of these events, or None: it has not come in time."""
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        while True:
            for line in self.heard:
                if line["event"] in events:
                    return line
            left = end - time.monotonic()
            if left < 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.heard += [json.loads(line) for line in lines]

    def waits_for(self, *events: str) -> dict[str, Any]:
        found = self.hears(*events)
        assert found is not None, (events, self.heard)
        return found

    def signal(self, number: int) -> float:
        """When it was sent."""
        self._process.send_signal(number)
        return time.monotonic()

    def reported(self, since: float) -> list[dict[str, Any]]:
        """What its engine heard, in seconds from a moment on."""
        told = [line for line in self.heard if line["event"] in ("outcome", "released")]
        return [{**line, "at": round(line["at"] - since, 3)} for line in told]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def moving(name: str, sections: dict[str, dict[str, Any]]) -> Iterator[Callable[[Mode], dict[Role, Side]]]:
    """A pair of which a transfer moves: the first bytes stand in the consumer's memory."""
    made: list[Side] = []

    def moving(mode: Mode) -> dict[Role, Side]:
        producer, consumer = Side(name, sections[name], 1), Side(name, sections[name], 0)
        made.extend((producer, consumer))
        for side in made[-2:]:
            side.waits_for("ready")
        if mode is Mode.PUSH:
            producer.say(do="stage", mode="push", transfer="t")
            consumer.say(do="expose", mode="push", transfer="t", address=producer.address)
        else:
            producer.say(do="expose", mode="pull", transfer="t")
            consumer.say(do="stage", mode="pull", transfer="t", ticket=producer.waits_for("ticket")["text"])
        consumer.waits_for("moving", "outcome")
        return {Role.PRODUCER: producer, Role.CONSUMER: consumer}

    yield moving
    for side in made:
        side.end()


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", Role)
@pytest.mark.parametrize("mode", Mode)
def test_the_other_side_reports_in_bounded_time(
    moving: Any, keep: Any, name: str, mode: Mode, victim: Role, what: signal.Signals
) -> None:
    for _ in range(TRIES):
        sides = moving(mode)
        (arrived,) = [line["bytes"] for line in sides[Role.CONSUMER].heard if line["event"] == "moving"]
        struck, other = sides.pop(victim), next(iter(sides.values()))
        at = struck.signal(what)
        outcome = other.waits_for("outcome")
        if not outcome["ok"]:
            break
    else:
        pytest.fail("every transfer had ended before the signal came")
    other.hears("released", limit_s=10)
    before = other.reported(at)
    facts: dict[str, Any] = {"bytes_before": arrived, "the other side": before}
    if what is signal.SIGSTOP:
        continued = struck.signal(signal.SIGCONT)
        own = struck.waits_for("outcome")
        other.waits_for("released")
        struck.waits_for("released")
        assert not own["ok"]
        facts["it itself, after SIGCONT"] = struck.reported(continued)
        facts["the other side, from SIGCONT on"] = other.reported(continued)[len(before) :]
    keep("nixl-outcomes", f"{name} {mode.value}: {victim.value} {what.name}", **facts)
    # Lease, drain, grace: whatever of these applies, the engine knows within their sum.
    assert before[0]["at"] < SHORT["lease_s"] + SHORT["grace_s"] + 10
