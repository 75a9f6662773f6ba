"""One rank of an instance as a process of its own, told by JSON lines what to do.

The first line is a Setup, each further one an Order; each is answered by one line. It ends when
its stdin ends, and with the process that started it, even if it stands still then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import msgspec
import numpy as np
from attrs import field, frozen

from kvx import instance
from kvx.config import Options
from kvx.core import wire
from kvx.core.model import Mode, Region
from kvx.engine import EngineInstance
from kvx_conformance.actor import Actor, Call, Shape, holds, seed_of
from kvx_conformance.suite.subject import OPEN_INSTANCE, Subject

_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


@frozen
class Setup:
    """What to be. `options` are kvx's; `instance` names the function that opens it."""

    who: str
    shape: Shape
    rank: int
    epoch: int
    options: dict[str, Any]
    instance: str = OPEN_INSTANCE


@frozen
class Order:
    """What to do: call, wait, row or end."""

    do: str
    call: Call | None = None
    address: str | None = None
    ticket: str | None = None
    lease_s: float = 0.0
    transfer: str = ""
    condition: str = ""
    limit_s: float = 0.0


@frozen
class Answer:
    """What came of it."""

    met: bool = True
    ticket: str | None = None
    row: dict[str, Any] = field(factory=dict)
    flaws: tuple[str, ...] = ()
    full: bool = True
    snapshot: dict[str, Any] = field(factory=dict)


class Program:
    """A toy engine on a real instance of kvx."""

    def __init__(self, setup: Setup) -> None:
        self._options = Options.load(setup.options, env={})
        self._epoch = setup.epoch
        self._actor = Actor(setup.shape, setup.rank, seed_of(setup.who))
        memory = np.frombuffer(self._actor.cache.memory, dtype=np.uint8)
        region = Region(0, memory.ctypes.data, memory.nbytes)
        opener = Subject("", instance=setup.instance).opener()
        self._kvx: EngineInstance = opener(self._options, self._actor.layout, [region], epoch=setup.epoch)

    def obey(self, order: Order) -> Answer:
        self._listen()
        match order.do:
            case "call":
                assert order.call is not None
                return self._call(order, order.call)
            case "wait":
                until = time.monotonic() + order.limit_s
                while not self._met(order) and time.monotonic() < until:
                    time.sleep(_POLL_S)
                return Answer(met=self._met(order), snapshot=self._kvx.snapshot())
            case "row":
                return Answer(row=self._actor.row(order.transfer))
            case "end":
                return Answer(flaws=tuple(self._actor.flaws()), full=self._actor.full)
            case unknown:
                raise ValueError(f"no order: {unknown!r}")

    def close(self) -> None:
        self._kvx.close()

    def _listen(self) -> None:
        for news in self._kvx.news():
            self._actor.hear(news)

    def _met(self, order: Order) -> bool:
        self._listen()
        return holds(self._actor, self._kvx.snapshot(), order.condition, order.transfer)

    def _call(self, order: Order, call: Call) -> Answer:
        ticket = None if order.ticket is None else wire.parse_ticket(order.ticket)
        self._kvx.put([self._actor.call(call, address=order.address, ticket=ticket, lease_s=order.lease_s)])
        if (call.do, call.mode) != ("expose", Mode.PULL):
            return Answer()
        first, blocks = self._actor.table(call.transfer)
        text = instance.make_ticket(
            self._options,
            epoch=self._epoch,
            transfer=call.transfer,
            first=(first,),
            blocks=blocks,
            tokens=call.tokens,
            lease_s=order.lease_s,
        )
        return Answer(ticket=text)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        return  # it had died before
    program = Program(msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup))
    try:
        _say(Answer())
        while line := sys.stdin.buffer.readline():
            _say(program.obey(msgspec.json.decode(line, type=Order)))
    finally:
        program.close()


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
