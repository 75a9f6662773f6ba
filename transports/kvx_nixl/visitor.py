"""The side whose memory is used: peers that have dialled, and what of their WRITEs has landed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from attrs import define, field

from kvx.core.errors import RemoteProtocolError
from kvx_nixl.bell import Connection
from kvx_nixl.moves import read_note
from kvx_nixl.words import MAX_LANDED, Hello, Introduce, Landed, Ready, Ring, Word

_MAX_REMEMBERED = 65536
"""Landed posts that are kept for a peer that has not said that it knows; the oldest go first."""


class Host(Protocol):
    """What the transport does for its visitors."""

    def drop(self, connection: Connection) -> None: ...

    def watch(self, connection: Connection) -> None: ...

    def introduction(self) -> Introduce: ...

    def learn(self, visitor: Visitor, name: str, metadata: bytes) -> None:
        """Add a peer's agent; `visitor.learnt` is called."""

    def attend(self, seconds: float | None = None) -> None:
        """Keep the workers awake; 0: they may rest."""


@define(eq=False)
class Visitor:
    """One start of a peer's transport. Every method belongs to the runtime's thread."""

    hello: Hello
    host: Host
    connection: Connection | None = None
    agent: str = ""
    left_at: float = 0.0
    awake: bool = False
    _landed: dict[int, list[int]] = field(factory=dict)
    _remembered: int = 0

    def enter(self, connection: Connection) -> None:
        """The newest connection counts."""
        old, self.connection = self.connection, connection
        if old is not None:
            self.host.drop(old)
        connection.role = self
        connection.deadline = None

    def heard(self, connection: Connection, word: Word) -> None:
        if isinstance(word, Introduce):
            word.check(self.hello.peer, self.hello.incarnation)
            self.agent = word.agent
            connection.send(self.host.introduction())
            self.host.attend()
            self.host.learn(self, word.agent, word.metadata)
        elif isinstance(word, Ring):
            self._forget(word.floor)
            self.awake = word.awake
            self.host.attend(None if word.awake else 0.0)
        else:
            raise RemoteProtocolError(f"{type(word).__name__} out of place")

    def learnt(self, error: str) -> None:
        """The worker has added the peer's agent, or cannot."""
        if self.connection is None:
            return
        self.connection.send(Ready(error[:1000]))
        for number, posts in self._landed.items():
            self._tell(number, posts)
        self.host.watch(self.connection)

    def arrived(self, notes: Iterable[bytes]) -> None:
        """Notifications of this peer's agent. What is no note was sent by something else than kvx, and is dropped."""
        fresh: dict[int, list[int]] = {}
        for data in notes:
            note = read_note(data)
            if note is not None:
                fresh.setdefault(note[0], []).append(note[1])
        for number, posts in fresh.items():
            self._landed.setdefault(number, []).extend(posts)
            self._remembered += len(posts)
            self._tell(number, posts)
        while self._remembered > _MAX_REMEMBERED:
            self._remembered -= len(self._landed.pop(min(self._landed)))
        if self.connection is not None:
            self.host.watch(self.connection)

    def _tell(self, number: int, posts: list[int]) -> None:
        if self.connection is not None:
            for start in range(0, len(posts), MAX_LANDED):
                self.connection.send(Landed(number, posts[start : start + MAX_LANDED]))

    def _forget(self, floor: int) -> None:
        """The peer does not ask for these again; floor 0 means for none."""
        known = [number for number in self._landed if not floor or number < floor]
        for number in known:
            self._remembered -= len(self._landed.pop(number))

    def lost(self, connection: Connection, cause: Exception) -> None:
        if connection is self.connection:
            self.connection, self.left_at, self.awake = None, time.monotonic(), False
