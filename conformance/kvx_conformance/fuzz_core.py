"""What the fuzzer feeds without a socket: the decoders, and an endpoint with a proven, hostile peer."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvx.core import wire
from kvx.core.errors import LocalProtocolError, RemoteProtocolError
from kvx.core.events import Abort, Claim, Expose, Received
from kvx.core.legs import Limits
from kvx.core.messages import Envelope, GrantMessage
from kvx.core.model import Access, BlockTable, FenceScope, Grant, Mode, Peer
from kvx_conformance.fuzz_inputs import Maker, Mutator, good_frames
from kvx_conformance.pair import Net, Node, ticket
from kvx_conformance.scenes import expose, stage

VECTORS = Path(__file__).parent / "vectors" / "v1"
LIMITS = Limits(tombstones=2000, transfers=400)


class Envelopes:
    """`wire.decode`; what it lets through can be sent again and is then the same."""

    def __init__(self, random: Random) -> None:
        self._random, self._mutator = random, Mutator(random)
        self._good = [*good_frames(random), *self._vectors()]

    def feed(self) -> bool:
        first, second = self._random.choice(self._good), self._random.choice(self._good)
        data = self._mutator.noise() if self._random.random() < 0.1 else self._mutator.changed(first, second)
        try:
            envelope = wire.decode(data)
        except RemoteProtocolError:
            return False
        again = wire.decode(wire.encode(envelope))
        if again != envelope:
            raise AssertionError(f"{data.hex()} is read as {envelope}, and once more as {again}")
        return True

    def check(self) -> None:
        for data in self._vectors():
            wire.decode(data)

    @staticmethod
    def _vectors() -> list[bytes]:
        return [path.read_bytes() for path in sorted(VECTORS.glob("*.bin")) if path.stem != "ticket"]

    def close(self) -> None:
        return


class Tickets:
    """`wire.parse_ticket`: any text; no changed ticket may hold."""

    KEY = b"a secret of sixteen bytes or more"

    def __init__(self, random: Random) -> None:
        self._random, self._mutator = random, Mutator(random)
        grants = [
            Grant(f"t-{n}", Peer("p", 0), n, 0, Mode.PULL, (0,), BlockTable.of(range(n)), 4 * n, 30.0, "p:1")
            for n in range(1, 60)
        ]
        self._good = [wire.ticket_text(wire.make_ticket(grant, self.KEY)) for grant in grants]
        self._grants = set(grants)

    def feed(self) -> bool:
        code = self._random.choice(self._good).encode()
        if self._random.random() < 0.5:
            text = self._mutator.changed(code, self._random.choice(self._good).encode()).decode("latin-1")
        else:
            text = wire.ticket_text(wire.parse_ticket(code.decode()))
            at = self._random.randrange(5, len(text))
            text = text[:at] + self._random.choice("ABCDwxyz0189-_") + text[at + 1 :]
        try:
            found = wire.parse_ticket(text)
        except RemoteProtocolError:
            return False
        if wire.ticket_holds(found, self.KEY) and found.grant not in self._grants:
            raise AssertionError(f"a ticket that nobody has made holds: {text}")
        return True

    def check(self) -> None:
        for text in self._good:
            if not wire.ticket_holds(wire.parse_ticket(text), self.KEY):
                raise AssertionError("a good ticket does not hold any more")

    def close(self) -> None:
        return


class Decoder:
    """A function of bytes, by name: the suite knows no plugin. It may raise RemoteProtocolError only.

    `samples` are good inputs to begin with; `size` is the length of every input where it is fixed.
    """

    def __init__(self, random: Random, name: str, samples: Sequence[bytes], size: int | None = None) -> None:
        module, _, function = name.partition(":")
        found: Any = importlib.import_module(module)
        for part_ in function.split("."):
            found = getattr(found, part_)
        self._decode: Callable[[bytes], object] = found
        self._size = size
        self._random, self._mutator = random, Mutator(random)
        self._good = list(samples)

    def feed(self) -> bool:
        first, second = self._random.choice(self._good), self._random.choice(self._good)
        data = self._mutator.noise() if self._random.random() < 0.2 else self._mutator.changed(first, second)
        if self._size is not None:
            data = data[: self._size].ljust(self._size, b"\0")
        try:
            self._decode(data)
        except RemoteProtocolError:
            return False
        if len(self._good) < 500:  # what is read leads on to more that can be read
            self._good.append(data)
        return True

    def check(self) -> None:
        return

    def close(self) -> None:
        return


class HostilePeer:
    """A live endpoint, and a peer that has proven itself and then says anything at all.

    The victim's engine works meanwhile with the same transfer ids. An exception is a finding, and
    so is a table that outgrows its limit, and a transfer with an honest peer that fails.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._rounds = itertools.count()
        self._renew()

    def _renew(self) -> None:
        """A new world, of another kind of transport."""
        random, number = self._random, next(self._rounds)
        access, fence = random.choice(list(Access)), random.choice([FenceScope.NONE, FenceScope.PEER])
        self._net = Net(access=access, fence=fence, cancel=random.random() < 0.5, limits=LIMITS)
        self._victim, self._honest, self._hostile = (self._net.node(name) for name in "vgh")
        self._hostile.put(Expose("hello", Mode.PUSH, BlockTable.of([0]), (0,), 4, 30.0, "v:0"))
        self._net.flow()
        self._net.stop = lambda node, message: node is self._hostile  # from now on only the fuzzer speaks for it
        self._link = next(number for number, (other, _) in self._victim.links.items() if other is self._hostile)
        self._ids = [f"{number}-{n}" for n in range(40)]
        self._maker = Maker(random, self._known())
        self._fed = 0

    def _known(self) -> dict[str, Callable[[], Any]]:
        pick = self._random.choice
        info = self._hostile.info
        return {
            "transfer": lambda: pick(self._ids),
            "transfers": lambda: tuple(self._random.choices(self._ids, k=3)),
            "owner": lambda: info.peer,
            "epoch": lambda: info.epoch,
            "generation": lambda: pick((0, 0, 1)),
            "mode": lambda: Mode.PUSH,
            "legs": lambda: (0,),
            "first": lambda: (pick((0, 0, 0, 1, 3)),),
            "blocks": lambda: BlockTable.of(self._random.sample(range(17), pick((0, 1, 2, 2)))),
            "tokens": lambda: pick((4, 8, 8, 12)),
            "address": lambda: info.address,
            "plan": self._plan,
            "proof": lambda: self._random.randbytes(32),
        }

    def _plan(self) -> str:
        """The digest that the victim expects, once it has sent one."""
        return next((m.plan for m in self._victim.sent(GrantMessage) if isinstance(m, GrantMessage)), "")

    def feed(self) -> bool:
        random = self._random
        if random.random() < 0.15:
            self._engine()
        message = self._maker.message()
        epochs = self._hostile.info.epoch, self._victim.info.epoch
        if random.random() < 0.05:
            epochs = random.choice(((0, 0), (epochs[0], 0), (epochs[1], epochs[0]), (1, 2**63 - 1)))
        envelope = Envelope(wire.VERSION, *epochs, message)
        try:
            envelope = wire.decode(wire.encode(envelope))
        except RemoteProtocolError:
            return False
        before = len(self._victim.actions)
        self._victim.put(Received(self._link, envelope))
        if random.random() < 0.1:
            self._victim.end_ops(ok=random.random() < 0.7)
        if random.random() < 0.05:
            self._net.advance(random.choice((0.01, 0.1, 0.1, 1.0, 1.0, 11.0, 40.0)), self._victim)
        self._net.flow()
        self._fed += 1
        self._ids[random.randrange(len(self._ids))] = (
            f"{self._fed}" if random.random() < 0.2 else random.choice(self._ids)
        )
        acted = len(self._victim.actions) > before
        if self._fed >= 1000:
            self.check()
            self._renew()
        return acted

    def _engine(self) -> None:
        """The victim's engine uses an id that the peer has in mouth as well."""
        random, transfer = self._random, self._random.choice(self._ids)
        node, blocks = self._victim, random.sample(range(16), 2)
        paper = ticket(self._hostile, 1, 2, transfer=transfer)
        event = random.choice(
            (
                expose(*blocks, transfer=transfer, p="h:0"),
                expose(*blocks, transfer=transfer, mode=Mode.PULL),
                stage(*blocks, transfer=transfer),
                stage(*blocks, transfer=transfer, last=False, tokens=12),
                stage(*blocks, transfer=transfer, mode=Mode.PULL, with_=paper),
                Claim(transfer, Mode.PUSH),
                Claim(transfer, Mode.PULL, paper),
                Abort(transfer),
            )
        )
        try:
            node.put(event)
        except LocalProtocolError:
            if not node.states(transfer) and not node.outcomes(transfer):
                raise AssertionError(f"{event} was refused, and the engine has no Outcome") from None

    def check(self) -> None:
        """An honest peer is served; at the end nothing is left but quarantine."""
        net, victim, honest = self._net, self._victim, self._honest
        for mode in Mode:
            transfer = f"good-{mode.value}-{self._fed}"
            self._good(transfer, mode, *((honest, victim) if self._fed % 2 else (victim, honest)))
        counts = victim.endpoint.snapshot()
        for table, limit in (("open", LIMITS.transfers), ("strangers", LIMITS.transfers)):
            found = counts[table]
            size = found if isinstance(found, int) else len(found)  # type: ignore[arg-type]
            if size > limit:
                raise AssertionError(f"{size} entries in {table}, {limit} are allowed")
        net.advance(LIMITS.transfer_max_s + 60, victim, honest)
        left = victim.endpoint.snapshot()["open"]
        assert isinstance(left, dict)
        stuck = {transfer: states for transfer, states in left.items() if set(states) - {"fencing", "done", "failed"}}
        if stuck:
            raise AssertionError(f"still open after transfer_max_s: {stuck}")

    def _good(self, transfer: str, mode: Mode, p: Node, d: Node) -> None:
        if mode is Mode.PUSH:
            d.put(expose(1, 2, transfer=transfer, p=p.info.address))
            p.put(stage(5, 6, transfer=transfer))
        else:
            p.put(expose(1, 2, transfer=transfer, mode=mode))
            d.put(stage(8, 9, transfer=transfer, mode=mode, with_=ticket(p, 1, 2, transfer=transfer)))
        self._net.flow()
        for node in (p, d):
            node.end_ops()
        self._net.flow()
        for node in (p, d):
            if not node.outcome(transfer).ok or node.released(transfer) != 1:
                raise AssertionError(f"an honest {mode.value} fails at {node.info.peer}: {node.outcomes(transfer)}")

    def close(self) -> None:
        return
