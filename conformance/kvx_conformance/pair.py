"""A few endpoints that feed into each other, for scenarios written by hand.

Nothing happens by itself: a test puts an event, lets messages flow, ends an operation, moves the
clock. `Net.stop` names messages that are lost on the way, `Net.silent` hosts that hear nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from attrs import define, field

from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.events import (
    Action,
    Connect,
    Digest,
    Digested,
    Disconnect,
    Event,
    Fence,
    Fenced,
    Forbid,
    Forbidden,
    OpDone,
    OpFailed,
    PeerLost,
    PeerUp,
    Permit,
    Post,
    Received,
    Report,
    Send,
)
from kvx.core.legs import Limits
from kvx.core.messages import Envelope, Message
from kvx.core.model import (
    Access,
    BlockTable,
    CacheGroup,
    Capabilities,
    FenceScope,
    Grant,
    InstanceInfo,
    LayerSpec,
    Layout,
    Mode,
    News,
    Offered,
    Op,
    Outcome,
    Packing,
    Part,
    Peer,
    Released,
    Ticket,
)

BLOCK_SIZE, BLOCKS, HEADS = 4, 16, 2
LAYERS = ("layer.0", "layer.1")
KEY = b"a secret of sixteen bytes or more"


def layout(
    rank: int = 0, tp: int = 1, *, model: str = "toy", block_size: int = BLOCK_SIZE, heads: int = HEADS
) -> Layout:
    """The layout of one rank of a small model of two layers."""
    own = max(1, heads // tp)
    size = block_size * own * 4
    layers = tuple(LayerSpec(name, 0, i * size * BLOCKS, size, size) for i, name in enumerate(LAYERS))
    group = CacheGroup(0, "full", block_size, layers, own, heads, Packing.HEADS_TOKENS)
    return Layout(model, "f32", "test", (group,), BLOCKS, rank, tp)


def part(*blocks: int, first: int = 0, layers: tuple[str, ...] | None = None) -> Part:
    return Part(layers, (first,), BlockTable.of(blocks))


@define(eq=False)
class Node:
    """One rank: its endpoint and everything that came out of it."""

    net: Net
    endpoint: Endpoint
    digest: str = "same"
    actions: list[Action] = field(factory=list)
    links: dict[int, tuple[Node, int]] = field(factory=dict)
    dialled: dict[int, str] = field(factory=dict)
    closed: set[int] = field(factory=set)
    numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))

    @property
    def info(self) -> InstanceInfo:
        return self.endpoint.info

    def put(self, event: Event) -> list[Action]:
        """Give one event and do what comes of it; messages stay on their way until `Net.flow`."""
        return self._do(self.endpoint.handle(event, self.net.now))

    def expire(self) -> list[Action]:
        return self._do(self.endpoint.expire(self.net.now))

    def _do(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        for action in actions:
            self.net.act(self, action)
        return actions

    # ------------------------------------------------------------ what came of it

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def news(self) -> list[News]:
        return [action.news for action in self.actions if isinstance(action, Report)]

    def outcomes(self, transfer: str = "t") -> list[Outcome]:
        return [news for news in self.news if isinstance(news, Outcome) and news.transfer == transfer]

    def outcome(self, transfer: str = "t") -> Outcome:
        (found,) = self.outcomes(transfer)
        return found

    def released(self, transfer: str = "t") -> int:
        return self.news.count(Released(transfer))

    def offers(self) -> list[Grant]:
        return [news.grant for news in self.news if isinstance(news, Offered)]

    def posts(self) -> list[Post]:
        return [action for action in self.actions if isinstance(action, Post)]

    def permits(self) -> list[Permit]:
        return [action for action in self.actions if isinstance(action, Permit)]

    def sent(self, kind: type[Message]) -> list[Message]:
        return [a.message for a in self.actions if isinstance(a, Send) and isinstance(a.message, kind)]

    def states(self, transfer: str = "t") -> list[str]:
        opened = self.endpoint.snapshot()["open"]
        assert isinstance(opened, dict)
        return list(opened.get(transfer, ()))

    def end_ops(self, *, ok: bool = True) -> None:
        """End every operation that was posted and has not ended."""
        for post in [post for post in self.posts() if post.op_id not in self.net.ended[id(self)]]:
            self.net.ended[id(self)].add(post.op_id)
            self.put(OpDone(post.op_id, post.local.nbytes) if ok else OpFailed(post.op_id, detail="broken"))

    # --------------------------------------------------------------- connections

    @property
    def link(self) -> int:
        """The newest open link."""
        return max(self.links)

    def hear(
        self, sender: Node, message: Message, *, from_epoch: int = 0, to_epoch: int = 0, link: int = 0
    ) -> list[Action]:
        """Receive a message on a link (default: the newest) as if `sender` had said it, with these epochs if given."""
        epochs = from_epoch or sender.info.epoch, to_epoch or self.info.epoch
        return self.put(Received(link or self.link, Envelope(wire.VERSION, *epochs, message)))

    def cut(self) -> None:
        """Every connection of this rank breaks; both ends hear of it."""
        for number, (other, theirs) in list(self.links.items()):
            self.links.pop(number)
            other.links.pop(theirs, None)
            self.put(PeerLost(number, self.dialled.get(number), False, "cut"))
            other.put(PeerLost(theirs, other.dialled.get(theirs), False, "cut"))


class Net:
    """The clock, the nodes, and the messages under way."""

    def __init__(
        self,
        *,
        access: Access = Access.REGION,
        fence: FenceScope = FenceScope.NONE,
        cancel: bool = False,
        integrity: bool = False,
        limits: Limits | None = None,
        most: int = 1 << 20,
    ) -> None:
        self.now = 1000.0
        self.capabilities = Capabilities(frozenset(Op), access, fence, cancel, max_descriptors=most)
        self.integrity = integrity
        self.limits = limits or Limits()
        self.nodes: dict[str, Node] = {}
        self.ended: dict[int, set[int]] = {}
        self.silent: set[str] = set()
        self.stop: Callable[[Node, Message], bool] = lambda node, message: False
        self._under_way: deque[tuple[Node, int, Envelope | None]] = deque()
        self._random = itertools.count(1)

    def node(
        self,
        name: str,
        own: Layout | None = None,
        *,
        epoch: int | None = None,
        key: bytes = b"",
        limits: Limits | None = None,
    ) -> Node:
        """Start a rank at `NAME:RANK`; a second start of the same one takes its place."""
        own = own or layout()
        addresses = tuple(f"{name}:{rank}" for rank in range(own.ranks))
        epoch = next(self._random) * 1000 + 7 if epoch is None else epoch
        info = InstanceInfo(name, own.rank, epoch, addresses[own.rank], own, ("sim",), addresses)
        endpoint = Endpoint(
            info,
            capabilities=lambda _: self.capabilities,
            entropy=lambda n: next(self._random).to_bytes(n),
            key=key,
            limits=limits or self.limits,
            integrity=self.integrity,
        )
        node = self.nodes[info.address] = Node(self, endpoint)
        self.ended[id(node)] = set()
        return node

    def pair(self) -> tuple[Node, Node]:
        """A producer `p` and a consumer `d` of one rank each."""
        return self.node("p"), self.node("d")

    # ------------------------------------------------------------------- flowing

    def act(self, node: Node, action: Action) -> None:
        match action:
            case Send(link=link, envelope=envelope):
                self._under_way.append((node, link, envelope))
            case Connect(address=address):
                self._connect(node, address)
            case Disconnect(link=link):
                node.closed.add(link)
                self._under_way.append((node, link, None))  # what is queued is still sent
            case Forbid(transfer=transfer) if self.capabilities.access is Access.GRANT:
                node.put(Forbidden(transfer))
            case Fence(peer=peer, generation=generation) if self.capabilities.fence is FenceScope.PEER:
                node.put(Fenced(peer, generation))
            case Digest(transfer=transfer, peer=peer):
                node.put(Digested(transfer, peer, node.digest))

    def _connect(self, node: Node, address: str) -> None:
        number = next(node.numbers)
        target = self.nodes.get(address)
        if target is None:
            node.put(PeerLost(number, address, True, "connection refused"))
        elif not {address, node.info.address} & self.silent:
            accepted = next(target.numbers)
            node.links[number], node.dialled[number] = (target, accepted), address
            target.links[accepted] = (node, number)
            target.put(PeerUp(accepted, None))
            node.put(PeerUp(number, address))

    def flow(self) -> None:
        """Deliver messages, as bytes, until none is under way."""
        while self._under_way:
            node, link, envelope = self._under_way.popleft()
            target, theirs = node.links.get(link, (None, 0))
            if target is None or {node.info.address, target.info.address} & self.silent:
                continue
            if envelope is None:
                node.links.pop(link)
                target.links.pop(theirs, None)
                target.put(PeerLost(theirs, target.dialled.get(theirs), False, "closed"))
            elif theirs not in target.closed and not self.stop(node, envelope.message):
                target.put(Received(theirs, wire.decode(wire.encode(envelope))))

    def advance(self, seconds: float, *nodes: Node) -> None:
        """Let time pass for these nodes (default: all), deadline by deadline, messages flowing."""
        self.flow()
        end = self.now + seconds
        running = nodes or tuple(self.nodes.values())
        for _ in range(10_000):
            due = [moment for node in running if (moment := node.endpoint.deadline()) is not None and moment <= end]
            if not due:
                break
            self.now = max(self.now, min(due))
            for node in running:
                node.expire()
            self.flow()
        else:
            raise AssertionError("deadlines do not move")
        self.now = end

    def kill(self, node: Node) -> None:
        """The process dies: nobody listens at its address, its connections are reset."""
        del self.nodes[node.info.address]
        node.cut()


def ticket(
    owner: Node, *blocks: int, transfer: str = "t", tokens: int = 0, first: int = 0, lease_s: float = 30.0
) -> Ticket:
    """What the router carries of a pull producer's blocks."""
    info = owner.info
    grant = Grant(
        transfer=transfer,
        owner=Peer(info.instance, 0),
        epoch=info.epoch,
        generation=0,
        mode=Mode.PULL,
        first=(first,),
        blocks=BlockTable.of(blocks),
        tokens=tokens or (first + len(blocks)) * BLOCK_SIZE,
        lease_s=lease_s,
        address=info.addresses[0],
    )
    return wire.make_ticket(grant, b"")
