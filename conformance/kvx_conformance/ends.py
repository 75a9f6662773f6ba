"""Several control channels of one process, for tests: real sockets, and a clock that a test moves."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from kvx.control import ControlChannel, ControlEvent
from kvx.core.events import PeerLost, PeerUp, Received
from kvx.core.messages import Message

T = TypeVar("T", PeerUp, PeerLost, Received)


class Clock:
    """Time that stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ends:
    """Channels of this process that are polled together until something has happened."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.channels: list[ControlChannel] = []
        self.seen: dict[ControlChannel, list[ControlEvent]] = {}
        self.raw: list[socket.socket] = []

    def open(self, listen: str = "127.0.0.1:0", *, loopback_only: bool = False) -> ControlChannel:
        channel = ControlChannel(listen, handshake_s=10, clock=self.clock, loopback_only=loopback_only)
        self.channels.append(channel)
        self.seen[channel] = []
        return channel

    def dial(self, channel: ControlChannel) -> socket.socket:
        """A plain socket, connected to a channel."""
        host, port = channel.address.rsplit(":", 1)
        self.raw.append(socket.create_connection((host.strip("[]"), int(port)), timeout=20))
        return self.raw[-1]

    def until(self, ready: Callable[[], object]) -> None:
        """Poll as the runtime does, waking only when a channel's descriptor says so."""
        limit = time.monotonic() + 20
        with select.epoll() as waiter:
            for channel in self.channels:
                waiter.register(channel.fileno(), select.EPOLLIN)
            while not ready():
                assert time.monotonic() < limit, self.seen
                awake = waiter.poll(0.05)
                if awake or any(
                    (channel.deadline() or self.clock.now + 1) <= self.clock.now for channel in self.channels
                ):
                    self.poll()

    def poll(self) -> None:
        for channel in self.channels:
            self.seen[channel] += channel.poll()

    def of(self, channel: ControlChannel, kind: type[T]) -> list[T]:
        return [event for event in self.seen[channel] if isinstance(event, kind)]

    def lost(self, channel: ControlChannel) -> PeerLost:
        self.until(lambda: self.of(channel, PeerLost))
        return self.of(channel, PeerLost)[0]

    def link(self, near: ControlChannel, far: ControlChannel) -> tuple[int, int]:
        """Both numbers of a new, proven link."""
        known = len(self.of(near, PeerUp)), len(self.of(far, PeerUp))
        near.connect(far.address)
        self.until(lambda: len(self.of(near, PeerUp)) > known[0] and len(self.of(far, PeerUp)) > known[1])
        numbers = self.of(near, PeerUp)[-1].link, self.of(far, PeerUp)[-1].link
        near.proven(numbers[0])
        far.proven(numbers[1])
        return numbers

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for sock in self.raw:
            sock.close()

    def messages(self, channel: ControlChannel) -> list[Message]:
        return [event.envelope.message for event in self.of(channel, Received)]
