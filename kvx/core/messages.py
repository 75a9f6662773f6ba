"""The eight messages of the wire, and the envelope that carries each."""

from __future__ import annotations

from typing import Annotated

import msgspec
from attrs import field, frozen
from msgspec import UNSET, UnsetType

from kvx.core.model import Count, Epoch, Grant, InstanceInfo, Name, Rank, Reason, TransferId

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Proof = Annotated[bytes, msgspec.Meta(max_length=64)]
Detail = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]


@frozen
class Hello:
    """Who is who, in four steps of one kind (R3, R15).

    1 dialler: versions, epoch, nonce, key_id. 2 acceptor: the same of its own, echo, proof,
    fingerprint. 3 dialler: echo, proof, fingerprint, body. 4 acceptor: echo, body. A body goes
    only to a peer whose proof and fingerprint held. `refusal` ends the handshake with a reason.
    """

    step: Annotated[int, msgspec.Meta(ge=1, le=4)]
    versions: tuple[Count, ...] = ()
    epoch: Epoch = 0
    nonce: bytes = b""
    key_id: Name = ""
    echo: bytes = b""
    proof: bytes = b""
    fingerprint: Name = ""
    facts: dict[str, str] = field(factory=dict)
    info: InstanceInfo | None = None
    metadata: dict[str, bytes] = field(factory=dict)
    refusal: Reason | None = None
    detail: Detail = ""


@frozen
class GrantMessage:
    """A target hands its write grant to the initiator.

    `legs` are the ranks of the sender's instance that the receiver has to hear from; `plan` is
    the digest of this leg's plan (R6), `prompt` that of the prompt's tokens, where the sender's engine has one.
    """

    grant: Grant
    legs: tuple[Rank, ...]
    plan: Name
    prompt: Name | UnsetType = UNSET


@frozen
class Renew:
    """The sender still wants these transfers: their leases start anew at the receiver.

    With `echo` the receiver answers with an empty Renew: kvx's keepalive while legs are open.
    """

    transfers: tuple[TransferId, ...] = ()
    echo: bool = False


@frozen
class Done:
    """All operations of this leg are complete. `first` per group, in the consumer's blocks."""

    transfer: TransferId
    legs: tuple[Rank, ...]
    first: tuple[Count, ...]
    plan: Name
    digest: Name = ""


@frozen
class Ack:
    """Answer to Done (and to Command, with a body)."""

    transfer: TransferId
    ok: bool
    reason: Reason | None = None
    detail: Detail = ""
    body: Text = ""


@frozen
class Revoke:
    """Stop: post nothing more for this transfer, and answer Stopped when nothing can land."""

    transfer: TransferId
    reason: Reason
    detail: Detail = ""


@frozen
class Stopped:
    """No operation of the sender can touch the receiver's blocks any more."""

    transfer: TransferId
    reason: Reason
    detail: Detail = ""


@frozen
class Command:
    """A word from a router or operator, who has no rank: `release`, `withdraw`, `drain`, `status`.

    `nonce` names the question, so that the Ack (its transfer is the nonce's hex) finds it;
    `proof` is an HMAC of the shared secret over challenge, verb, argument and nonce.
    """

    verb: Name
    argument: Text
    nonce: bytes
    proof: bytes


Message = Hello | GrantMessage | Renew | Done | Ack | Revoke | Stopped | Command

KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: GrantMessage,
    3: Renew,
    4: Done,
    5: Ack,
    6: Revoke,
    7: Stopped,
    8: Command,
}
"""Numbers are never used again for another meaning."""


@frozen
class Envelope:
    """One message with the sender's epoch and the receiver's as the sender believes it (0: unknown)."""

    version: int
    from_epoch: int
    to_epoch: int
    message: Message
