"""Where scenarios written by hand begin: what an engine says in one line, and transfers half done."""

from __future__ import annotations

from kvx.core.events import Claim, Expose, Stage
from kvx.core.model import BlockTable, Mode, Ticket
from kvx_conformance.pair import Net, Node, layout, part, ticket

LEASE_S = 30.0


def expose(
    *blocks: int, transfer: str = "t", mode: Mode = Mode.PUSH, tokens: int = 0, first: int = 0, p: str = "p:0"
) -> Expose:
    """These blocks, as the prompt's tail; in push the producer is at `p`."""
    tokens = tokens or (first + len(blocks)) * 4
    address = p if mode is Mode.PUSH else None
    return Expose(transfer, mode, BlockTable.of(blocks), (first,), tokens, LEASE_S, address)


def stage(
    *blocks: int,
    transfer: str = "t",
    mode: Mode = Mode.PUSH,
    tokens: int = 0,
    first: int = 0,
    last: bool = True,
    layers: tuple[str, ...] | None = None,
    with_: Ticket | None = None,
) -> Stage:
    """One part; a reader stages `with_` its ticket."""
    tokens = tokens or (first + len(blocks)) * 4
    return Stage(transfer, mode, part(*blocks, first=first, layers=layers), last, tokens, with_)


def writing(net: Net) -> tuple[Node, Node]:
    """A push whose WRITE is under way, from `p` to `d`."""
    p, d = net.pair()
    d.put(expose(1, 2))
    p.put(Claim("t", Mode.PUSH))
    net.flow()
    p.put(stage(5, 6))
    net.flow()
    _expect(p.states() == ["moving"] and d.states() == ["exposed"])
    return p, d


def exposed(net: Net) -> tuple[Node, Node, Ticket]:
    """A pull producer with its ticket out, and a consumer that does not know of it yet."""
    p, d = net.pair()
    p.put(expose(1, 2, mode=Mode.PULL))
    return p, d, ticket(p, 1, 2)


def reading(net: Net) -> tuple[Node, Node]:
    """A pull whose READ is under way."""
    p, d, paper = exposed(net)
    d.put(stage(8, 9, mode=Mode.PULL, with_=paper))
    net.flow()
    _expect(d.states() == ["moving"])
    return p, d


def two_on_one(net: Net) -> tuple[Node, Node, Node]:
    """Producer ranks 0 and 1, one consumer: two legs at `d`."""
    return net.node("p", layout(0, 2), epoch=5), net.node("p", layout(1, 2), epoch=5), net.node("d")


def connected(net: Net) -> tuple[Node, Node]:
    """A pair that has moved something before."""
    p, d = net.pair()
    d.put(expose(1, transfer="first"))
    p.put(stage(5, transfer="first"))
    net.flow()
    p.end_ops()
    net.flow()
    return p, d


def _expect(holds: bool) -> None:
    if not holds:
        raise AssertionError("the scene could not be set")
