"""One rank as a process of its own, told by JSON lines what to do; its memory is shared with who started it.

The first line is a Setup, each further one an Order; each is answered by one Answer. Its transport is polled
all the time. It ends when its stdin ends, and with the process that started it, even if it stands still then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
import traceback
from typing import Any

import msgspec
import numpy as np
from attrs import frozen

from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Stamp
from kvx_conformance.suite import stacks
from kvx_conformance.suite.ground import Ground
from kvx_conformance.suite.subject import Subject

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


@frozen
class Setup:
    """What to be: a rank named `peer` with regions of these sizes in the memory behind descriptor `memory`."""

    subject: Subject
    peer: Peer
    sizes: tuple[int, ...]
    memory: int


@frozen
class Order:
    """Call `connect`, `permit` or `post` with what it needs of the rest, or `look` at what was told."""

    do: str
    op_id: int = 0
    peer: Peer | None = None
    info: InstanceInfo | None = None
    metadata: bytes = b""
    op: Op = Op.WRITE
    local: tuple[tuple[int, int, int], ...] = ()
    remote: tuple[tuple[int, int, int], ...] = ()
    stamp: Stamp | None = None


@frozen
class Answer:
    """What the transport has told so far. `raised` names a call and what it raised; then the process ends."""

    metadata: bytes = b""
    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    raised: str = ""


class CallError(Exception):
    """The transport raised something; the text names the call."""


class Program:
    """A transport and what it has told."""

    def __init__(self, setup: Setup) -> None:
        memory = mmap.mmap(setup.memory, Ground.room(setup.sizes))
        self._ground = Ground(setup.sizes, buffer=np.frombuffer(memory, dtype=np.uint8))
        self._transport = setup.subject.make_transport(str(setup.peer))
        self._told: list[Any] = []
        self.call("register", self._ground.regions())
        self._metadata: bytes = self.call("metadata")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the transport. Raises CallError."""
        try:
            return getattr(self._transport, name)(*arguments)
        except Exception as error:
            traceback.print_exc()
            raise CallError(f"`{name}` raised {type(error).__name__}: {error}") from error

    def obey(self, order: Order) -> None:
        """Raises CallError, and ValueError for what is no order."""
        local, remote, stamp = Descriptors.of(order.local), Descriptors.of(order.remote), order.stamp
        match order.do:
            case "look":
                pass
            case "connect":
                self.call("connect", order.info, order.metadata)
            case "permit" if stamp is not None:
                self.call("permit", stamp.transfer, order.peer, order.op, remote, stamp)
            case "post":
                self.call("post", order.op_id, order.peer, order.op, local, remote, stamp)
            case unknown:
                raise ValueError(f"no order: {unknown!r}")

    def serve(self, lines: int) -> bool:
        """Poll until `lines` can be read; False where nothing came of waiting."""
        number, pause_s = self.call("fileno"), self._transport.idle_poll_s
        poller = select.poll()
        for descriptor in {lines, number} - {None}:
            poller.register(descriptor, select.POLLIN)
        ready = dict(poller.poll(None if pause_s is None else 1000 * pause_s))
        if pause_s is not None or number in ready:
            self._told += self.call("poll")
        return lines in ready

    def answer(self) -> Answer:
        told = self._told
        return Answer(
            metadata=self._metadata,
            done=tuple(one.op_id for one in told if isinstance(one, OpDone)),
            failed=tuple(one.op_id for one in told if isinstance(one, OpFailed)),
        )

    def close(self) -> None:
        self.call("close")


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a subject prints is no answer
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        return  # it had died before
    stacks.answer_signals()
    came, program = b"", None
    try:
        while True:
            if program is None or program.serve(0):
                data = os.read(0, _READ_BYTES)
                if not data:
                    break
                *lines, came = (came + data).split(b"\n")
                for line in lines:
                    if program is None:
                        program = Program(msgspec.json.decode(line, type=Setup))
                    else:
                        program.obey(msgspec.json.decode(line, type=Order))
                    _say(answers, program.answer())
        if program is not None:
            program.close()
    except CallError as error:
        _say(answers, Answer(raised=str(error)))
        sys.exit(1)


def _say(answers: int, answer: Answer) -> None:
    line = msgspec.json.encode(answer) + b"\n"
    while line:
        line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
