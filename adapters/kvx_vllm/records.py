"""What the scheduler's half remembers of transfers and requests, and what it needs of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from attrs import define, frozen

from kvx.core.model import BlockTable, Mode, Role, Ticket
from kvx.params import Fault
from kvx_vllm.metadata import Ended


class EngineRequest(Protocol):
    """What is used of vLLM's Request."""

    @property
    def request_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class BlockPins(Protocol):
    """References to blocks of vLLM's pool."""

    def hold(self, transfer: str, blocks: Iterable[int]) -> None: ...
    def drop(self, transfer: str) -> None: ...
    @property
    def held(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def total(self) -> int: ...


@frozen
class Traits:
    """What vLLM's Request tells of itself beyond its tokens.

    `obstacle`: a sentence, why its blocks cannot be transferred. `siblings`: the client's request is
    several of vLLM's, which all have its parameters; `first`: this is the one that they are meant for.
    """

    obstacle: str | None = None
    siblings: bool = False
    first: bool = True


PLAIN = Traits()


@frozen
class Group:
    """A KV cache group: how many tokens a block has, and how many of the last tokens its layers look back to.

    Blocks are counted from the first token. `window` None: all tokens.
    """

    block_size: int
    window: int | None = None

    def begin(self, tokens: int) -> int:
        """The first block that the token after `tokens` looks at: vLLM has let go of those before it."""
        behind = 0 if self.window is None else max(0, tokens - self.window + 1)
        return behind // self.block_size

    def end(self, tokens: int) -> int:
        """The block behind those of `tokens`."""
        return -(-tokens // self.block_size)


@frozen
class Scheduled:
    """One request of a step: its tokens before and in this step, and its whole block table."""

    request_id: str
    computed: int
    scheduled: int
    blocks: tuple[Sequence[int], ...]


@frozen
class Identity:
    """What the scheduler knows of its instance once the workers have registered their caches."""

    epoch: int
    fingerprint: str
    ranks: int = 1
    dp_rank: int = 0
    dp_size: int = 1


class MakeTicket(Protocol):
    """A ticket's text for blocks of this instance."""

    def __call__(self, *, transfer: str, first: tuple[int, ...], blocks: BlockTable, tokens: int) -> str: ...


@define
class Transfer:
    id: str
    mode: Mode
    role: Role
    request_id: str
    ticket: Ticket | None = None
    address: str | None = None
    handed: bool = False
    """Blocks were handed over, so each rank owes Released."""
    released: int = 0
    """How many ranks have said Released."""
    freed: bool = False
    blocks: int = 0
    """How many blocks were handed over."""
    request_gone: bool = False
    end: Ended | None = None

    @property
    def over(self) -> bool:
        return self.request_gone and self.end is not None and (self.freed or not self.handed)


@define
class Send:
    """A request whose blocks go to another instance; in pull its transfer is drawn when it has finished."""

    transfer: Transfer | Fault | None
    prompt: int
    """How many of the prompt's tokens are handed over."""
    ready: list[int]
    """Per group, the first block that was not handed over yet (push)."""
    digest: str = ""
    """Of these tokens (push)."""
    last: bool = False
    dropped: bool = False
    """Nothing more is staged: aborted, preempted or failed."""

    @property
    def pushing(self) -> Transfer | None:
        """The transfer, while blocks are still to be staged."""
        return self.transfer if isinstance(self.transfer, Transfer) and not (self.last or self.dropped) else None


@define
class Load:
    """A request whose blocks come from another instance."""

    transfer: Transfer | Fault
    prompt: int
    tokens: int
    """How many of the prompt's tokens come from elsewhere, those of a local prefix hit included."""
    digest: str = ""
    """Of these tokens (push): the producer compares it with its own."""
    begun: bool = False
    """vLLM has given blocks, or needs none."""
    awaited: bool = False
    """vLLM waits for `finished_recving`."""
    computed: int = 0
    """Prompt tokens that this instance computed itself."""
    request_gone: bool = False
