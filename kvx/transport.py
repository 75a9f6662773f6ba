"""The transport port: moves bytes between registered memory of two ranks, and nothing else.

A transport is driven by one thread, the instance's runtime thread: every method is called
from it, none may block, and everything that happened comes back through `poll`. A transport
may own threads that only move bytes; they hold no protocol state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvx.core.events import Fenced, Forbidden, OpDone, OpFailed
from kvx.core.model import Access, Capabilities, Descriptors, FenceScope, InstanceInfo, Op, Peer, Region, Stamp

Completion = OpDone | OpFailed | Forbidden | Fenced


class Transport(Protocol):
    """One transport of one rank."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def idle_poll_s(self) -> float | None:
        """How often `poll` must be called while operations are in flight; None: `fileno` tells."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make these regions reachable. Called once, before anything else.

        Raises TransportError for memory of a kind that is not declared, an index given twice, or a second call.
        """
        ...

    def metadata(self) -> bytes:
        """What a peer's `connect` needs; travels in Hello's body. Raises TransportError."""
        ...

    def connect(self, info: InstanceInfo, metadata: bytes) -> None:
        """Learn of a peer (again after each handshake). Invalid metadata raises TransportError.

        May open connections later, when the first operation is posted; a failure to do so
        fails that operation, not this call.
        """
        ...

    def permit(self, transfer: str, peer: Peer | None, op: Op, ranges: Descriptors, stamp: Stamp) -> None:
        """Allow `op` on these ranges to operations that show `stamp` (peer None: whoever they are from)."""
        ...

    def forbid(self, transfer: str) -> None:
        """End every permission of the transfer; `Forbidden` follows from `poll` when it is in force.

        With `access = grant` it follows at once and no byte lands afterwards. With
        `access = region` the transport cannot do this and reports nothing.
        """
        ...

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        """Start an operation. Exactly one of OpDone and OpFailed follows, whatever happens (R14).

        An impossible request (unknown peer, lengths that differ, a range outside of a region)
        is answered by OpFailed too, never by an exception. Back-pressure is the transport's:
        more posts than fit are queued in order. Pieces at the source may overlap; where pieces at
        the destination do, it fails, or each byte there is one of those that were sent to it.
        """
        ...

    def cancel(self, op_id: int) -> None:
        """Ask for the end of an operation; OpDone or OpFailed tells when nothing can land any more."""
        ...

    def fence(self, peer: Peer, generation: int) -> None:
        """Refuse this peer's operations of generations below `generation`; Fenced follows where possible."""
        ...

    def poll(self) -> list[Completion]:
        """Move bytes that can be moved now, and tell what ended. Never blocks; bounded work per call."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when `poll` has something to do (an epoll is one)."""
        ...

    def close(self) -> None:
        """Give up everything; operations in flight are dropped without a completion. May be called twice.

        When it returns, nothing reads or writes this rank's memory any more.
        """
        ...


TransportFactory = Callable[[Mapping[str, Any]], Transport]
"""Called with the options of the transport's own section of the configuration.

Beside the operator's own keys the section has `listen_host` (where to listen: loopback by default),
`advertise_host` (what peers dial), `secret` (bytes, empty: none), `insecure` (no secret is needed beyond loopback)
and `peer` (text, this rank's name).
"""

__all__ = ["Access", "Capabilities", "Completion", "FenceScope", "Transport", "TransportFactory"]
