"""The connector's half in vLLM's scheduler: decides and remembers, moves nothing.

It turns what vLLM says of a request into engine events, which reach the worker's half with the
plan of the next step. Blocks that were handed to kvx are kept out of vLLM's pool by a reference
of their own, in both roles, until every rank has said Released: however a request ends, and
whatever vLLM frees (R1, R7).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import evolve

from kvx.config import Options
from kvx.core.events import Abort, Claim, EngineEvent, Expose, Stage
from kvx.core.model import BlockTable, Mode, Part, Reason, Role
from kvx.params import (
    Consume,
    Fault,
    Produce,
    ReadTicket,
    Wish,
    no_offer,
    offer,
    other_prompt,
    prompt_digest,
    read_params,
    told,
    used_before,
)
from kvx.used import UsedIds
from kvx_vllm.metadata import Ended, Plan, Ready, WorkerReport
from kvx_vllm.records import (
    PLAIN,
    BlockPins,
    EngineRequest,
    Group,
    Identity,
    Load,
    MakeTicket,
    Scheduled,
    Send,
    Traits,
    Transfer,
)
from kvx_vllm.tally import Levels, Tally

# vLLM configures handlers for loggers below "vllm" only.
logger = logging.getLogger("vllm.kvx.scheduler")


class SchedulerHalf:
    """See the module. Every method is called by vLLM's scheduler, in its one thread."""

    def __init__(
        self,
        options: Options,
        identity: Identity,
        groups: Sequence[Group],
        pins: BlockPins,
        read_ticket: ReadTicket,
        make_ticket: MakeTicket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._identity = identity
        self._groups = tuple(groups)
        self._pins = pins
        self._read_ticket = read_ticket
        self._make_ticket = make_ticket
        self._sends: dict[str, Send] = {}
        self._loads: dict[str, Load] = {}
        self._probes: set[str] = set()
        self._transfers: dict[str, Transfer] = {}
        self._unproven: dict[str, Transfer] = {}
        """Those that have failed and whose blocks somebody may still write to."""
        self._events: list[EngineEvent] = []
        self._begun: list[tuple[str, str]] = []
        self._refused: list[str] = []
        self._told: set[str] = set()
        # Longer than the endpoint remembers a finished transfer.
        self._used = UsedIds(4 * options.lease_s + options.transfer_max_s, clock)
        self.counters: Counter[str] = Counter()
        self.tally = Tally()

    # ------------------------------------------------------------ a request arrives

    def on_new_request(self, request: EngineRequest, traits: Traits = PLAIN) -> None:
        options = self._options
        wish = read_params(request.kv_transfer_params, options.mode, self._read_ticket, options.may_dial)
        self._remember(request, self._possible(wish, traits))

    def _possible(self, wish: Wish, traits: Traits) -> Wish:
        """What of it can be done for a request of this kind."""
        produce, consume = wish.produce, wish.consume
        if traits.obstacle is not None:
            fault = Fault(Reason.OTHER, traits.obstacle)
            if isinstance(consume, Consume):
                # Nobody will take the blocks: the producer need not wait for its lease.
                self._events.append(Abort(consume.transfer, ticket=consume.ticket, address=consume.address))
            return evolve(wish, produce=produce and fault, consume=consume and fault)
        if traits.siblings and produce is not None:
            produce = Fault(Reason.OTHER, "n is more than 1: a prefill leg has to ask for one sequence")
        # A ticket is good for one of them. The others compute by themselves, or find the blocks in the prefix cache.
        return evolve(wish, produce=produce, consume=consume if traits.first else None)

    def _remember(self, request: EngineRequest, wish: Wish) -> None:
        if wish.probe:
            self._probes.add(request.request_id)
        if wish.consume is not None:
            self._loads[request.request_id] = self._new_load(request, wish.consume)
        if wish.produce is not None:
            self._sends[request.request_id] = self._new_send(request, wish.produce)

    def _new_load(self, request: EngineRequest, wish: Consume | Fault) -> Load:
        prompt = request.num_prompt_tokens
        if isinstance(wish, Consume):
            wish = self._refusal(request, wish) or wish
        if isinstance(wish, Fault):
            logger.warning("kvx: request %s is not loaded: %s", request.request_id, wish.detail)
            self.tally.refused(wish.reason)
            return Load(wish, prompt, prompt)
        transfer = Transfer(wish.transfer, wish.mode, Role.CONSUMER, request.request_id, wish.ticket, wish.address)
        self._transfers[transfer.id] = transfer
        self._events.append(Claim(transfer.id, transfer.mode, ticket=wish.ticket, address=wish.address))
        push = wish.mode is Mode.PUSH
        tokens = self._handed(wish.load(prompt)) if push else min(wish.load(prompt), self._handed(prompt))
        return Load(transfer, prompt, tokens, _digest(request, tokens) if push else "")

    def _handed(self, tokens: int) -> int:
        """Of how many tokens the blocks are handed over, when these were computed.

        The consumer computes the last token again. Its window begins one token before that of the token
        after it, which is all that vLLM would keep: so with windows it is left out from the start.
        """
        return max(1, tokens - 1) if any(group.window for group in self._groups) else tokens

    def _refusal(self, request: EngineRequest, wish: Consume) -> Fault | None:
        if self._is_used(wish.transfer):
            return used_before(wish.transfer)
        if wish.prompt is not None:
            own = _digest(request, wish.load(request.num_prompt_tokens))
            # vLLM submits a refused request as prompt [0], only to abort it: that has to end the transfer.
            if wish.prompt != own and request.num_prompt_tokens > 1:
                return other_prompt()
        return None

    def _is_used(self, transfer: str) -> bool:
        """An id is good for one transfer: kvx answers each of them once."""
        return transfer in self._transfers or transfer in self._used

    def _new_send(self, request: EngineRequest, wish: Produce | Fault) -> Send:
        prompt = self._handed(request.num_prompt_tokens)
        ready = [group.begin(prompt) for group in self._groups]
        if isinstance(wish, Produce) and self._is_used(wish.transfer):
            wish = used_before(wish.transfer)
        if isinstance(wish, Fault):
            logger.warning("kvx: request %s is not offered: %s", request.request_id, wish.detail)
            self.tally.refused(wish.reason)
            return Send(wish, prompt, ready)
        if wish.mode is Mode.PULL:
            return Send(None, prompt, ready)
        transfer = Transfer(wish.transfer, Mode.PUSH, Role.PRODUCER, request.request_id)
        self._transfers[transfer.id] = transfer
        self._events.append(Claim(transfer.id, Mode.PUSH))
        return Send(transfer, prompt, ready, _digest(request, prompt))

    # ------------------------------------------------------------ a consumer's request gets its blocks

    def matched_tokens(self, request: EngineRequest, computed: int) -> tuple[int, bool]:
        """How many tokens beyond `computed` will come from elsewhere; they always come asynchronously.

        A faulty request asks for them too and fails at once, so that vLLM's own
        `kv_load_failure_policy` decides what becomes of it.
        """
        load = self._loads.get(request.request_id)
        if load is None or load.begun:
            return 0, False
        wanted = max(0, load.tokens - computed)
        return wanted, wanted > 0

    def blocks_allocated(self, request: EngineRequest, blocks: Sequence[Sequence[int]], external: int) -> None:
        """vLLM has placed the request: its last `external` tokens of those wanted come from elsewhere."""
        load = self._loads.get(request.request_id)
        if load is None or load.begun:
            return
        load.begun = True
        load.awaited = external > 0
        transfer = load.transfer
        # A transfer may have ended while its request waited for room: it will not be answered again.
        if isinstance(transfer, Fault) or transfer.end is not None:
            if external > 0:
                self._refused.append(request.request_id)
            return
        local = load.tokens - external
        # Only the prompt's blocks: vLLM may have allocated slots beyond it (look-ahead).
        end = [group.end(load.tokens) for group in self._groups]
        start = [max(local // group.block_size, group.begin(load.tokens)) for group in self._groups]
        first = tuple(start if external else end)
        table = BlockTable.of(*(ids[a:b] for ids, a, b in zip(blocks, first, end, strict=True)))
        self._hand_over(transfer, table)
        if transfer.mode is Mode.PULL:
            part = Part(None, first, table)
            self._events.append(Stage(transfer.id, Mode.PULL, part, True, load.tokens, transfer.ticket))
        else:
            place = (self._options.lease_s, transfer.address, load.digest)
            self._events.append(Expose(transfer.id, Mode.PUSH, table, first, load.tokens, *place))
        if external > 0:
            self._begun.append((transfer.id, request.request_id))

    def _hand_over(self, transfer: Transfer, table: BlockTable) -> None:
        if not table.empty:
            transfer.handed = True
            transfer.blocks += len(table)
            self._pins.hold(transfer.id, (block for group in table.groups for block in group))

    # ------------------------------------------------------------ a step

    def plan(self, scheduled: Iterable[Scheduled], preempted: Iterable[str]) -> Plan:
        """What the workers have to do in the step that vLLM has just scheduled."""
        for request_id in preempted:
            send = self._sends.get(request_id)
            # Nothing has left yet: it stages later. The last part is staged: it goes on, its blocks are pinned.
            if send is not None and send.pushing is not None and send.pushing.handed:
                self._drop(send, Reason.PREEMPTED)
        ready = []
        for item in scheduled:
            load = self._loads.get(item.request_id)
            if load is not None:
                load.computed += max(0, min(item.computed + item.scheduled, load.prompt) - item.computed)
            send = self._sends.get(item.request_id)
            if send is not None and (transfer := send.pushing) is not None:
                ready += self._ready(send, transfer, item)
        plan = Plan(tuple(self._events), tuple(ready), tuple(self._begun), tuple(self._refused))
        self._events, self._begun, self._refused = [], [], []
        return plan

    def _ready(self, send: Send, transfer: Transfer, item: Scheduled) -> list[Ready]:
        """Push: the blocks that this step completes, those of a local prefix hit with the first of them."""
        done = min(item.computed + item.scheduled, send.prompt)
        send.last = done == send.prompt
        first = tuple(send.ready)
        full = [max(done // group.block_size, at) for group, at in zip(self._groups, first, strict=True)]
        end = [group.end(done) for group in self._groups] if send.last else full
        if end == send.ready and not send.last:
            return []
        groups = tuple(tuple(group[a:b]) for group, a, b in zip(item.blocks, first, end, strict=True))
        send.ready = list(end)
        self._hand_over(transfer, BlockTable.of(*groups))
        whole = tuple(b - a for a, b in zip(first, full, strict=True))
        return [Ready(transfer.id, first, groups, whole, send.last, send.prompt, send.digest)]

    @property
    def busy(self) -> bool:
        """Whether the engine has to keep stepping: to tell the workers something, or to hear Released."""
        return bool(self._events or self._refused or self._pins.held)

    # ------------------------------------------------------------ what the workers report

    def loaded(self, finished: Iterable[str], failed: Iterable[str]) -> set[str]:
        """Those of vLLM's `finished_recving` that it really waits for: it dies of any other.

        Requests that kvx's workers have not told are another connector's, in a MultiConnector.
        """
        lost = set(failed)
        kept = set()
        for request_id in finished:
            load = self._loads.get(request_id)
            own = request_id in self._told
            self._told.discard(request_id)
            if load is None and not own:
                kept.add(request_id)
            if load is None or not load.awaited:
                continue
            load.awaited = False
            kept.add(request_id)
            if load.request_gone:
                del self._loads[request_id]
            elif request_id in lost:
                self.counters["failed_loads"] += 1
        return kept

    def report(self, report: WorkerReport) -> None:
        for name, end in report.ended.items():
            transfer = self._transfers.get(name)
            if transfer is None:
                continue
            if transfer.end is None:
                transfer.end = end
                self._count(transfer, end)
                if not end.ok:
                    self._failed(transfer)
            else:
                transfer.end = transfer.end.merged(end)
            if not transfer.end.ok and not transfer.freed:
                self._unproven[name] = transfer
        for name, ranks in report.released.items():
            transfer = self._transfers.get(name)
            if transfer is None:
                continue
            transfer.released += ranks
            if transfer.released >= self._identity.ranks:
                transfer.freed = True
                self._unproven.pop(name, None)
                self._pins.drop(name)
        self._told |= report.told
        for name in {**report.ended, **report.released}:
            self._forget(self._transfers.get(name))

    def _count(self, transfer: Transfer, end: Ended) -> None:
        self.counters[f"{transfer.role.value}_{'ok' if end.ok else 'failed'}"] += 1
        self.counters[f"{transfer.role.value}_bytes"] += end.bytes if end.ok else 0
        self.tally.ended(transfer.mode, transfer.role, end)
        kind = f"{transfer.mode.value} as {transfer.role.value}"
        if end.ok:
            text = "kvx: transfer %s of request %s ok: %s, %d bytes, %.4f s"
            logger.info(text, transfer.id, transfer.request_id, kind, end.bytes, end.seconds)
        else:
            reason = (end.reason or Reason.OTHER).value
            text = "kvx: transfer %s of request %s failed: %s, %s (%s)"
            logger.warning(text, transfer.id, transfer.request_id, kind, reason, end.detail)

    def _failed(self, transfer: Transfer) -> None:
        """A rank has failed: the others are stopped, and a producer that still stages is done with it."""
        send = self._sends.get(transfer.request_id)
        if send is not None and send.pushing is transfer:
            self._drop(send, Reason.ABORTED)
        elif self._identity.ranks > 1:
            self._events.append(Abort(transfer.id, Reason.ABORTED, "another rank failed"))

    def _drop(self, send: Send, reason: Reason) -> None:
        """Stage nothing more."""
        if (transfer := send.pushing) is not None:
            send.dropped = True
            self._events.append(Abort(transfer.id, reason))

    # ------------------------------------------------------------ a request ends

    def request_finished(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], *, completed: bool
    ) -> dict[str, Any] | None:
        """The request's answer parameters. `completed`: it ended as asked, not by an abort or error."""
        answer: dict[str, Any] = {}
        if request.request_id in self._probes:
            self._probes.discard(request.request_id)
            answer["kvx"] = self._probe(blocks)
        load = self._loads.get(request.request_id)
        if load is not None:
            answer["kvx"] = {**answer.get("kvx", {}), **self._finish_load(request.request_id, load)}
        send = self._sends.pop(request.request_id, None)
        if send is not None:
            loaded = answer.pop("kvx", None)
            answer |= self._finish_send(request, send, blocks, completed)
            if loaded is not None:
                answer["kvx"] = {**answer.get("kvx", {}), "loaded": loaded}
        return answer or None

    def _finish_load(self, request_id: str, load: Load) -> dict[str, Any]:
        transfer = load.transfer
        if isinstance(transfer, Fault):
            report: dict[str, Any] = {"ok": False, **transfer.answer()}
        else:
            if load.awaited or not load.begun:
                self._events.append(
                    Abort(transfer.id, Reason.ABORTED, ticket=transfer.ticket, address=transfer.address)
                )
            report = {"transfer": transfer.id, "mode": transfer.mode.value, **told(transfer.end)}
            transfer.request_gone = True
            self._forget(transfer)
        load.request_gone = True
        if not load.awaited:
            del self._loads[request_id]
        return {**report, "computed_tokens": load.computed}

    def _finish_send(
        self, request: EngineRequest, send: Send, blocks: Sequence[Sequence[int]], completed: bool
    ) -> dict[str, Any]:
        transfer = send.transfer
        if isinstance(transfer, Fault):
            return no_offer(transfer)
        if transfer is None:
            return self._offer(request, blocks) if completed else {}
        self._drop(send, Reason.ABORTED)
        if send.last and not completed and transfer.end is None:
            self._events.append(Abort(transfer.id, Reason.ABORTED))
        transfer.request_gone = True
        self._forget(transfer)
        return {"kvx": {"transfer": transfer.id, "mode": "push", **told(transfer.end)}}

    def _offer(self, request: EngineRequest, blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Pull: expose the blocks and answer with the ticket, in upstream's keys and kvx's own."""
        tokens = self._handed(request.num_computed_tokens)
        first = tuple(group.begin(tokens) for group in self._groups)
        end = (group.end(tokens) for group in self._groups)
        table = BlockTable.of(*(ids[a:b] for ids, a, b in zip(blocks, first, end, strict=True)))
        pins = self._pins
        if pins.held + len(table) > self._options.max_held_fraction * pins.total:
            detail = f"{pins.held} of {pins.total} blocks are held for transfers (option max_held_fraction)"
            logger.warning("kvx: request %s is not offered: %s", request.request_id, detail)
            self.tally.refused(Reason.NO_CAPACITY)
            return no_offer(Fault(Reason.NO_CAPACITY, detail))
        transfer = Transfer(secrets.token_hex(16), Mode.PULL, Role.PRODUCER, request.request_id, request_gone=True)
        self._transfers[transfer.id] = transfer
        self._hand_over(transfer, table)
        self._events.append(Expose(transfer.id, Mode.PULL, table, first, tokens, self._options.lease_s))
        ticket = self._make_ticket(transfer=transfer.id, first=first, blocks=table, tokens=tokens)
        return offer(ticket, prompt_digest(request.all_token_ids[:tokens]))

    def _probe(self, own_blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
        identity = self._identity
        return {
            "instance": self._options.instance,
            "epoch": identity.epoch,
            "addresses": [self._options.at_rank(rank).advertise for rank in range(identity.ranks)],
            "dp_rank": identity.dp_rank,
            "dp_size": identity.dp_size,
            "fingerprint": identity.fingerprint,
            "counters": dict(self.counters),
            "blocks": {
                "total": self._pins.total,
                "free": self._pins.free + sum(map(len, own_blocks)),
                "held": self._pins.held,
            },
            "open": len(self._transfers),
        }

    def take_stats(self) -> dict[str, Any] | None:
        """What has happened since the last call, for vLLM's metrics; None: nothing."""
        quarantined = sum(transfer.blocks for transfer in self._unproven.values())
        return self.tally.take(Levels(len(self._transfers), self._pins.held, quarantined))

    def _forget(self, transfer: Transfer | None) -> None:
        if transfer is not None and transfer.over:
            del self._transfers[transfer.id]
            self._unproven.pop(transfer.id, None)
            self._used.add(transfer.id)


def _digest(request: EngineRequest, tokens: int) -> str:
    return prompt_digest((request.prompt_token_ids or ())[:tokens])
