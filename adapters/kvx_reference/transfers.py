"""What the adapter remembers of transfers, and of the requests that they belong to."""

from __future__ import annotations

from attrs import define

from kvx.core.model import Mode, Outcome, Role, Ticket
from kvx.params import Fault


@define(eq=False)
class Transfer:
    """One transfer of this instance, until nothing more can happen to it."""

    id: str
    mode: Mode
    role: Role
    request: str
    ticket: Ticket | None = None
    address: str | None = None
    held: bool = False
    """kvx has some of the engine's blocks: Released is owed."""
    granted: bool = False
    """Push producer: the consumer has blocks for it."""
    request_gone: bool = False
    outcome: Outcome | None = None

    @property
    def over(self) -> bool:
        return self.request_gone and self.outcome is not None and not self.held


@define(eq=False)
class Load:
    """A request whose first `tokens` prompt tokens come from another instance."""

    transfer: Transfer | Fault
    tokens: int
    digest: str
    """Of these tokens: the producer compares it with its own."""
    begun: bool = False
    """The engine has given blocks, or needs none."""
    awaited: bool = False
    """The engine waits for the outcome."""
    computed: int = 0
    """Prompt tokens that this instance computed itself."""


@define(eq=False)
class Send:
    """A request whose blocks go to another instance; in pull its transfer is drawn at its end."""

    transfer: Transfer | Fault | None
    digest: str
    """Of the prompt's tokens (push)."""
    staged: int = 0
    """Blocks that were handed over in all layers (push)."""
    closed: bool = False
    """Nothing more is staged: the last part has left, or it was aborted."""

    @property
    def pushing(self) -> Transfer | None:
        """The transfer, while blocks are still to be staged."""
        return self.transfer if isinstance(self.transfer, Transfer) and not self.closed else None
