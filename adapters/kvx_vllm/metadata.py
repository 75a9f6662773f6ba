"""What the two halves of the connector tell each other, free of vLLM.

vLLM carries a Plan from its scheduler to every worker with each step, and a WorkerReport back
with the step's output.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from kvx.core.events import EngineEvent
from kvx.core.model import Mode, Reason, Role


@frozen
class Ready:
    """Push: blocks of one request that are complete when this step's forward is over.

    `first` is per KV cache group the position in the request of the first block. Only with
    `last` may the final block of a group be partly filled. `prompt`: the digest of its `tokens` tokens.
    """

    transfer: str
    first: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    full: tuple[int, ...]
    last: bool
    tokens: int
    prompt: str = ""


@frozen
class Plan:
    """One step of the engine.

    `events` are put before the forward, in order. `loads` maps transfers that begin here and
    whose outcome vLLM awaits to their request; `refused` are requests whose load fails at once.
    """

    events: tuple[EngineEvent, ...] = ()
    ready: tuple[Ready, ...] = ()
    loads: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()


@frozen
class Ended:
    """A transfer's outcome over the ranks that have told it so far: ok only if it was ok on all of them."""

    ok: bool
    mode: Mode | None
    role: Role | None
    reason: Reason | None = None
    detail: str = ""
    bytes: int = 0
    seconds: float = 0.0

    def merged(self, other: Ended) -> Ended:
        first = self if not self.ok or other.ok else other
        return evolve(first, bytes=self.bytes + other.bytes, seconds=max(self.seconds, other.seconds))


@frozen
class WorkerReport:
    """Outcomes by transfer, and for each transfer how many ranks have released its blocks.

    `told`: requests of which this worker has told vLLM that their load is over.
    """

    ended: Mapping[str, Ended] = field(factory=dict)
    released: Mapping[str, int] = field(factory=dict)
    told: frozenset[str] = frozenset()

    def merged(self, other: WorkerReport) -> WorkerReport:
        ended = dict(self.ended)
        for transfer, end in other.ended.items():
            ended[transfer] = ended[transfer].merged(end) if transfer in ended else end
        names = {**self.released, **other.released}
        released = {name: self.released.get(name, 0) + other.released.get(name, 0) for name in names}
        return WorkerReport(ended, released, self.told | other.told)
