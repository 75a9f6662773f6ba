"""The values of the protocol: frozen, comparable, and free of behaviour that needs a clock.

Everything that crosses a process boundary is built of these. Block ids, positions and sizes
are plain integers; only `Descriptors`, which never travels, holds numpy arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from typing import Annotated

import msgspec
import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

InstanceId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""Name of one engine core, the same after a restart (by default its control address)."""
MAX_TRANSFER_ID = 128
"""Characters of a transfer's id."""
TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TRANSFER_ID)]
"""Drawn anew for each attempt; never an engine's request id."""
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""63 random bits, one per start of an instance, shared by all its processes. Epochs have no order."""
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Address = Annotated[str, msgspec.Meta(min_length=3, max_length=300)]
"""`HOST:PORT`, an IPv6 host in square brackets."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400 * 7)]


class Op(Enum):
    """A one-sided operation, seen from the initiator."""

    READ = "read"
    WRITE = "write"


class Mode(Enum):
    """Who moves the bytes: in push the producer writes, in pull the consumer reads."""

    PUSH = "push"
    PULL = "pull"


class Role(Enum):
    """What an instance is in one transfer. The second turn of a conversation may swap it."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class Side(Enum):
    """The initiator posts operations; the target owns the memory that it exposed."""

    INITIATOR = "initiator"
    TARGET = "target"


SIDE = {
    (Mode.PUSH, Role.PRODUCER): Side.INITIATOR,
    (Mode.PUSH, Role.CONSUMER): Side.TARGET,
    (Mode.PULL, Role.PRODUCER): Side.TARGET,
    (Mode.PULL, Role.CONSUMER): Side.INITIATOR,
}
ROLE = {(mode, side): role for (mode, role), side in SIDE.items()}
OP = {Mode.PUSH: Op.WRITE, Mode.PULL: Op.READ}


class Reason(Enum):
    """Why a transfer failed. Travels as text; a text of a newer peer decodes to OTHER."""

    ABORTED = "aborted"
    PREEMPTED = "preempted"
    LEASE_ENDED = "lease_ended"
    PATIENCE = "patience"
    OVERDUE = "overdue"
    PEER_LOST = "peer_lost"
    EPOCH = "epoch"
    UNKNOWN_TRANSFER = "unknown_transfer"
    BOUNDS = "bounds"
    PROMPT = "prompt"
    LAYOUT = "layout"
    VERSION = "version"
    AUTH = "auth"
    NO_CAPACITY = "no_capacity"
    TRANSPORT = "transport"
    INTEGRITY = "integrity"
    DRAINING = "draining"
    QUARANTINE = "quarantine"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        return cls.OTHER if isinstance(value, str) else None


@frozen(order=True)
class Peer:
    """One rank of one instance."""

    instance: InstanceId
    rank: Rank

    def __str__(self) -> str:
        return f"{self.instance}#{self.rank}"


@frozen
class Region:
    """One range of registered memory.

    `base` is a virtual address of this process (bytes), `length` its size in bytes,
    `device` the kind of memory: "cpu", or "cuda:N".
    """

    index: Count
    base: int
    length: Count
    device: Name = "cpu"


@frozen
class LayerSpec:
    """Where the blocks of one layer lie.

    Block b occupies `block_bytes` bytes at `offset + b * stride` of region `region`.
    A layer whose keys and values lie apart is described by two LayerSpecs.
    """

    name: Name
    region: Count
    offset: Count
    block_bytes: Count
    stride: Count


class Packing(Enum):
    """What may be cut out of one block.

    WHOLE: nothing. HEADS: a block is `heads` contiguous slices, inside of which tokens cannot
    be told apart (vLLM's CPU backend). HEADS_TOKENS: [head][token]. TOKENS_HEADS: [token][head].
    """

    WHOLE = "whole"
    HEADS = "heads"
    HEADS_TOKENS = "heads_tokens"
    TOKENS_HEADS = "tokens_heads"


@frozen
class CacheGroup:
    """Layers that share one block table (vLLM: a KV cache group; SGLang: a pool or state component).

    `block_size` in tokens; `heads` are the KV heads in each block of this rank, `total_heads`
    those of the model; `replicated` means that every rank holds the same bytes (MLA).
    """

    index: Count
    kind: Name
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    layers: tuple[LayerSpec, ...]
    heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    total_heads: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    packing: Packing = Packing.WHOLE
    replicated: bool = False


@frozen
class Layout:
    """What one rank's KV cache looks like.

    `dtype` and `variant` are opaque texts that must be equal on both sides; `variant` names
    whatever else decides how bytes are laid out inside a block (attention backend, CPU
    instruction set, quantisation). Ranks of an instance are numbered
    `pp_rank * tp_size + tp_rank`; `stages` gives the layer names of each pipeline stage and is
    empty when `pp_size` is 1. `num_blocks` is the number of blocks in each group's pool.
    """

    model: Name
    dtype: Name
    variant: Name
    groups: tuple[CacheGroup, ...]
    num_blocks: Count
    tp_rank: Rank = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    pp_rank: Rank = 0
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    dp_rank: Rank = 0
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 1
    stages: tuple[tuple[Name, ...], ...] = ()

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    def facts(self) -> dict[str, str]:
        """The facts that must be equal on both sides, by name (R10)."""
        facts = {"model": self.model, "dtype": self.dtype, "variant": self.variant, "groups": str(len(self.groups))}
        for group in self.groups:
            at = f"groups[{group.index}]."
            facts[at + "kind"] = group.kind
            facts[at + "total_heads"] = str(group.total_heads)
            facts[at + "packing"] = group.packing.value
            facts[at + "replicated"] = str(group.replicated)
        return facts

    def fingerprint(self) -> str:
        """Digest of `facts()`: 32 hex digits, equal exactly where all of them are equal."""
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.facts().items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@frozen
class InstanceInfo:
    """What a rank tells of itself in Hello, after the peer has proven who it is.

    `addresses` lists the control addresses of all ranks of the instance, by rank.
    """

    instance: InstanceId
    rank: Rank
    epoch: Epoch
    address: Address
    layout: Layout
    transports: tuple[Name, ...] = ()
    addresses: tuple[Address, ...] = ()

    @property
    def peer(self) -> Peer:
        return Peer(self.instance, self.rank)


@frozen
class BlockTable:
    """Block ids per cache group, in the order of the request's tokens."""

    groups: tuple[tuple[Count, ...], ...]

    @classmethod
    def of(cls, *groups: Iterable[int]) -> BlockTable:
        return cls(tuple(tuple(int(block) for block in group) for group in groups))

    @property
    def empty(self) -> bool:
        return not any(self.groups)

    def __len__(self) -> int:
        return sum(map(len, self.groups))


@frozen
class Part:
    """Blocks that the initiator's engine has ready.

    `layers` names the layers (None: all of this rank). `first` is, per group, the position in
    the request of the first block, in blocks of this side. Before the last part only full
    blocks are handed over, and each position comes once per layer.
    """

    layers: tuple[Name, ...] | None
    first: tuple[Count, ...]
    blocks: BlockTable


@frozen
class Grant:
    """Permission to move the bytes of one transfer from or to the owner's blocks.

    `first` and `blocks` are in the owner's blocks; `tokens` counts the whole prompt, of which
    the granted blocks are the tail. `lease_s` is the remaining time, counted from receipt (R5).
    """

    transfer: TransferId
    owner: Peer
    epoch: Epoch
    generation: Count
    mode: Mode
    first: tuple[Count, ...]
    blocks: BlockTable
    tokens: Count
    lease_s: Seconds
    address: Address

    @property
    def op(self) -> Op:
        return OP[self.mode]


@frozen
class Ticket:
    """A pull grant as it travels through the router: the grant, the key's id and a MAC."""

    grant: Grant
    key_id: Name
    mac: bytes


@frozen
class Stamp:
    """What a transport carries with every operation, and its target checks (R2)."""

    transfer: TransferId
    epoch: Epoch
    generation: Count


@define(frozen=True, eq=False)
class Descriptors:
    """Pieces of registered memory: three int64 arrays of one length, bytes.

    Never one object per piece: a fragmented request has 100,000 of them.
    """

    region: NDArray[np.int64] = field(repr=False)
    offset: NDArray[np.int64] = field(repr=False)
    length: NDArray[np.int64] = field(repr=False)

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int, int]]) -> Descriptors:
        table = np.array(list(pieces), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.length)

    def pieces(self) -> list[tuple[int, int, int]]:
        """(region, offset, length) of each piece; for tests and small lists."""
        return list(zip(self.region.tolist(), self.offset.tolist(), self.length.tolist(), strict=True))


class Access(Enum):
    """Who checks an incoming operation.

    GRANT: the target checks each frame against what it permitted; `forbid` acts at once.
    REGION: an authenticated peer can reach any byte of a registered region (RDMA).
    """

    GRANT = "grant"
    REGION = "region"


class FenceScope(Enum):
    """What `fence` can cut off: nothing, one peer, or only all peers at once."""

    NONE = "none"
    PEER = "peer"
    ALL = "all"


@frozen
class Capabilities:
    """What a transport can do; the endpoint's moves depend on it."""

    ops: frozenset[Op]
    access: Access
    fence: FenceScope
    cancel: bool
    memory: frozenset[str] = frozenset({"cpu"})
    max_descriptors: int = 1 << 20
    max_in_flight: int = 64


@frozen
class Outcome:
    """How a transfer ended on one rank: exactly one per transfer and rank (R7).

    `bytes` were moved by operations of this rank or, at a target, are the granted ones;
    `seconds` run from the first engine call to the end; `detail` names the cause for a log.
    """

    transfer: TransferId
    ok: bool
    reason: Reason | None = None
    detail: str = ""
    mode: Mode | None = None
    role: Role | None = None
    bytes: int = 0
    seconds: float = 0.0
    parts: int = 0


@frozen
class Released:
    """Nobody touches the blocks of this transfer any more: the engine may reuse them."""

    transfer: TransferId


@frozen
class Offered:
    """A grant has arrived for a transfer (push producers that learn the id from it)."""

    grant: Grant


News = Offered | Outcome | Released
