"""Joins the reference engine to kvx: the engine's connector on one side, `kvx.engine` on the other.

What the engine tells becomes an event for kvx; what kvx tells becomes a load that is over, or
blocks that go back to the pool. All of it runs in the engine's thread and none of it waits (R12).
Blocks that kvx knows of are held by a reference of their own, in both roles, until `Released`:
however a request ends, and whatever the engine frees (R1, R7).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

from kvx.config import Options
from kvx.core.errors import KvxError
from kvx.core.events import Abort, Claim, EngineEvent, Expose, Stage
from kvx.core.model import BlockTable, Mode, Offered, Outcome, Part, Reason, Released, Role
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
from kvx_reference.engine.cache import BlockPool
from kvx_reference.engine.connector import ConnectorError, Loads, Parts
from kvx_reference.engine.request import Request, Scheduled
from kvx_reference.layout import describe, layer_name
from kvx_reference.transfers import Load, Send, Transfer

logger = logging.getLogger("kvx_reference.adapter")

_STARVED_S = 1.0
"""How long the engine may go without blocks before a transfer that waits for its consumer is given up. Seconds."""


def open_connector(parts: Parts, settings: Mapping[str, Any]) -> KvxConnector:
    """The engine's `--connector`. `settings` are kvx's options; raises ConnectorError where they cannot work."""
    try:
        options = Options.load(settings)
        layout, region = describe(parts.config, parts.cache)
        instance = open_instance(options, layout, (region,), epoch=secrets.randbits(63))
    except KvxError as error:
        raise ConnectorError(f"kvx cannot start: {error}") from error
    logger.info("kvx: %s serves at %s", instance.info.instance, instance.info.address)
    return KvxConnector(options, instance, parts.pool, parts.cache.block_size)


class KvxConnector:
    """A `kvx_reference.engine.connector.Connector`. `block_size` is in tokens."""

    def __init__(
        self,
        options: Options,
        instance: EngineInstance,
        pool: BlockPool,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._instance = instance
        self._pool = pool
        self._block_size = block_size
        self._transfers: dict[str, Transfer] = {}
        self._loads: dict[str, Load] = {}
        self._sends: dict[str, Send] = {}
        self._probes: set[str] = set()
        self._refused: list[tuple[str, str]] = []
        self._clock = clock
        self._starving_since: float | None = None
        # Longer than kvx remembers a finished transfer.
        self._used = UsedIds(4 * options.lease_s + options.transfer_max_s, clock)
        self.counters: Counter[str] = Counter()

    # -------------------------------------------------- a request arrives

    def on_request(self, request: Request) -> None:
        options = self._options
        wish = read_params(request.params, options.mode, partial(read_ticket, options), options.may_dial)
        if wish.probe:
            self._probes.add(request.id)
        if wish.consume is not None:
            loaded, tokens = self._begin(request, wish.consume), len(request.prompt)
            tokens = wish.consume.load(tokens) if isinstance(wish.consume, Consume) else tokens
            self._loads[request.id] = Load(loaded, tokens, prompt_digest(request.prompt[:tokens]))
        if wish.produce is not None:
            late = isinstance(wish.produce, Produce) and wish.produce.mode is Mode.PULL
            sent = None if late else self._begin(request, wish.produce)
            self._sends[request.id] = Send(sent, "" if late else prompt_digest(request.prompt))

    def _begin(self, request: Request, wish: Consume | Produce | Fault) -> Transfer | Fault:
        """Claim a transfer as soon as its request is here: its peer may be waiting already."""
        if not isinstance(wish, Fault) and (wish.transfer in self._transfers or wish.transfer in self._used):
            wish = used_before(wish.transfer)
        if isinstance(wish, Consume) and wish.prompt is not None:
            own = prompt_digest(request.prompt[: wish.load(len(request.prompt))])
            wish = wish if wish.prompt == own else other_prompt()
        if isinstance(wish, Fault):
            logger.warning("kvx: nothing is transferred for request %s: %s", request.id, wish.detail)
            return wish
        if isinstance(wish, Consume):
            transfer = Transfer(wish.transfer, wish.mode, Role.CONSUMER, request.id, wish.ticket, wish.address)
        else:
            transfer = Transfer(wish.transfer, wish.mode, Role.PRODUCER, request.id)
        self._transfers[transfer.id] = transfer
        self._put(Claim(transfer.id, transfer.mode, ticket=transfer.ticket, address=transfer.address))
        return transfer

    # -------------------------------------------------- consumer: blocks for what comes

    def external_tokens(self, request: Request, computed: int) -> int:
        load = self._loads.get(request.id)
        return 0 if load is None or load.begun else max(0, load.tokens - computed)

    def allocated(self, request: Request, external: int) -> None:
        """In pull these blocks are read into; in push they are opened to the producer, which writes."""
        load = self._loads.get(request.id)
        if load is None or load.begun:
            return
        load.begun = True
        transfer = load.transfer
        if isinstance(transfer, Fault) or transfer.outcome is not None:  # it may have failed while this one was queued
            if external:
                detail = transfer.detail if isinstance(transfer, Fault) else str(told(transfer.outcome).get("detail"))
                self._refused.append((request.id, detail))
            return
        load.awaited = external > 0
        end = self._blocks(load.tokens)
        first = (load.tokens - external) // self._block_size if external else end
        table = self._hand_over(transfer, request.blocks[first:end])
        if transfer.mode is Mode.PULL:
            part = Part(None, (first,), table)
            self._put(Stage(transfer.id, Mode.PULL, part, True, load.tokens, transfer.ticket))
        else:
            place = (self._options.lease_s, transfer.address, load.digest)
            self._put(Expose(transfer.id, Mode.PUSH, table, (first,), load.tokens, *place))

    # -------------------------------------------------- producer: push, layer by layer and chunk by chunk

    def layer_computed(self, layer: int, step: Sequence[Scheduled]) -> None:
        """The full blocks of this step may leave for this layer, while the next ones are computed."""
        self._starving_since = None
        events: list[EngineEvent] = []
        for item, send, transfer in self._pushed(step):
            full = min(item.stop, len(item.request.prompt)) // self._block_size
            if full > send.staged:
                blocks = item.request.blocks[send.staged : full]
                table = self._hand_over(transfer, blocks) if layer == 0 else BlockTable.of(blocks)
                part = Part((layer_name(layer),), (send.staged,), table)
                prompt = len(item.request.prompt)
                events.append(Stage(transfer.id, Mode.PUSH, part, False, prompt, prompt=send.digest))
        self._put(*events)

    def step_done(self, step: Sequence[Scheduled]) -> None:
        """At the prompt's end what is left of it: at most one partly filled block, in all layers."""
        events: list[EngineEvent] = []
        for item, send, transfer in self._pushed(step):
            prompt = len(item.request.prompt)
            send.staged = min(item.stop, prompt) // self._block_size
            if item.stop >= prompt:
                send.closed = True
                table = self._hand_over(transfer, item.request.blocks[send.staged : self._blocks(prompt)])
                part = Part(None, (send.staged,), table)
                events.append(Stage(transfer.id, Mode.PUSH, part, True, prompt, prompt=send.digest))
        self._put(*events)
        for item in step:
            if (load := self._loads.get(item.request.id)) is not None:
                load.computed += max(0, min(item.stop, len(item.request.prompt)) - item.start)

    def _pushed(self, step: Sequence[Scheduled]) -> list[tuple[Scheduled, Send, Transfer]]:
        found = ((item, self._sends.get(item.request.id)) for item in step)
        return [(item, send, transfer) for item, send in found if send is not None and (transfer := send.pushing)]

    def preempted(self, request: Request) -> None:
        """Parts that have left cannot be taken back. Without any the transfer just begins later."""
        send = self._sends.get(request.id)
        if send is not None and send.staged:
            self._stop(send, Reason.PREEMPTED)

    def _stop(self, send: Send, reason: Reason) -> None:
        if (transfer := send.pushing) is not None:
            send.closed = True
            self._put(Abort(transfer.id, reason))

    def starving(self) -> None:
        """Instances can wait for one another: this one for a consumer to take its blocks, the consumer, whose own
        blocks are promised, for prompts that wait here for blocks. One transfer less ends it: the oldest that nobody
        is known to take.
        """
        now = self._clock()
        if self._starving_since is None:
            self._starving_since = now
        elif now - self._starving_since > _STARVED_S:
            self._starving_since = now
            offered = (t for t in self._transfers.values() if t.role is Role.PRODUCER and t.held)
            if (oldest := next((t for t in offered if not (t.granted or t.outcome)), None)) is not None:
                self._put(Abort(oldest.id, Reason.PREEMPTED, "its blocks were needed here before anyone took them"))

    # -------------------------------------------------- a request ends

    def finished(self, request: Request, *, completed: bool) -> Mapping[str, Any] | None:
        kvx: dict[str, Any] = {}
        if request.id in self._probes:
            self._probes.discard(request.id)
            kvx |= self._probe(request)
        if (load := self._loads.pop(request.id, None)) is not None:
            kvx |= self._finish_load(load)
        answer: dict[str, Any] = {"kvx": kvx} if kvx else {}
        if (send := self._sends.pop(request.id, None)) is not None:
            answer |= self._finish_send(request, send, completed)
        return answer or None

    def _finish_load(self, load: Load) -> dict[str, Any]:
        transfer = load.transfer
        if isinstance(transfer, Fault):
            return {"ok": False, **transfer.answer(), "computed_tokens": load.computed}
        if load.awaited or not load.begun:
            self._put(Abort(transfer.id, Reason.ABORTED, ticket=transfer.ticket, address=transfer.address))
        self._leave(transfer)
        report = {"transfer": transfer.id, "mode": transfer.mode.value, **told(transfer.outcome)}
        return {**report, "computed_tokens": load.computed}

    def _finish_send(self, request: Request, send: Send, completed: bool) -> dict[str, Any]:
        transfer = send.transfer
        if isinstance(transfer, Fault):
            return no_offer(transfer)
        if transfer is None:
            return self._offer(request) if completed else {}
        if send.pushing or not (completed or transfer.outcome):
            send.closed = True
            self._put(Abort(transfer.id, Reason.ABORTED))
        self._leave(transfer)
        return {"kvx": {"transfer": transfer.id, "mode": transfer.mode.value, **told(transfer.outcome)}}

    def _offer(self, request: Request) -> dict[str, Any]:
        """Pull: whoever shows the ticket may read what this request has computed."""
        blocks = request.blocks[: self._blocks(request.computed)]
        options, pool = self._options, self._pool
        if pool.held + len(blocks) > options.max_held_fraction * pool.total:
            detail = f"{pool.held} of {pool.total} blocks are held for transfers (option max_held_fraction)"
            return no_offer(Fault(Reason.NO_CAPACITY, detail))
        transfer = Transfer(secrets.token_hex(16), Mode.PULL, Role.PRODUCER, request.id, request_gone=True)
        self._transfers[transfer.id] = transfer
        table, tokens, lease_s = self._hand_over(transfer, blocks), request.computed, options.lease_s
        self._put(Expose(transfer.id, Mode.PULL, table, (0,), tokens, lease_s))
        epoch = self._instance.info.epoch
        ticket = make_ticket(
            options, epoch=epoch, transfer=transfer.id, first=(0,), blocks=table, tokens=tokens, lease_s=lease_s
        )
        known = (*request.prompt, *request.output)
        return offer(ticket, prompt_digest(known[:tokens]))

    # -------------------------------------------------- what kvx tells

    def poll(self) -> Loads:
        done: list[str] = []
        failed, self._refused = self._refused, []
        for news in self._instance.news():
            match news:
                case Released():
                    self._release(news.transfer)
                case Outcome():
                    if request := self._ended(news):
                        done += [request] if news.ok else []
                        failed += [] if news.ok else [(request, news.detail)]
                case Offered():
                    if (transfer := self._transfers.get(news.grant.transfer)) is not None:
                        transfer.granted = True
                case _:
                    assert_never(news)
        return Loads(tuple(done), tuple(failed))

    def _ended(self, outcome: Outcome) -> str | None:
        """The request that waits for this outcome, if there is one."""
        transfer = self._transfers.get(outcome.transfer)
        if transfer is None:
            return None
        transfer.outcome = outcome
        role, moved = transfer.role.value, outcome.bytes if outcome.ok else 0
        self.counters.update({f"{role}_{'ok' if outcome.ok else 'failed'}": 1, f"{role}_bytes": moved})
        if not outcome.ok:
            logger.warning("kvx: transfer %s failed: %s", transfer.id, outcome.detail)
            if (send := self._sends.get(transfer.request)) is not None and send.transfer is transfer:
                self._stop(send, Reason.ABORTED)
        self._forget(transfer)
        load = self._loads.get(transfer.request)
        if load is None or load.transfer is not transfer or not load.awaited:
            return None
        load.awaited = False
        return transfer.request

    def _release(self, name: str) -> None:
        self._pool.drop(name)
        if (transfer := self._transfers.get(name)) is not None:
            transfer.held = False
            self._forget(transfer)

    def _leave(self, transfer: Transfer) -> None:
        transfer.request_gone = True
        self._forget(transfer)

    def _forget(self, transfer: Transfer) -> None:
        if transfer.over:
            del self._transfers[transfer.id]
            self._used.add(transfer.id)

    # -------------------------------------------------- small things

    @property
    def busy(self) -> bool:
        return bool(self._transfers or self._refused)

    def close(self) -> None:
        self._instance.close()

    def _put(self, *events: EngineEvent) -> None:
        if events:
            self._instance.put(events)

    def _hand_over(self, transfer: Transfer, blocks: Sequence[int]) -> BlockTable:
        if blocks:
            transfer.held = True
            self._pool.hold(transfer.id, blocks)
        return BlockTable.of(blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _probe(self, request: Request) -> dict[str, Any]:
        info, pool = self._instance.info, self._pool
        return {
            "instance": info.instance,
            "epoch": info.epoch,
            "addresses": list(info.addresses),
            "dp_rank": info.layout.dp_rank,
            "dp_size": info.layout.dp_size,
            "fingerprint": info.layout.fingerprint(),
            "counters": dict(self.counters),
            "blocks": {"total": pool.total, "free": pool.free + len(request.blocks), "held": pool.held},
            "open": len(self._transfers),
        }
