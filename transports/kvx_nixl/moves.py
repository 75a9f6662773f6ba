"""One operation on its way through NIXL: cut into posts, of which a bounded number is in flight."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from kvx.core.model import Op
from kvx_nixl.agent import Agent, Lists, NixlError
from kvx_nixl.regions import Table

Slice = tuple[Lists, NDArray[np.int32], int]
"""What one post takes of prepared lists: by their indices, and how many bytes."""
_NOTE = struct.Struct("!QI")


def note(number: int, post: int) -> bytes:
    """What the target of a WRITE is told with it."""
    return _NOTE.pack(number, post)


def read_note(data: bytes) -> tuple[int, int] | None:
    """Number of the operation and of its post, or None: these bytes are no note."""
    return _NOTE.unpack(data) if len(data) == _NOTE.size else None


@frozen
class Size:
    """Of something in flight."""

    pieces: int = 0
    nbytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.pieces + other.pieces, self.nbytes + other.nbytes)

    def __sub__(self, other: Size) -> Size:
        return Size(self.pieces - other.pieces, self.nbytes - other.nbytes)

    @property
    def positive(self) -> bool:
        return self.pieces > 0 and self.nbytes > 0


@define(eq=False)
class Move:
    """`number` names it to the peer. The runtime's thread sets `stopped`, the worker's everything below."""

    op_id: int
    number: int
    op: Op
    agent: str
    """The peer's agent."""
    local: Table = field(repr=False)
    remote: Table = field(repr=False)
    local_vram: NDArray[np.bool_] = field(repr=False)
    remote_vram: NDArray[np.bool_] = field(repr=False)
    nbytes: int
    stopped: bool = False
    """Nothing more of it may be posted."""
    posted: int = 0
    error: str = ""
    complete: bool = False
    """Every post has been made."""
    _todo: Iterator[Slice] | None = field(default=None, repr=False)
    _next: Slice | None = field(default=None, repr=False)
    _lists: list[Lists] = field(factory=list, repr=False)
    _flying: list[tuple[Any, Size]] = field(factory=list, repr=False)

    @property
    def flying(self) -> Size:
        """What is in flight of it."""
        return sum((size for _, size in self._flying), Size())

    def begin(self, agent: Agent, post_bytes: int, post_pieces: int) -> None:
        """Cut it. Whatever NIXL refuses is found out now or at a post, as `error`."""
        self._todo = self._posts(agent, post_bytes, post_pieces)
        self._look_ahead()

    def _look_ahead(self) -> None:
        assert self._todo is not None
        try:
            self._next = next(self._todo, None)
        except NixlError as error:
            self._next, self.error = None, str(error)
        else:
            self.complete = self._next is None

    def _posts(self, agent: Agent, post_bytes: int, post_pieces: int) -> Iterator[Slice]:
        for local, local_kind, remote, remote_kind in self._by_kind():
            local, remote = split(local, post_bytes), split(remote, post_bytes)
            lists = agent.prepare(self.agent, local, local_kind, remote, remote_kind)
            self._lists.append(lists)
            for start, stop, nbytes in bounds(local[:, 1], post_bytes, post_pieces):
                yield lists, np.arange(start, stop, dtype=np.int32), nbytes

    def _by_kind(self) -> Iterator[tuple[Table, str, Table, str]]:
        """NIXL's lists hold one kind of memory each, and no empty piece."""
        real = self.local[:, 1] > 0
        for local_vram in (False, True):
            for remote_vram in (False, True):
                rows = real & (self.local_vram == local_vram) & (self.remote_vram == remote_vram)
                if rows.any():
                    kinds = ["VRAM" if vram else "DRAM" for vram in (local_vram, remote_vram)]
                    yield self.local[rows], kinds[0], self.remote[rows], kinds[1]

    def advance(self, agent: Agent, room: Size) -> bool:
        """Collect what has ended, post while there is room. Has anything happened?"""
        before = len(self._flying)
        self._collect(agent)
        happened = len(self._flying) < before
        while self._next is not None and not self.stopped and not self.error and room.positive:
            room = room - self._post(agent, *self._next)
            happened = True
        return happened

    def _collect(self, agent: Agent) -> None:
        still = []
        for post, size in self._flying:
            try:
                done = agent.check(post)
            except NixlError as error:
                self.error = self.error or str(error)
                done = True
            if done:
                _drop(agent, post)
            else:
                still.append((post, size))
        self._flying = still

    def _post(self, agent: Agent, lists: Lists, indices: NDArray[np.int32], nbytes: int) -> Size:
        self._look_ahead()
        try:
            notification = note(self.number, self.posted) if self.op is Op.WRITE else b""
            post = agent.make("WRITE" if self.op is Op.WRITE else "READ", lists, indices, notification)
        except NixlError as error:
            self.error, self.complete = str(error), False
            return Size()
        self.posted += 1
        try:
            done = agent.start(post)
        except NixlError as error:
            # It may have begun all the same: it is asked for its end like any other.
            self.error, done = str(error), False
        if done:
            _drop(agent, post)
            return Size()
        self._flying.append((post, Size(len(indices), nbytes)))
        return self._flying[-1][1]

    @property
    def ended(self) -> bool:
        """NIXL has nothing of it in flight any more, and nothing will be posted."""
        return not self._flying and (self._next is None or self.stopped or bool(self.error))

    def end(self, agent: Agent) -> None:
        """Give everything back; what is still in flight is not stopped by that."""
        for post, _ in self._flying:
            _drop(agent, post)
        self._flying.clear()
        for lists in self._lists:
            try:
                agent.release(lists)
            except NixlError as error:
                self.error = self.error or str(error)
        self._lists.clear()
        self._todo = None


def _drop(agent: Agent, post: Any) -> None:
    try:
        agent.drop(post)
    except NixlError:
        return  # it has ended, which is all that counts here; its destructor tries again


def split(table: Table, limit: int) -> Table:
    """The same bytes in pieces of at most `limit` bytes."""
    counts = (table[:, 1].astype(np.int64) + limit - 1) // limit
    if (counts <= 1).all():
        return np.ascontiguousarray(table)
    cut = np.repeat(table, counts, axis=0)
    nth = np.arange(len(cut)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (nth * limit).astype(np.uint64)
    cut[:, 0] += skipped
    cut[:, 1] = np.minimum(cut[:, 1] - skipped, np.uint64(limit))
    return cut


def bounds(lengths: NDArray[np.uint64], post_bytes: int, post_pieces: int) -> Iterator[tuple[int, int, int]]:
    """Start, stop and bytes of each post: as many pieces as fit, at least one."""
    ends = np.cumsum(lengths.astype(np.int64))
    start = 0
    while start < len(ends):
        taken = int(ends[start - 1]) if start else 0
        fits = int(np.searchsorted(ends, taken + post_bytes, side="right"))
        stop = max(start + 1, min(start + post_pieces, fits))
        yield start, stop, int(ends[stop - 1]) - taken
        start = stop
