"""Hello: who is who on each control connection (R3, R15).

Four steps of one kind. Each connection has a nonce of its own, so that an epoch is believed
only from an echo of this connection, never from a message that was recorded or came late.

    dialler                                  acceptor
    1  versions, epoch, nonce, key_id   ->
                                        <-   2  versions, epoch, nonce, key_id, echo, proof, fingerprint
    3  echo, proof, fingerprint, body   ->                                      (dialler believes)
                                        <-   4  echo, body                      (acceptor believes)

A body (info, metadata of the transports) goes only to a side whose proof and fingerprint held.
A side that cannot go on answers with `refusal` and a sentence. A router or operator stops after
step 2 and puts a Command, whose proof covers the acceptor's nonce.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from kvx.core import wire
from kvx.core.messages import Command, Envelope, Hello
from kvx.core.model import InstanceInfo, Reason

PARKED = 64
"""Messages kept per connection that arrive before its handshake has ended."""
PARKED_BYTES = 64 << 10
"""What they may take together on the wire: whoever sends them has not proven anything yet."""


@define
class Link:
    """One control connection, from its opening until it is closed."""

    number: int
    address: str | None  # what was dialled; None where it was accepted
    nonce: bytes
    opened_at: float
    peer_nonce: bytes = b""
    peer_epoch: int = 0
    info: InstanceInfo | None = None
    parked: list[Envelope] = field(factory=list)
    parked_bytes: int = 0

    @property
    def dialler(self) -> bool:
        return self.address is not None


@frozen
class Answer:
    """What a Hello led to: messages to send back, and either a proven peer or a refusal."""

    replies: tuple[Hello, ...] = ()
    introduced: InstanceInfo | None = None
    metadata: dict[str, bytes] = field(factory=dict)
    refused: tuple[Reason, str] | None = None


@define
class Handshakes:
    """All connections of one rank and how far each has come."""

    info: InstanceInfo
    key: bytes
    entropy: Callable[[int], bytes]
    metadata: dict[str, bytes] = field(factory=dict)
    links: dict[int, Link] = field(factory=dict)

    def opened(self, number: int, address: str | None, now: float) -> Hello | None:
        """A connection is open; the dialler speaks first."""
        link = self.links[number] = Link(number, address, self.entropy(16), now)
        return self._first(link, 1) if link.dialler else None

    def closed(self, number: int) -> Link | None:
        return self.links.pop(number, None)

    def park(self, number: int, envelope: Envelope) -> bool:
        """Keep a message that came before the handshake's end; False when there are too many."""
        link = self.links[number]
        if envelope.to_epoch != self.info.epoch or len(link.parked) >= PARKED:
            return False
        link.parked_bytes += len(wire.encode(envelope))
        if link.parked_bytes > PARKED_BYTES:
            return False
        link.parked.append(envelope)
        return True

    def command_holds(self, number: int, command: Command) -> bool:
        """Whether the sender of a Command knows the secret and answers this connection's nonce."""
        nonce = self.links[number].nonce
        expected = wire.command_proof(self.key, nonce, command.verb, command.argument, command.nonce)
        return wire.proof_holds(expected, command.proof)

    def hello(self, number: int, hello: Hello) -> Answer:
        """Take one Hello. A repeated or misplaced one changes nothing."""
        link = self.links[number]
        if hello.refusal is not None:
            return Answer(refused=(hello.refusal, f"the peer refused: {hello.detail}"))
        if link.info is not None or link.dialler != (hello.step in (2, 4)):
            return Answer()
        if hello.step in (1, 2):
            if link.peer_nonce and (hello.nonce, hello.epoch) != (link.peer_nonce, link.peer_epoch):
                return Answer()  # a handshake is held with one peer, it does not begin again
            refusal = self._stranger(hello)
            if refusal is not None:
                return refusal
        if hello.step == 1:
            link.peer_nonce, link.peer_epoch = hello.nonce, hello.epoch
            return Answer((self._first(link, 2),))
        if hello.echo != link.nonce:
            return Answer()
        if hello.step == 2:
            link.peer_nonce, link.peer_epoch = hello.nonce, hello.epoch
        if hello.step in (2, 3) and not self._proven(link, hello):
            return self._refuse(Reason.AUTH, "the proof does not hold: the shared secrets differ")
        if hello.step == 2:
            return self._third(link, hello)
        return self._body(link, hello)

    def _stranger(self, hello: Hello) -> Answer | None:
        if not set(wire.VERSIONS) & set(hello.versions):
            return self._refuse(
                Reason.VERSION,
                f"this instance speaks kvx protocol {list(wire.VERSIONS)}, the peer {list(hello.versions)}",
            )
        if hello.key_id != wire.key_id(self.key):
            return self._refuse(Reason.AUTH, "the shared secrets differ (or only one side has one)")
        if len(hello.nonce) < 16:
            return self._refuse(Reason.AUTH, "the nonce is too short")
        return None

    def _third(self, link: Link, hello: Hello) -> Answer:
        """Step 2 held: give the body if the caches are alike, else the facts, so that both can name the difference."""
        own = self.info.layout.fingerprint()
        same = hello.fingerprint == own
        reply = Hello(
            step=3,
            echo=link.peer_nonce,
            proof=self._proof(link, own, dialler=True),
            fingerprint=own,
            facts={} if same else self.info.layout.facts(),
            info=self.info if same else None,
            metadata=self.metadata if same else {},
        )
        return Answer((reply,))

    def _body(self, link: Link, hello: Hello) -> Answer:
        own = self.info.layout
        if hello.step == 3 and hello.fingerprint != own.fingerprint():
            facts = own.facts()
            names = [n for n in sorted(facts.keys() | hello.facts.keys()) if facts.get(n) != hello.facts.get(n)]
            differences = "; ".join(f"{n}: {hello.facts.get(n)!r} here, {facts.get(n)!r} there" for n in names)
            return self._refuse(Reason.LAYOUT, f"the KV caches differ: {differences[:900] or 'fingerprint'}")
        info = hello.info
        if info is None or info.epoch != link.peer_epoch or info.peer == self.info.peer:
            return self._refuse(Reason.AUTH, "the peer's description does not fit its Hello")
        if hello.step == 4 and info.layout.fingerprint() != own.fingerprint():
            return self._refuse(Reason.LAYOUT, "the KV caches differ")
        if info.rank != info.layout.rank or len(info.addresses) != info.layout.ranks:
            return self._refuse(Reason.LAYOUT, "the peer's rank or its directory does not fit its layout")
        link.info = info
        replies = (Hello(step=4, echo=link.peer_nonce, info=self.info, metadata=self.metadata),)
        return Answer(replies if hello.step == 3 else (), info, hello.metadata)

    def _first(self, link: Link, step: int) -> Hello:
        own = self.info.layout.fingerprint() if step == 2 else ""
        return Hello(
            step=step,
            versions=wire.VERSIONS,
            epoch=self.info.epoch,
            nonce=link.nonce,
            key_id=wire.key_id(self.key),
            echo=link.peer_nonce,
            proof=self._proof(link, own, dialler=False) if step == 2 else b"",
            fingerprint=own,
        )

    def _proven(self, link: Link, hello: Hello) -> bool:
        return wire.proof_holds(self._proof(link, hello.fingerprint, dialler=not link.dialler), hello.proof)

    def _proof(self, link: Link, fingerprint: str, *, dialler: bool) -> bytes:
        """The proof that the dialler or the acceptor of this link gives; each side can compute both."""
        mine = (self.info.epoch, link.nonce)
        theirs = (link.peer_epoch, link.peer_nonce)
        (own_epoch, own_nonce), (peer_epoch, peer_nonce) = (mine, theirs) if dialler == link.dialler else (theirs, mine)
        return wire.hello_proof(
            self.key,
            dialler=dialler,
            own_epoch=own_epoch,
            own_nonce=own_nonce,
            peer_epoch=peer_epoch,
            peer_nonce=peer_nonce,
            fingerprint=fingerprint,
        )

    @staticmethod
    def _refuse(reason: Reason, detail: str) -> Answer:
        return Answer((Hello(step=1, refusal=reason, detail=detail),), refused=(reason, detail))
