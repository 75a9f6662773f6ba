"""What goes into the endpoint and what comes out of it.

A `link` is an integer that names one control connection of this process; it is never reused.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from kvx.core.messages import Envelope, Message
from kvx.core.model import (
    BlockTable,
    Descriptors,
    InstanceInfo,
    Mode,
    News,
    Op,
    Part,
    Peer,
    Reason,
    Stamp,
    Ticket,
)

# ---------------------------------------------------------------- from the engine


@frozen
class Expose:
    """Target: these blocks may be written (push) or read (pull).

    `address` is, in push, the producer's control address. `first` gives, per group, the
    position of the first block. `tokens` counts the whole prompt; `prompt`, in push, is a digest of them
    for the producer to compare with its own (empty: not compared).
    """

    transfer: str
    mode: Mode
    blocks: BlockTable
    first: tuple[int, ...]
    tokens: int
    lease_s: float
    address: str | None = None
    prompt: str = ""


@frozen
class Claim:
    """My engine has accepted this request and has no blocks for it yet.

    A reader gives its `ticket`; a push consumer the producer's `address`; a push producer neither.
    """

    transfer: str
    mode: Mode
    ticket: Ticket | None = None
    address: str | None = None


@frozen
class Stage:
    """Initiator: these blocks are computed (push) or allocated (pull).

    `tokens` counts the whole prompt and is checked with the last part; `prompt`, in push, is the digest of them
    that counts with the first part. A reader gives its ticket.
    """

    transfer: str
    mode: Mode
    part: Part
    last: bool
    tokens: int
    ticket: Ticket | None = None
    prompt: str = ""


@frozen
class Abort:
    """My engine does not want this transfer any more.

    `ticket` or `address` reach a peer of whom this side knows nothing else yet.
    """

    transfer: str
    reason: Reason = Reason.ABORTED
    detail: str = ""
    ticket: Ticket | None = None
    address: str | None = None


@frozen
class Drain:
    """No new transfer from now on; open ones may run for `grace_s` seconds, then they are aborted."""

    grace_s: float


# ------------------------------------------------- from control channel and transports


@frozen
class PeerUp:
    """A control connection is open. `address` is what was dialled, None where it was accepted."""

    link: int
    address: str | None


@frozen
class PeerLost:
    """A control connection is gone, or could not be opened (`refused`: nobody listens there)."""

    link: int
    address: str | None
    refused: bool = False
    detail: str = ""


@frozen
class Received:
    link: int
    envelope: Envelope


@frozen
class OpDone:
    """R14: every byte of the operation stands in its place and is visible there."""

    op_id: int
    nbytes: int = 0


@frozen
class OpFailed:
    """R14: the operation has ended without success, and no byte of it can land any more."""

    op_id: int
    reason: Reason = Reason.TRANSPORT
    detail: str = ""


@frozen
class Forbidden:
    """No operation of this transfer can touch my memory any more (answer to Forbid)."""

    transfer: str


@frozen
class Fenced:
    """No operation of this peer with an older generation can touch my memory (answer to Fence)."""

    peer: Peer
    generation: int


@frozen
class Digested:
    """Answer to Digest: the sum over this rank's ranges of the leg."""

    transfer: str
    peer: Peer
    digest: str


EngineEvent = Expose | Claim | Stage | Abort | Drain
Event = EngineEvent | PeerUp | PeerLost | Received | OpDone | OpFailed | Forbidden | Fenced | Digested

# ---------------------------------------------------------------- actions


@frozen
class Connect:
    """Open a control connection to this address; answered by PeerUp or PeerLost."""

    address: str


@frozen
class Disconnect:
    """Close a control connection (a refused handshake, or one that a newer one replaced)."""

    link: int
    detail: str = ""


@frozen
class Introduce:
    """A peer has proven who it is: tell the transports where it is and what its metadata says."""

    info: InstanceInfo
    metadata: dict[str, bytes]
    link: int


@frozen
class Send:
    link: int
    envelope: Envelope

    @property
    def message(self) -> Message:
        return self.envelope.message


@frozen
class Post:
    """Start one one-sided operation; `local` and `remote` have equal lengths piece by piece."""

    op_id: int
    peer: Peer
    op: Op
    local: Descriptors = field(repr=False)
    remote: Descriptors = field(repr=False)
    stamp: Stamp


@frozen
class Cancel:
    op_id: int


@frozen
class Permit:
    """Let `peer` (None: whoever shows the stamp) do `op` on these ranges of my memory."""

    transfer: str
    peer: Peer | None
    op: Op
    ranges: Descriptors = field(repr=False)
    stamp: Stamp


@frozen
class Forbid:
    """Take back every permission of this transfer; answered by Forbidden."""

    transfer: str


@frozen
class Fence:
    """Cut off a peer's operations of older generations; answered by Fenced where the transport can."""

    peer: Peer
    generation: int


@frozen
class Digest:
    """Sum up pieces of my memory (R13); answered by Digested.

    `units` are pairs of pieces and their keys; a key names a piece's place in the request, so
    the sum does not depend on the order in which parts were moved.
    """

    transfer: str
    peer: Peer
    units: tuple[tuple[Descriptors, NDArray[np.int64]], ...] = field(repr=False)


@frozen
class Report:
    """For the engine."""

    news: News


Action = Connect | Disconnect | Introduce | Send | Post | Cancel | Permit | Forbid | Fence | Digest | Report
