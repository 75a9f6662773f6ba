"""Joins the engine to kvx: what it tells becomes events, what kvx tells becomes tokens that were brought, or were not.

All of it runs in the engine's thread, and none of it waits. Every block that kvx knows of has one more use in the
pool until `Released`, however its request ends: a late write must never meet another request.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define, field

from abacus.engine import Pool, Request
from abacus.model import BLOCK, LAYERS, Model
from kvx.config import Options
from kvx.core.events import Abort, Claim, EngineEvent, Expose, Stage
from kvx.core.model import (
    BlockTable,
    CacheGroup,
    LayerSpec,
    Layout,
    Mode,
    Outcome,
    Part,
    Reason,
    Region,
    Released,
    Ticket,
)
from kvx.engine import EngineInstance
from kvx.instance import make_ticket, open_instance, read_ticket
from kvx.params import (
    Consume,
    Fault,
    Produce,
    no_offer,
    offer,
    other_prompt,
    prompt_digest,
    read_params,
    told,
    used_before,
)
from kvx.used import UsedIds

logger = logging.getLogger(__name__)


def describe(model: Model) -> tuple[Layout, Region]:
    """One array, so one region; layers lie behind one another in it, and blocks behind one another in a layer."""
    layer_bytes, block_bytes = model.cache.strides[:2]
    specs = [LayerSpec(f"layer {n}", 0, n * layer_bytes, block_bytes, block_bytes) for n in range(LAYERS)]
    group = CacheGroup(0, "full", BLOCK, tuple(specs), heads=1, total_heads=1)
    layout = Layout(f"abacus/{model.seed}", "uint32", "abacus", (group,), model.cache.shape[1])
    return layout, Region(0, model.cache.ctypes.data, model.cache.nbytes)


def join(model: Model, pool: Pool, settings: Mapping[str, Any]) -> Adapter:
    """The engine's `--mover`. Raises KvxError where these options cannot work."""
    options = Options.load(settings)
    layout, region = describe(model)
    instance = open_instance(options, layout, (region,), epoch=secrets.randbits(63))
    return Adapter(options, instance, pool)


@define(eq=False)
class Transfer:
    """One transfer, from its request to its outcome and the release of its blocks."""

    id: str
    mode: Mode
    tokens: int
    digest: str
    """Of these tokens of the prompt."""
    ticket: Ticket | None = None
    address: str | None = None
    kept: list[int] = field(factory=list)
    """Blocks that kvx knows of."""
    request: str = ""
    """Consumer: the engine waits for the outcome in this request's name."""
    staged: int = 0
    """Producer, push: blocks that were handed over."""
    closed: bool = False
    """No further part will be handed over."""
    gone: bool = False
    """Its request has ended."""
    outcome: Outcome | None = None


class Adapter:
    """An `abacus.engine.Mover`."""

    def __init__(self, options: Options, instance: EngineInstance, pool: Pool) -> None:
        self._options, self._instance, self._pool = options, instance, pool
        self._transfers: dict[str, Transfer] = {}
        self._loads: dict[str, Transfer | Fault] = {}
        self._sends: dict[str, Transfer | Fault | None] = {}
        """By request; None: in pull the transfer is drawn when the request has ended."""
        self._probes: set[str] = set()
        self._computed: dict[str, int] = {}
        self._used = UsedIds(4 * options.lease_s + options.transfer_max_s, time.monotonic)

    # ------------------------------------------------------------ a request arrives

    def accepted(self, request: Request) -> None:
        options = self._options
        wish = read_params(request.params, options.mode, partial(read_ticket, options), options.may_dial)
        if wish.probe:
            self._probes.add(request.id)
        if wish.consume is not None:
            self._loads[request.id] = self._begin(request, wish.consume)
            self._computed[request.id] = 0
        if wish.produce is not None:
            later = isinstance(wish.produce, Produce) and wish.produce.mode is Mode.PULL
            self._sends[request.id] = None if later else self._begin(request, wish.produce)

    def _begin(self, request: Request, wish: Consume | Produce | Fault) -> Transfer | Fault:
        """Claim it at once: its peer may be waiting, and the engine's queue may be long."""
        tokens = wish.load(len(request.prompt)) if isinstance(wish, Consume) else len(request.prompt)
        digest = prompt_digest(request.prompt[:tokens])
        if isinstance(wish, Consume) and wish.prompt not in (None, digest):
            wish = other_prompt()
        if not isinstance(wish, Fault) and (wish.transfer in self._transfers or wish.transfer in self._used):
            wish = used_before(wish.transfer)
        if isinstance(wish, Fault):
            logger.warning("kvx: nothing is transferred for request %s: %s", request.id, wish.detail)
            return wish
        transfer = Transfer(wish.transfer, wish.mode, tokens, digest)
        if isinstance(wish, Consume):
            transfer.ticket, transfer.address, transfer.closed = wish.ticket, wish.address, True
        self._transfers[transfer.id] = transfer
        self._put(Claim(transfer.id, transfer.mode, transfer.ticket, transfer.address))
        return transfer

    # ------------------------------------------------------------ a consumer has blocks

    def placed(self, request: Request) -> int:
        """In pull these blocks are read into, in push the producer may write them."""
        load = self._loads.get(request.id)
        if not isinstance(load, Transfer) or load.request or load.outcome is not None:
            return 0
        load.request = request.id
        table = self._hand_over(load, request.blocks[: _blocks(load.tokens)])
        if load.mode is Mode.PULL:
            self._put(Stage(load.id, Mode.PULL, Part(None, (0,), table), True, load.tokens, load.ticket))
        else:
            owner = (self._options.lease_s, load.address, load.digest)
            self._put(Expose(load.id, Mode.PUSH, table, (0,), load.tokens, *owner))
        return load.tokens

    # ------------------------------------------------------------ a producer pushes

    def computed(self, step: Sequence[tuple[Request, int, int]]) -> None:
        """The full blocks of this step leave while the next one computes; with the prompt's end the rest."""
        events: list[EngineEvent] = []
        for request, start, stop in step:
            if request.id in self._computed:
                self._computed[request.id] += max(0, min(stop, len(request.prompt)) - start)
            send = self._sends.get(request.id)
            if not isinstance(send, Transfer) or send.closed:
                continue
            send.closed = stop >= send.tokens
            end = _blocks(send.tokens) if send.closed else stop // BLOCK
            if send.closed or end > send.staged:
                table = self._hand_over(send, request.blocks[send.staged : end])
                part = Part(None, (send.staged,), table)
                events.append(Stage(send.id, Mode.PUSH, part, send.closed, send.tokens, prompt=send.digest))
                send.staged = end
        self._put(*events)

    # ------------------------------------------------------------ a request ends

    def finished(self, request: Request, *, completed: bool) -> Mapping[str, Any] | None:
        kvx: dict[str, Any] = {}
        if request.id in self._probes:
            self._probes.discard(request.id)
            kvx |= self._probe()
        if (load := self._loads.pop(request.id, None)) is not None:
            if isinstance(load, Transfer) and load.outcome is None:
                self._put(Abort(load.id, Reason.ABORTED, "", load.ticket, load.address))
            kvx |= {**self._report(load), "computed_tokens": self._computed.pop(request.id)}
        answer: dict[str, Any] = {"kvx": kvx} if kvx else {}
        if request.id in self._sends:
            send = self._sends.pop(request.id)
            if send is None:
                return answer | self._offer(request) if completed else answer
            if isinstance(send, Transfer) and not (send.closed and (completed or send.outcome)):
                self._stop(send)
            answer |= no_offer(send) if isinstance(send, Fault) else {"kvx": self._report(send)}
        return answer or None

    def _report(self, transfer: Transfer | Fault) -> dict[str, Any]:
        """What an answer says of it; from now on its request is gone."""
        if isinstance(transfer, Fault):
            return {"ok": False, **transfer.answer()}
        transfer.gone = True
        self._forget(transfer)
        return {"transfer": transfer.id, "mode": transfer.mode.value, **told(transfer.outcome)}

    def _offer(self, request: Request) -> dict[str, Any]:
        """Pull: whoever shows the ticket may read what this request has computed."""
        options, blocks = self._options, request.blocks[: _blocks(request.computed)]
        held = sum(len(transfer.kept) for transfer in self._transfers.values())
        if held + len(blocks) > options.max_held_fraction * self._pool.total:
            return no_offer(Fault(Reason.NO_CAPACITY, f"{held} of {self._pool.total} blocks are held for transfers"))
        known = (*request.prompt, *request.output)[: request.computed]
        transfer = Transfer(secrets.token_hex(16), Mode.PULL, len(known), prompt_digest(known), closed=True, gone=True)
        self._transfers[transfer.id] = transfer
        table = self._hand_over(transfer, blocks)
        self._put(Expose(transfer.id, Mode.PULL, table, (0,), transfer.tokens, options.lease_s))
        ticket = make_ticket(
            options,
            epoch=self._instance.info.epoch,
            transfer=transfer.id,
            first=(0,),
            blocks=table,
            tokens=transfer.tokens,
            lease_s=options.lease_s,
        )
        return offer(ticket, transfer.digest)

    def _probe(self) -> dict[str, Any]:
        info = self._instance.info
        return {
            "instance": info.instance,
            "epoch": info.epoch,
            "addresses": list(info.addresses),
            "dp_rank": info.layout.dp_rank,
            "dp_size": info.layout.dp_size,
            "fingerprint": info.layout.fingerprint(),
        }

    # ------------------------------------------------------------ what kvx tells

    def poll(self) -> list[tuple[str, bool]]:
        ended = []
        for news in self._instance.news():
            match news:
                case Released():
                    if transfer := self._transfers.get(news.transfer):
                        self._pool.drop(transfer.kept)
                        transfer.kept = []
                        self._forget(transfer)
                case Outcome():
                    if transfer := self._transfers.get(news.transfer):
                        ended += self._ended(transfer, news)
        return ended

    def _ended(self, transfer: Transfer, outcome: Outcome) -> list[tuple[str, bool]]:
        """It may end before the engine has blocks for it: `placed` sees that."""
        transfer.outcome = outcome
        if not outcome.ok:
            logger.warning("kvx: transfer %s failed: %s", transfer.id, outcome.detail)
            if not transfer.closed:
                self._stop(transfer)
        self._forget(transfer)
        return [(transfer.request, outcome.ok)] if transfer.request else []

    def _stop(self, send: Transfer) -> None:
        """No further part follows; kvx owes the release of those that it has."""
        send.closed = True
        self._put(Abort(send.id, Reason.ABORTED))

    def _forget(self, transfer: Transfer) -> None:
        if transfer.gone and transfer.outcome is not None and not transfer.kept:
            del self._transfers[transfer.id]
            self._used.add(transfer.id)

    @property
    def busy(self) -> bool:
        return bool(self._transfers)

    def close(self) -> None:
        self._instance.close()

    def _put(self, *events: EngineEvent) -> None:
        if events:
            self._instance.put(events)

    def _hand_over(self, transfer: Transfer, blocks: list[int]) -> BlockTable:
        """From now on kvx has a use for them too."""
        self._pool.keep(blocks)
        transfer.kept += blocks
        return BlockTable.of(blocks)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
