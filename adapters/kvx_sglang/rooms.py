"""The tables of open rooms: what SGLang asks for becomes events for kvx, kvx's news become ends of rooms.

A room is SGLang's number of a request that meets on two servers; a transfer is one attempt to move its cache.
The decode side names it, `ROOM.EPOCH.ATTEMPT`: all its ranks say the same without a word between them, and no
two attempts at a room are confused. The prefill side learns the name from the grant.

Nothing here knows SGLang's classes, or waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define, field, frozen

from kvx.core.model import BlockTable, Grant, Mode, News, Offered, Outcome, Part, Reason, Released
from kvx.engine import Abort, Claim, EngineEvent, Expose, Stage
from kvx_sglang.layout import KV, Pools

MAX_REMEMBERED = 1 << 16
"""Rooms of which a side remembers that they were there. Rooms are random, so what is forgotten does no harm."""

_NAME = re.compile(r"([0-9]{1,20})\.[0-9a-f]{1,16}\.[0-9]{1,9}")

T = TypeVar("T")
Put = Callable[[Sequence[EngineEvent]], None]


def transfer_name(room: int, epoch: int, attempt: int) -> str:
    return f"{room}.{epoch:x}.{attempt}"


def room_in(transfer: str) -> int | None:
    """The room of a transfer's name; None for a name that no decode side of this adapter gives."""
    match = _NAME.fullmatch(transfer)
    return int(match[1]) if match else None


@frozen
class Ready:
    """Prefill: the decode side has published its pages; the first `prefix_pages` of the prompt it has already."""

    room: int
    prefix_pages: int


@frozen
class Forgotten:
    """Prefill: a room has failed long ago and SGLang has never cleared it."""

    room: int


@frozen
class Ended:
    """A room has ended. `detail` says why it failed; `lost`: the other side was not there any more."""

    room: int
    ok: bool
    detail: str = ""
    lost: bool = False


Change = Ready | Ended | Forgotten


def told(outcome: Outcome) -> str:
    """A failed transfer in one line, as a client sees it."""
    reason = (outcome.reason or Reason.OTHER).value
    return f"kvx: {reason}: {outcome.detail}" if outcome.detail else f"kvx: {reason}"


def _ended(room: int, outcome: Outcome) -> Ended:
    return Ended(
        room, outcome.ok, "" if outcome.ok else told(outcome), outcome.reason in (Reason.PEER_LOST, Reason.EPOCH)
    )


# ------------------------------------------------------------------------------ prefill


@define(eq=False)
class Send:
    """A request of this prefill rank, from its sender's start to its end."""

    room: int
    grant: Grant | None = None
    tokens: int = 0
    """Of the whole prompt, in whole pages; known once SGLang says how many pages it will send."""
    handed: bool = False
    """kvx has some of its blocks, and owes Released."""
    finished: bool = False
    """kvx has its last part, or its Abort."""
    ok: bool = False
    failure: Ended | None = None
    """Why it fails; told to SGLang, which frees the pages, when nobody reads them any more."""


@define(eq=False)
class PrefillRooms:
    """All rooms of one prefill rank. Each call puts at most one batch; `take` turns news into what SGLang asks for.

    Offers that no request comes for, rooms that failed before their offer, and failed ones that SGLang never clears
    are kept for `keep_s` seconds.
    """

    put: Put
    pools: Pools
    clock: Callable[[], float]
    keep_s: float
    sends: dict[int, Send] = field(factory=dict)
    _by_transfer: dict[str, Send] = field(factory=dict)
    _offers: dict[int, tuple[float, Grant]] = field(factory=dict)
    _refused: dict[int, tuple[float, str]] = field(factory=dict)
    _failed: dict[int, tuple[float, Send]] = field(factory=dict)

    def open(self, room: int) -> list[Change]:
        """A request for this room has come."""
        self._refused.pop(room, None)
        send = self.sends[room] = Send(room)
        if (offer := self._offers.pop(room, None)) is not None:
            return self._bind(send, offer[1])
        return []

    def plan(self, room: int, pages: int) -> None:
        """SGLang will send this many pages, those behind the decode side's prefix."""
        if (send := self.sends.get(room)) is not None and send.grant is not None:
            send.tokens = (send.grant.first[KV] + pages) * self.pools.page_size

    def stage(
        self,
        room: int,
        start: int,
        pages: Sequence[int],
        *,
        last: bool,
        row: int | None,
        states: Sequence[Sequence[int]],
    ) -> list[Change]:
        """Pages from number `start` of those to be sent on are computed; with the last come aux row and states."""
        send = self.sends.get(room)
        if send is None or send.grant is None or send.failure is not None or send.finished:
            return []
        rows = [row] if last and row is not None else []
        items = states if last else [()] * len(self.pools.states)
        try:
            first, blocks = self.pools.blocks(send.tokens, send.grant.first[KV] + start, pages, rows, items)
            if last and (problem := self._uneven(blocks, send.grant.blocks)):
                raise ValueError(problem)
        except ValueError as problem:
            return self._give_up(send, Reason.BOUNDS, f"kvx: {Reason.BOUNDS.value}: {problem}")
        send.handed, send.finished = True, last
        self.put([Stage(send.grant.transfer, Mode.PUSH, Part(None, first, blocks), last, send.tokens)])
        return []  # success is what kvx says when decode has it all

    def _uneven(self, mine: BlockTable, wanted: BlockTable) -> str | None:
        here, there = self.pools.counts(mine), self.pools.counts(wanted)
        return None if here == there else f"items of aux and state: prefill has {here}, decode wants {there}"

    def abort(self, room: int, detail: str) -> list[Change]:
        """SGLang does not want this request any more."""
        send = self.sends.get(room)
        if send is None or send.ok or send.failure is not None:
            return []
        return self._give_up(send, Reason.ABORTED, detail)

    def _give_up(self, send: Send, reason: Reason, detail: str) -> list[Change]:
        self._fail(send, Ended(send.room, False, detail))
        if send.grant is not None:
            send.finished = True
            self.put([Abort(send.grant.transfer, reason, detail)])
        return [] if send.handed else [Ended(send.room, False, detail)]

    def _fail(self, send: Send, failure: Ended) -> None:
        send.failure = failure
        self._failed.pop(send.room, None)
        self._failed[send.room] = (self._later(), send)

    def _later(self) -> float:
        return self.clock() + self.keep_s

    def close(self, room: int) -> None:
        """SGLang has cleared this request; whatever is open ends."""
        send = self.sends.pop(room, None)
        if send is None:
            return
        if send.grant is None:
            detail = send.failure.detail if send.failure else "the prefill request has ended"
            self._refused.pop(room, None)
            self._refused[room] = (self._later(), detail)
            return
        if self._by_transfer.pop(send.grant.transfer, None) is not None and not send.finished:
            self.put([Abort(send.grant.transfer)])

    def take(self, news: Sequence[News]) -> list[Change]:
        changes: list[Change] = []
        for item in news:
            if isinstance(item, Offered):
                changes += self._offered(item.grant)
                continue
            send = self._by_transfer.get(item.transfer)
            if send is None:
                continue
            changes += self._released(send) if isinstance(item, Released) else self._outcome(send, item)
        return changes + self._sweep()

    def _offered(self, grant: Grant) -> list[Change]:
        room = room_in(grant.transfer)
        if room is None or len(grant.first) != len(self.pools.layout.groups):
            self.put([Abort(grant.transfer, Reason.UNKNOWN_TRANSFER, "this is no transfer of SGLang's")])
            return []
        send = self.sends.get(room)
        refused = self._refused.get(room)
        if refused is not None or (send is not None and send.grant is None and send.failure is not None):
            detail = refused[1] if refused else send.failure.detail if send and send.failure else ""
            self.put([Abort(grant.transfer, Reason.ABORTED, detail)])
            return []
        if send is not None and send.grant is None:
            return self._bind(send, grant)
        self._offers.pop(room, None)
        self._offers[room] = (self._later(), grant)
        return []

    def _bind(self, send: Send, grant: Grant) -> list[Change]:
        send.grant = grant
        if not any(self.pools.counts(grant.blocks)):
            # Not even a row of metadata: the decode side says good-bye before it had pages.
            return self._give_up(send, Reason.ABORTED, "kvx: aborted: the decode side gave the request up")
        self._by_transfer[grant.transfer] = send
        self.put([Claim(grant.transfer, Mode.PUSH)])
        return [Ready(send.room, grant.first[KV])]

    def _outcome(self, send: Send, outcome: Outcome) -> list[Change]:
        if outcome.ok:  # an abort that crossed it came too late
            send.ok, send.failure = True, None
            return [_ended(send.room, outcome)]
        if send.failure is not None:
            return []
        failure = _ended(send.room, outcome)
        self._fail(send, failure)
        if not send.handed:
            return [failure]
        if not send.finished:
            send.finished = True
            self.put([Abort(outcome.transfer)])
        return []

    def _released(self, send: Send) -> list[Change]:
        return [send.failure] if send.failure is not None else []

    def _sweep(self) -> list[Change]:
        now = self.clock()
        _pop_old(self._offers, now)
        _pop_old(self._refused, now)
        forgotten: list[Change] = []
        for room, send in _pop_old(self._failed, now):
            if self.sends.get(room) is send:
                self.close(room)
                forgotten.append(Forgotten(room))
        return forgotten


def _pop_old(table: dict[int, tuple[float, T]], now: float) -> list[tuple[int, T]]:
    """Entries are in the order of their ends."""
    old = []
    while table and table[oldest := next(iter(table))][0] <= now:
        old.append((oldest, table.pop(oldest)[1]))
    return old


# ------------------------------------------------------------------------------- decode


@define(eq=False)
class Receive:
    """One attempt of this decode rank: pages that are open to a prefill side."""

    room: int
    transfer: str
    outcome: Outcome | None = None
    aborted: bool = False
    released: bool = False
    empty: bool = False
    """No page of this rank was ever open to it."""

    @property
    def over(self) -> bool:
        """Nobody can write into its pages any more."""
        return self.released and self.outcome is not None


@define(eq=False)
class DecodeRooms:
    """All rooms of one decode rank. `epoch` is the one of this start, the same on all ranks."""

    put: Put
    pools: Pools
    epoch: int
    lease_s: float
    receives: dict[str, Receive] = field(factory=dict)
    _current: dict[int, Receive] = field(factory=dict)
    _attempts: dict[int, int] = field(factory=dict)

    def expose(
        self,
        room: int,
        address: str,
        prefix_pages: int,
        pages: Sequence[int],
        row: int | None,
        states: Sequence[Sequence[int]],
    ) -> None:
        """These pages and items wait for the request's cache. Raises ValueError for items that are not there."""
        tokens = (prefix_pages + len(pages)) * self.pools.page_size
        rows = [] if row is None else [row]
        first, blocks = self.pools.blocks(tokens, prefix_pages, pages, rows, states)
        self._expose(room, address, first, blocks, tokens)

    def leave(self, room: int, address: str) -> None:
        """A request ends before it has pages: an empty grant tells the prefill side, which knows no name for it yet."""
        nothing = BlockTable(((),) * len(self.pools.layout.groups))
        self._expose(room, address, (0,) * len(nothing.groups), nothing, self.pools.page_size)
        receive = self._current.pop(room)
        receive.aborted = receive.empty = True

    def _expose(self, room: int, address: str, first: tuple[int, ...], blocks: BlockTable, tokens: int) -> None:
        attempt = self._attempts.pop(room, 0) + 1
        self._attempts[room] = attempt
        if len(self._attempts) > MAX_REMEMBERED:
            del self._attempts[next(iter(self._attempts))]
        receive = Receive(room, transfer_name(room, self.epoch, attempt))
        self.receives[receive.transfer] = self._current[room] = receive
        self.put([Expose(receive.transfer, Mode.PUSH, blocks, first, tokens, self.lease_s, address)])

    def abort(self, room: int, detail: str) -> None:
        """SGLang does not want this request any more."""
        receive = self._current.get(room)
        if receive is not None and receive.outcome is None and not receive.aborted:
            receive.aborted = True
            self.put([Abort(receive.transfer, Reason.ABORTED, detail)])

    def close(self, room: int, detail: str) -> None:
        """SGLang has cleared this request; what its pages are still open for ends."""
        self.abort(room, detail)
        self._current.pop(room, None)

    def safe(self, room: int) -> bool:
        """Whether nobody can write into pages of this room any more."""
        return not any(receive.room == room and not receive.empty for receive in self.receives.values())

    def take(self, news: Sequence[News]) -> list[Change]:
        changes: list[Change] = []
        for item in news:
            if isinstance(item, Offered) or (receive := self.receives.get(item.transfer)) is None:
                continue
            if isinstance(item, Outcome):
                receive.outcome = item
                if self._current.get(receive.room) is receive and not receive.aborted:
                    changes.append(_ended(receive.room, item))
            else:
                receive.released = True
            if receive.over:
                del self.receives[receive.transfer]
        return changes
