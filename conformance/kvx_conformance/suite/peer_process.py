"""A rank in a process of its own, as a case sees it: its memory is looked at from here, also when it stands still."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
import numpy as np
from attrs import define, field

from kvx.cluster import wait_stopped
from kvx.core.model import Descriptors, InstanceInfo, Op, Peer, Stamp
from kvx_conformance.suite.case import Finding
from kvx_conformance.suite.ground import Ground
from kvx_conformance.suite.peer_program import Answer, Order, Setup
from kvx_conformance.suite.ranks import EPOCH, LIMIT_S, Party, Rig, describe

START_S = 30.0
"""How long a process may take to import and register, on a machine that is busy."""
_END_S = 3.0
_READ_BYTES = 1 << 16


@define(eq=False)
class PeerProcess:
    """A rank of another process. Each order is answered while the rig's own ranks are served."""

    rig: Rig
    peer: Peer
    epoch: int
    ground: Ground
    process: subprocess.Popen[bytes]
    told: Answer = field(factory=Answer)
    _came: bytearray = field(factory=bytearray)
    _posted: int = 0

    @property
    def info(self) -> InstanceInfo:
        return describe(self.peer, self.epoch)

    def metadata(self) -> bytes:
        return self.told.metadata

    def learn(self, other: Party) -> None:
        self.ask(Order("connect", info=other.info, metadata=other.metadata()))

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        self.ask(Order("permit", peer=peer, op=op, remote=tuple(ranges.pieces()), stamp=stamp))

    def post(self, to: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> int:
        """Start an operation there; returns its id."""
        self._posted += 1
        pieces = tuple(local.pieces()), tuple(remote.pieces())
        self.ask(Order("post", op_id=self._posted, peer=to, op=op, local=pieces[0], remote=pieces[1], stamp=stamp))
        return self._posted

    def look(self) -> Answer:
        """What its transport has told so far."""
        return self.ask(Order("look"))

    def until(self, happens: Callable[[Answer], bool], what: str) -> None:
        """Ask again and again, and serve this process's ranks, until it happens. Raises Finding if it does not."""
        self.rig.until(lambda: happens(self.look()), what)

    def ask(self, order: Order) -> Answer:
        self.send(order)
        return self.answer(order.do)

    def send(self, what: Setup | Order) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells
            self.process.stdin.write(msgspec.json.encode(what) + b"\n")
            self.process.stdin.flush()

    def answer(self, what: str, limit_s: float = LIMIT_S) -> Answer:
        """The next answer. What the transport raised there, and silence, are Findings."""
        self.rig.until(self._heard, f"{self.peer}, a process of its own, answers `{what}`", limit_s=limit_s)
        line, _, rest = bytes(self._came).partition(b"\n")
        self._came = bytearray(rest)
        if not line:
            raise Finding(f"{self.peer}: its process died at `{what}`, with status {self.process.wait(_END_S)}")
        told = msgspec.json.decode(line, type=Answer)
        if told.raised:
            raise Finding(f"{self.peer}, a process of its own: {told.raised}")
        self.told = told
        return told

    def _heard(self) -> bool:
        assert self.process.stdout is not None
        number = self.process.stdout.fileno()
        while b"\n" not in self._came and select.select([number], [], [], 0)[0]:
            data = os.read(number, _READ_BYTES)
            self._came += data or b"\n"
        return b"\n" in self._came

    def stop(self) -> None:
        """SIGSTOP; it stands still when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        wait_stopped(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._unwatch()
        self.process.kill()
        self.process.wait(_END_S)

    def _unwatch(self) -> None:
        if self.process.stdout is not None:
            self.rig.watched.discard(self.process.stdout.fileno())

    def end(self) -> None:
        """End it: its stdin ends, and what does not follow is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._unwatch()
        if self.process.poll() is None:
            self.go_on()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
        self.process.stdout.close()


def start(rig: Rig, name: str, size: int, epoch: int = EPOCH) -> PeerProcess:
    """A process with one region of `size` bytes, filled and registered; it knows nobody. Ends with the case."""
    return rig.context.enter(_running(rig, name, size, epoch))


@contextmanager
def _running(rig: Rig, name: str, size: int, epoch: int) -> Generator[PeerProcess]:
    room = Ground.room([size])
    shared = os.memfd_create("kvx-conformance")
    os.ftruncate(shared, room)
    try:
        ground = Ground([size], buffer=np.frombuffer(mmap.mmap(shared, room), dtype=np.uint8))
        ground.fill(rig.context.rng.randrange(1 << 20))
        log = rig.context.folder / f"{name}-{epoch}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                (sys.executable, "-m", "kvx_conformance.suite.peer_program"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                pass_fds=(shared,),
                process_group=0,
            )
        peer = PeerProcess(rig, Peer(name, 0), epoch, ground, process)
        try:
            assert process.stdout is not None
            rig.watched.add(process.stdout.fileno())
            peer.send(Setup(rig.context.subject, peer.peer, (size,), shared))
            peer.answer("register", START_S)
            rig.grounds[f"{name}, a process of its own"] = ground
            yield peer
        finally:
            peer.end()
    finally:
        os.close(shared)
