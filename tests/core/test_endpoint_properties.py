"""Any event in any state gives actions or LocalProtocolError, and the engine is told everything once."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvx.core.errors import LocalProtocolError
from kvx.core.events import Abort, Claim, Digested, Drain, Event, Expose, Fenced, Forbidden, OpDone, OpFailed, Stage
from kvx.core.layout import plan_leg
from kvx.core.messages import Ack, Done, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import Access, BlockTable, FenceScope, Grant, Mode, Outcome, Part, Peer, Reason, Released
from kvx_conformance.pair import LAYERS, Net, Node, layout, ticket

TRANSFERS = st.sampled_from(["t0", "t1", "t2"])
MODES = st.sampled_from(Mode)
REASONS = st.sampled_from([Reason.ABORTED, Reason.PREEMPTED, Reason.OTHER])
PEERS = st.sampled_from(["p:0", "d:0"])
BLOCK_LISTS = st.lists(st.integers(0, 17), max_size=3)
FIRST = st.integers(0, 3)
TOKENS = st.integers(0, 20)
PARTS_OF = st.sampled_from([None, LAYERS[:1], LAYERS[1:], ("no such layer",)])
PLANS = st.sampled_from([plan_leg(layout(), layout()).digest, "another plan"])
LEGS = st.sampled_from([(0,), (0,), (0, 1), ()])


class OneEndpoint(RuleBasedStateMachine):
    """Rank `x` is under test; `p` and `d` only shake hands, whatever else they say is made up here.

    Its engine keeps to the order of calls: nothing after an Abort, no block after the last ones, and
    after an Outcome only the parts that were still to come.
    """

    orderly = True

    @initialize(
        access=st.sampled_from(Access),
        fence=st.sampled_from([FenceScope.NONE, FenceScope.PEER]),
        cancel=st.booleans(),
        integrity=st.booleans(),
        most=st.sampled_from([1, 1 << 20]),
    )
    def start(self, access: Access, fence: FenceScope, cancel: bool, integrity: bool, most: int) -> None:
        self.net = Net(access=access, fence=fence, cancel=cancel, integrity=integrity, most=most)
        self.net.stop = lambda _, message: not isinstance(message, Hello)
        self.x = self.net.node("x")
        self.net.node("p")
        self.net.node("d")
        self.names = itertools.count()
        self.called: set[str] = set()
        self.handed: set[str] = set()
        self.closed: set[str] = set()
        self.ended: dict[str, float] = {}

    def give(self, event: Event) -> None:
        """A refused event changes nothing."""
        if self.orderly and isinstance(event, Expose | Claim | Stage) and self._disorderly(event.transfer):
            return
        self.x.expire()
        before = self.x.endpoint.snapshot()
        known = len(self.x.actions)
        try:
            self.x.put(event)
        except LocalProtocolError:
            assert self.x.endpoint.snapshot() == before
            assert len(self.x.actions) == known
            assert self.x.endpoint.expire(self.net.now) == []
        else:
            self.net.flow()
            self._note(event)

    def _disorderly(self, transfer: str) -> bool:
        """Whether an engine may say no more of it: it has ended here, or so long ago that nobody remembers."""
        ended = self.ended.get(transfer)
        forgotten = ended is not None and (transfer not in self.handed or self.net.now > ended + 500)
        return transfer in self.closed or forgotten

    def _note(self, event: Event) -> None:
        if isinstance(event, Expose | Claim | Stage):
            self.called.add(event.transfer)
        if isinstance(event, Expose | Stage):
            self.handed.add(event.transfer)
        if isinstance(event, Abort | Expose) or (isinstance(event, Stage) and event.last):
            self.closed.add(event.transfer)

    def peer(self, address: str) -> Node:
        return self.net.nodes[address]

    # ------------------------------------------------------------------- engine

    @rule(
        t=TRANSFERS,
        mode=MODES,
        blocks=BLOCK_LISTS,
        first=FIRST,
        tokens=TOKENS,
        at=st.sampled_from(["p:0", "d:0", "q:9", None]),
    )
    def expose(self, t: str, mode: Mode, blocks: list[int], first: int, tokens: int, at: str | None) -> None:
        self.give(Expose(t, mode, BlockTable.of(blocks), (first,), tokens, 30.0, at))

    @rule(t=TRANSFERS, mode=MODES, at=st.sampled_from(["p:0", "d:0", None]), paper=st.booleans())
    def claim(self, t: str, mode: Mode, at: str | None, paper: bool) -> None:
        given_ticket = ticket(self.peer("p:0"), 1, 2, transfer=t) if paper else None
        self.give(Claim(t, mode, given_ticket, None if paper else at))

    @rule(
        t=TRANSFERS,
        mode=MODES,
        blocks=BLOCK_LISTS,
        first=FIRST,
        tokens=TOKENS,
        last=st.booleans(),
        layers=PARTS_OF,
        paper=st.booleans(),
    )
    def stage(
        self,
        t: str,
        mode: Mode,
        blocks: list[int],
        first: int,
        tokens: int,
        last: bool,
        layers: tuple[str, ...] | None,
        paper: bool,
    ) -> None:
        given_ticket = ticket(self.peer("p:0"), 1, 2, transfer=t) if paper else None
        self.give(Stage(t, mode, Part(layers, (first,), BlockTable.of(blocks)), last, tokens, given_ticket))

    @rule(t=TRANSFERS, mode=MODES)
    def sound_stage(self, t: str, mode: Mode) -> None:
        """One that fits the tickets and grants of here, so that operations are posted often."""
        paper = ticket(self.peer("p:0"), 1, 2, transfer=t) if mode is Mode.PULL else None
        self.give(Stage(t, mode, Part(None, (0,), BlockTable.of([4, 6])), True, 8, paper))

    @rule(t=TRANSFERS, reason=REASONS, at=st.sampled_from(["d:0", None]))
    def abort(self, t: str, reason: Reason, at: str | None) -> None:
        self.give(Abort(t, reason, address=at))

    @rule(grace=st.sampled_from([0.0, 5.0]))
    def drain(self, grace: float) -> None:
        if next(self.names) % 7 == 0:
            self.give(Drain(grace))

    # ------------------------------------------------------ transport and runtime

    @rule(number=st.integers(0, 12), ok=st.booleans())
    def end_operation(self, number: int, ok: bool) -> None:
        self.give(OpDone(number, 8) if ok else OpFailed(number, Reason.TRANSPORT, "broken"))

    @rule(t=TRANSFERS)
    def forbidden(self, t: str) -> None:
        self.give(Forbidden(t))

    @rule(at=PEERS, generation=st.integers(0, 3))
    def fenced(self, at: str, generation: int) -> None:
        self.give(Fenced(Peer(at[0], 0), generation))

    @rule(t=TRANSFERS, at=PEERS, digest=st.sampled_from(["same", "another"]))
    def digested(self, t: str, at: str, digest: str) -> None:
        self.give(Digested(t, Peer(at[0], 0), digest))

    # -------------------------------------------------------------------- peers

    def hear(self, at: str, message: Message) -> None:
        sender = self.peer(at)
        numbers = [number for number, (other, _) in self.x.links.items() if other is sender]
        if numbers:
            self.x.hear(sender, message, link=max(numbers))
            self.net.flow()

    @rule(
        at=PEERS,
        t=TRANSFERS,
        blocks=BLOCK_LISTS,
        first=FIRST,
        tokens=TOKENS,
        legs=LEGS,
        plan=PLANS,
        generation=st.integers(0, 2),
    )
    def grant(
        self,
        at: str,
        t: str,
        blocks: list[int],
        first: int,
        tokens: int,
        legs: tuple[int, ...],
        plan: str,
        generation: int,
    ) -> None:
        info = self.peer(at).info
        grant = Grant(
            t, info.peer, info.epoch, generation, Mode.PUSH, (first,), BlockTable.of(blocks), tokens, 30.0, at
        )
        self.hear(at, GrantMessage(grant, legs, plan))

    @rule(at=PEERS, t=TRANSFERS)
    def sound_grant(self, at: str, t: str) -> None:
        info = self.peer(at).info
        grant = Grant(t, info.peer, info.epoch, 0, Mode.PUSH, (0,), BlockTable.of([1, 2]), 8, 30.0, at)
        self.hear(at, GrantMessage(grant, (0,), plan_leg(layout(), layout()).digest))

    @rule(at=PEERS, transfers=st.lists(TRANSFERS, max_size=2), echo=st.booleans())
    def renew(self, at: str, transfers: list[str], echo: bool) -> None:
        self.hear(at, Renew(tuple(transfers), echo))

    @rule(
        at=PEERS,
        t=TRANSFERS,
        legs=LEGS,
        first=st.lists(FIRST, max_size=2),
        plan=PLANS,
        digest=st.sampled_from(["", "same"]),
    )
    def done(self, at: str, t: str, legs: tuple[int, ...], first: list[int], plan: str, digest: str) -> None:
        self.hear(at, Done(t, legs, tuple(first), plan, digest))

    @rule(at=PEERS, t=TRANSFERS, ok=st.booleans())
    def ack(self, at: str, t: str, ok: bool) -> None:
        self.hear(at, Ack(t, ok, None if ok else Reason.OTHER))

    @rule(at=PEERS, t=TRANSFERS, reason=REASONS, kind=st.sampled_from([Revoke, Stopped]))
    def end(self, at: str, t: str, reason: Reason, kind: type[Revoke] | type[Stopped]) -> None:
        self.hear(at, kind(t, reason))

    @rule(at=PEERS)
    def dials(self, at: str) -> None:
        self.peer(at).put(Claim(f"of {at} {next(self.names)}", Mode.PUSH, address="x:0"))
        self.net.flow()

    @rule()
    def cut(self) -> None:
        self.x.cut()

    @rule(at=PEERS)
    def restarts(self, at: str) -> None:
        self.net.kill(self.peer(at))
        self.net.node(at[0])

    @rule(at=PEERS)
    def falls_silent(self, at: str) -> None:
        self.net.silent ^= {at}

    @rule(seconds=st.sampled_from([0.1, 3.0, 12.0, 40.0, 200.0]))
    def time(self, seconds: float) -> None:
        self.net.advance(seconds, self.x)

    # ----------------------------------------------------------------- always so

    @invariant()
    def everything_is_told_once_and_in_order(self) -> None:
        if not self.orderly:
            return
        told = Counter((type(news), news.transfer) for news in self.x.news if isinstance(news, Outcome | Released))
        assert all(count == 1 for count in told.values())
        for _, transfer in told:
            self.ended.setdefault(transfer, self.net.now)
        assert {transfer for kind, transfer in told if kind is Outcome} <= self.called
        assert {transfer for kind, transfer in told if kind is Released} <= self.handed
        order = [(news.transfer, type(news)) for news in self.x.news if isinstance(news, Outcome | Released)]
        for transfer in self.handed:
            if (transfer, Released) in order:
                assert order.index((transfer, Outcome)) < order.index((transfer, Released))

    @invariant()
    def what_was_started_has_ended_or_is_open(self) -> None:
        counts = self.x.endpoint.snapshot()["counts"]
        assert isinstance(counts, dict)
        ended = sum(number for name, number in counts.items() if name != "started")
        assert counts.get("started", 0) == ended + len(self.x.endpoint.engaged())

    def teardown(self) -> None:
        """Whatever has happened, every Outcome comes in the end."""
        if not hasattr(self, "x") or not self.orderly:
            return
        for transfer in self.called:
            self.give(Abort(transfer))
        self.net.advance(2000.0, self.x)
        assert self.x.endpoint.engaged() == []
        assert {news.transfer for news in self.x.news if isinstance(news, Outcome)} == self.called


class UnderAnUnrulyEngine(OneEndpoint):
    """Calls in any order: not everything can be told once then, but nothing breaks."""

    orderly = False


OneEndpoint.TestCase.settings = UnderAnUnrulyEngine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestOneEndpoint = OneEndpoint.TestCase
TestUnderAnUnrulyEngine = UnderAnUnrulyEngine.TestCase
