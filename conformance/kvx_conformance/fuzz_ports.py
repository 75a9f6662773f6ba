"""What the fuzzer feeds through real sockets of this machine: control ports, data ports, a live instance."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from random import Random

import numpy as np
from attrs import define, field

from kvx import plugins
from kvx.cluster import free_ports
from kvx.control import ControlChannel
from kvx.core import wire
from kvx.core.events import OpDone, OpFailed, PeerLost, PeerUp, Received
from kvx.core.messages import Envelope, Renew
from kvx.core.model import (
    Descriptors,
    InstanceInfo,
    Layout,
    Op,
    Peer,
    Region,
    Stamp,
)
from kvx.transport import Completion, Transport
from kvx_conformance.fuzz_inputs import Mutator, good_frames

WAIT_S = 30.0
"""How long anything honest may take before it counts as hung."""
_HEADER = struct.Struct(">I")


def until(ready: Callable[[], bool], step: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + WAIT_S
    while not ready():
        if time.monotonic() > limit:
            raise AssertionError(f"{what}: not within {WAIT_S:g} s")
        step()


@define(eq=False)
class Dialler:
    """A raw connection that is opened again whenever the other side has hung up."""

    place: tuple[str, int]
    sock: socket.socket | None = None

    def send(self, data: bytes) -> None:
        """Send, or find out that nobody listens any more on this connection."""
        if self.sock is None:
            self.sock = socket.create_connection(self.place, timeout=WAIT_S)
            self.sock.setblocking(False)
        try:
            while True:
                if not self.sock.recv(1 << 16):
                    raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        try:
            if self.sock.send(data, socket.MSG_NOSIGNAL) < len(data):
                self.close()
        except OSError:
            self.close()

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class ControlPort:
    """The control channel: changed frames and noise on its port, from several peers at once."""

    def __init__(self, random: Random) -> None:
        self._random, self._mutator = random, Mutator(random)
        self._now = 1000.0
        self._channel = ControlChannel("127.0.0.1:0", handshake_s=10, clock=lambda: self._now, loopback_only=True)
        self._friend = ControlChannel("127.0.0.1:0", handshake_s=10, clock=lambda: self._now, loopback_only=True)
        host, _, port = self._channel.address.rpartition(":")
        self._peers = [Dialler((host, int(port))) for _ in range(4)]
        self._good = good_frames(random)

    def feed(self) -> bool:
        random = self._random
        data = random.choice(self._good)
        if random.random() < 0.7:
            data = self._mutator.changed(data, random.choice(self._good))
        match random.randrange(8):
            case 0:
                stream = self._mutator.noise()
            case 1:
                stream = _HEADER.pack(random.choice((0, 1, len(data) + 9, 1 << 18, 1 << 25, 2**32 - 1))) + data
            case _:
                stream = _HEADER.pack(len(data)) + data
        peer = random.choice(self._peers)
        peer.send(stream)
        if random.random() < 0.1:
            peer.close()
        before = self._channel.stats["frames_in"]
        for event in self._channel.poll():
            if isinstance(event, PeerUp) and random.random() < 0.5:
                self._channel.proven(event.link)
        if random.random() < 0.001:
            self._now += 11.0
        return self._channel.stats["frames_in"] > before

    def check(self) -> None:
        """Another peer gets an envelope through."""
        self._friend.connect(self._channel.address)
        heard: list[object] = []
        links: list[int] = []

        def step() -> None:
            links.extend(event.link for event in self._friend.poll() if isinstance(event, PeerUp))
            heard.extend(self._channel.poll())

        until(lambda: bool(links), step, "an honest peer dials")
        self._friend.send(links[0], Envelope(wire.VERSION, 1, 2, Renew(("honest",))))
        until(
            lambda: any(isinstance(e, Received) and e.envelope.message == Renew(("honest",)) for e in heard),
            step,
            "an honest peer is heard",
        )
        self._friend.disconnect(links[0], "checked")
        for event in heard:
            if not isinstance(event, PeerUp | PeerLost | Received):
                raise AssertionError(f"{event} is no event of a control channel")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._channel.close()
        self._friend.close()


@define(eq=False)
class _Relay:
    """Stands before a data port; changes bytes of what passes, once for each call of `arm`."""

    mutator: Mutator
    random: Random
    target: tuple[str, int]
    listener: socket.socket = field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    flows: list[tuple[socket.socket, socket.socket]] = field(factory=list)
    armed: int | None = None
    passed: list[bytes] = field(factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def pump(self) -> None:
        """Carry what has come; bounded, never blocks for long."""
        sources = [self.listener, *(source for source, _ in self.flows)]
        for ready in select.select(sources, [], [], 0)[0]:
            if ready is self.listener:
                near = self.listener.accept()[0]
                far = socket.create_connection(self.target, timeout=WAIT_S)
                self.flows += [(near, far), (far, near)]
                continue
            sink = next((sink for source, sink in self.flows if source is ready), None)
            if sink is not None:
                self._carry(ready, sink)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data = source.recv(1 << 16)
            if data:
                if len(self.passed) < 400 and len(data) < 5000:
                    self.passed.append(data)
                if self.armed is not None:
                    self.armed -= len(data)
                    if self.armed < 0:
                        self.armed, data = None, self.mutator.changed(data, self.random.choice(self.passed))
                sink.sendall(data)
                return
        self.cut(source)

    def cut(self, sock: socket.socket | None = None) -> None:
        """Break one connection (default: all)."""
        for source, sink in list(self.flows):
            if sock in (None, source, sink):
                self.flows.remove((source, sink))
                source.close()
                sink.close()

    def close(self) -> None:
        self.cut()
        self.listener.close()


class DataPort:
    """A transport's data port: noise, changed pieces of real traffic, and real traffic that is changed on its way.

    The transport needs the options `port` and `advertise_port`; its bytes are opaque to this suite.
    """

    SIZE = 1 << 16

    def __init__(self, random: Random, name: str) -> None:
        self._random, self._mutator = random, Mutator(random)
        (port,) = free_ports(1)
        self._relay = _Relay(self._mutator, random, ("127.0.0.1", port))
        loaded = plugins.load()
        self._memory = {who: np.zeros(3 * self.SIZE, dtype=np.uint8) for who in "ab"}
        self._a: Transport = loaded.make_transport(name, {"peer": "a#0"})
        self._b: Transport = loaded.make_transport(
            name, {"peer": "b#0", "port": port, "advertise_port": self._relay.port}
        )
        self._info = {who: InstanceInfo(who, 0, 1, "127.0.0.1:1", Layout("m", "d", "v", (), 0)) for who in "ab"}
        for who, transport in (("a", self._a), ("b", self._b)):
            transport.register([Region(0, self._memory[who].ctypes.data, 3 * self.SIZE)])
        self._a.connect(self._info["b"], self._b.metadata())
        self._b.connect(self._info["a"], self._a.metadata())
        self._stranger = Dialler(self._relay.target)
        self._ops = 0
        self._told: list[Completion] = []
        self._move()

    def _step(self) -> None:
        self._relay.pump()
        self._told += [*self._a.poll(), *self._b.poll()]

    def feed(self) -> bool:
        random = self._random
        if random.random() < 0.02:
            return self._changed_on_the_way()
        data = self._mutator.noise(200)
        if random.random() < 0.8:
            data = self._mutator.changed(random.choice(self._relay.passed), random.choice(self._relay.passed))
        self._stranger.send(data)
        self._b.poll()
        return self._stranger.sock is not None

    def _changed_on_the_way(self) -> bool:
        """An operation whose bytes are changed ends either way, and touches nothing beside its ranges."""
        self._relay.armed = self._random.choice((0, 30, 100, 300, 2000, 9000))
        if self._random.random() < 0.3:
            self._relay.cut()
        return self._move(patient=False)

    def _move(self, *, patient: bool = True) -> bool:
        self._ops += 1
        number, op = self._ops, self._random.choice(list(Op))
        self._memory["b"][:] = 0xA5
        middle = Descriptors.of([(0, self.SIZE, self.SIZE)])
        stamp = Stamp(f"t{number}", 1, 0)
        self._b.permit(stamp.transfer, Peer("a", 0), op, middle, stamp)
        self._a.post(number, Peer("b", 0), op, middle, middle, stamp)
        self._told.clear()
        limit = time.monotonic() + (WAIT_S if patient else 0.03)
        while not self._ended(number) and time.monotonic() < limit:
            self._step()
        if not self._ended(number):  # the change has left both ends waiting; now the connection breaks
            self._relay.armed = None
            self._relay.cut()
            self._a.cancel(number)
            until(lambda: self._ended(number), self._step, "an operation on a cut connection ends")
        self._relay.armed = None
        self._b.forbid(stamp.transfer)
        self._step()
        edges = self._memory["b"][: self.SIZE], self._memory["b"][2 * self.SIZE :]
        if any((edge != 0xA5).any() for edge in edges):
            raise AssertionError("bytes beside the permitted range were written")
        return any(isinstance(one, OpDone) and one.op_id == number for one in self._told)

    def _ended(self, number: int) -> bool:
        return any(isinstance(one, OpDone | OpFailed) and one.op_id == number for one in self._told)

    def traffic(self) -> list[bytes]:
        """Pieces of what has passed between two honest ranks."""
        for _ in range(20):
            self._move()
        return list(self._relay.passed)

    def check(self) -> None:
        """A good operation in each direction works, at the latest on a new connection."""
        if not self._move() and not self._move():
            raise AssertionError("a good operation fails")

    def close(self) -> None:
        self._stranger.close()
        self._a.close()
        self._b.close()
        self._relay.close()
