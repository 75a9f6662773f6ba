"""The adapter alone: a real small engine on one side, a recorded kvx on the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import define, field

from kvx.config import Options
from kvx.core.events import Abort, Claim, Expose, Stage
from kvx.core.layout import Coverage
from kvx.core.model import BlockTable, Grant, Mode, Offered, Outcome, Peer, Reason, Released
from kvx.instance import make_ticket
from kvx.params import prompt_digest
from kvx.testing import FakeInstance
from kvx_reference.adapter import KvxConnector
from kvx_reference.engine.connector import Parts
from kvx_reference.engine.engine import Engine, Settings
from kvx_reference.engine.model import Model
from kvx_reference.engine.request import Finish, Output, Request, Status
from kvx_reference.engine.sampling import Sampling
from kvx_reference.layout import describe

FROM = "127.0.0.1:5800"
BLOCK = 4


@define(eq=False)
class Bench:
    """An engine of 40 blocks whose kvx does nothing by itself."""

    model: Model
    options: Options = field(factory=Options)
    sizes: Mapping[str, Any] = field(factory=dict)
    engine: Engine = field(init=False)
    kvx: FakeInstance = field(init=False)
    outputs: dict[str, Output] = field(factory=dict)
    clock: Callable[[], float] = time.monotonic

    def __attrs_post_init__(self) -> None:
        def connect(parts: Parts, settings: Mapping[str, Any]) -> KvxConnector:
            layout, _ = describe(parts.config, parts.cache)
            self.kvx = FakeInstance(layout, epoch=77)
            return KvxConnector(self.options, self.kvx, parts.pool, parts.cache.block_size, self.clock)

        sizes = {"blocks": 40, "block_size": BLOCK, "step_tokens": 16, **self.sizes}
        self.engine = Engine(self.model, Settings(**sizes), connect)

    def add(self, name: str, prompt: int, tokens: int = 1, **params: Any) -> Request:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        request = Request(name, self.words(name, prompt), sampling, params=params or None, salt=name)
        self.engine.add(request)
        return request

    @staticmethod
    def words(name: str, prompt: int) -> tuple[int, ...]:
        return tuple(3 + (7 * at + 11 * len(name) * prompt) % 190 for at in range(prompt))

    def steps(self, count: int = 30) -> None:
        for _ in range(count):
            for output in self.engine.step():
                if output.finish:
                    self.outputs[output.request] = output

    def answer(self, name: str) -> Mapping[str, Any]:
        return self.outputs[name].params or {}

    def blocks(self) -> tuple[int, int]:
        """Free and held ones."""
        return self.engine.pool.free, self.engine.pool.held

    def ticket(self, tokens: int) -> str:
        table = BlockTable.of(range(-(-tokens // BLOCK)))
        place = {"transfer": "pulled", "first": (0,), "blocks": table, "tokens": tokens}
        return make_ticket(Options(listen=FROM), epoch=5, lease_s=30, **place)  # type: ignore[arg-type]


@pytest.fixture
def bench(model: Model) -> Bench:
    return Bench(model)


def push_out(transfer: str = "t") -> dict[str, Any]:
    return {"do_remote_decode": True, "kvx": {"mode": "push", "transfer": transfer}}


def push_in(transfer: str = "t") -> dict[str, Any]:
    return {"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": transfer, "from": FROM}}


def grant(transfer: str) -> Grant:
    return Grant(transfer, Peer("d", 0), 1, 0, Mode.PUSH, (0,), BlockTable.of([0]), 50, 30.0, FROM)


# ------------------------------------------------------------ producer, push


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 16, 17, 31, 33])
def test_a_prompt_is_staged_once_and_wholly(bench: Bench, prompt: int) -> None:
    bench.add("a", prompt, **push_out())
    bench.steps()
    claim, *stages = bench.kvx.events
    assert claim == Claim("t", Mode.PUSH)
    assert all(isinstance(stage, Stage) and stage.tokens == prompt for stage in stages)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]  # type: ignore[union-attr]
    coverage = Coverage(bench.kvx.info.layout, prompt)
    for stage in stages:
        coverage.add(stage.part)  # type: ignore[union-attr]
    assert coverage.first() == (0,)
    assert len(coverage._groups[0]) == -(-prompt // BLOCK)
    # One batch per layer and chunk, and one for the end.
    chunks = sum(1 for start in range(0, prompt, 16) if min(start + 16, prompt) // BLOCK > start // BLOCK)
    assert len(bench.kvx.batches) == 1 + 3 * chunks + 1


def test_blocks_stay_held_after_the_request_until_they_are_released(bench: Bench) -> None:
    bench.add("a", 30, **push_out())
    bench.steps()
    assert bench.answer("a") == {"kvx": {"transfer": "t", "mode": "push", "ok": None}}
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Outcome("t", True, bytes=800, seconds=0.5), Released("t"))
    bench.steps(1)
    assert bench.blocks() == (40, 0)
    assert not bench.engine.is_waiting


def test_a_prefix_that_was_here_is_staged_too(bench: Bench) -> None:
    bench.add("a", 30)
    bench.steps()
    bench.add("a", 30, **push_out())
    bench.steps()
    coverage = Coverage(bench.kvx.info.layout, 30)
    for event in bench.kvx.events:
        if isinstance(event, Stage):
            coverage.add(event.part)
    assert coverage.first() == (0,)
    assert len([event for event in bench.kvx.events if isinstance(event, Stage)]) == 3 + 1


def test_an_abort_before_the_last_part_is_told_and_holds_what_has_left(bench: Bench) -> None:
    bench.add("a", 60, **push_out())
    bench.steps(2)
    bench.engine.end("a", Finish.ABORT)
    assert bench.kvx.events[-1] == Abort("t", Reason.ABORTED)
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Outcome("t", False, Reason.ABORTED))
    bench.steps(1)
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Released("t"))
    bench.steps(1)
    assert bench.blocks() == (40, 0)


def test_a_transfer_that_fails_is_staged_no_further(bench: Bench) -> None:
    bench.add("a", 60, **push_out())
    bench.steps(1)
    bench.kvx.tell(Outcome("t", False, Reason.PEER_LOST, "gone"))
    bench.steps()
    events = bench.kvx.events
    assert events[-1] == Abort("t", Reason.ABORTED)
    assert len([event for event in events if isinstance(event, Stage)]) == 3
    told = bench.answer("a")["kvx"]
    assert (told["ok"], told["reason"], told["detail"]) == (False, "peer_lost", "gone")


def test_preempted_after_parts_have_left_it_aborts_and_before_it_stages_later(model: Model) -> None:
    bench = Bench(model, sizes={"blocks": 15})
    for name, transfer in (("a", "t1"), ("bb", "t2")):
        bench.add(name, 30, 1, **push_out(transfer))
    first = bench.add("ccc", 10, 30)
    bench.steps(1)
    assert first.status is Status.WAITING
    staged = [event.transfer for event in bench.kvx.events if isinstance(event, Stage)]
    assert set(staged) == {"t1"}
    connector = bench.engine._connector
    request = bench.engine.scheduler.running[0]
    connector.preempted(request)  # type: ignore[union-attr]
    assert bench.kvx.events[-1] == Abort("t1", Reason.PREEMPTED)
    connector.preempted(bench.engine.scheduler.waiting[0])  # type: ignore[union-attr]
    assert bench.kvx.events[-1] == Abort("t1", Reason.PREEMPTED)


# ------------------------------------------------------------ producer, pull


def test_a_finished_prefill_is_exposed_and_answers_with_a_ticket(bench: Bench) -> None:
    bench.add("a", 30, do_remote_decode=True, do_remote_prefill=False, remote_host=None)
    bench.steps()
    (expose,) = bench.kvx.events
    assert isinstance(expose, Expose)
    assert (expose.mode, expose.tokens, expose.first, len(expose.blocks)) == (Mode.PULL, 30, (0,), 8)
    answer = bench.answer("a")
    assert answer["do_remote_prefill"] is True
    assert answer["kvx"]["ticket"]
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Outcome(expose.transfer, False, Reason.LEASE_ENDED), Released(expose.transfer))
    bench.steps(1)
    assert bench.blocks() == (40, 0)


def test_an_aborted_prefill_offers_nothing(bench: Bench) -> None:
    bench.add("a", 30, do_remote_decode=True)
    bench.steps(1)
    ended = bench.engine.end("a", Finish.ABORT)
    assert ended is not None
    assert ended.params is None
    assert bench.kvx.events == []
    assert bench.blocks() == (40, 0)


def test_no_more_is_held_than_is_allowed(model: Model) -> None:
    bench = Bench(model, Options(max_held_fraction=0.25))
    for name in ("a", "bb"):
        bench.add(name, 30, do_remote_decode=True)
    bench.steps()
    told = sorted([bench.answer("a"), bench.answer("bb")], key=lambda answer: answer["do_remote_prefill"])
    assert told[0]["kvx"]["reason"] == "no_capacity"
    assert told[1]["kvx"]["ticket"]
    assert bench.engine.pool.held == 8


@pytest.mark.parametrize("mode", Mode)
def test_an_engine_without_blocks_gives_up_what_nobody_takes(model: Model, mode: Mode) -> None:
    """Oldest first, one each second, and none that its consumer is known to take."""
    now = [100.0]
    bench = Bench(model, Options(max_held_fraction=1.0), clock=lambda: now[0])
    for name in ("1", "22", "333"):
        bench.add(name, 50, **(push_out(name) if mode is Mode.PUSH else {"do_remote_decode": True}))
        bench.steps(5)
    transfers = [event.transfer for event in bench.kvx.events if isinstance(event, Claim | Expose)]
    if mode is Mode.PUSH:
        bench.kvx.tell(Offered(grant(transfers[0])))
    wanted = transfers[1:] if mode is Mode.PUSH else transfers
    bench.add("4444", 60)
    for moment, count in ((100.0, 0), (100.9, 0), (101.1, 1), (101.2, 1), (102.2, 2), (102.3, 2)):
        now[0] = moment
        bench.steps(1)
        aborts = [event.transfer for event in bench.kvx.events if isinstance(event, Abort)]
        assert aborts == wanted[:count]
        bench.kvx.tell(*(Outcome(transfer, False, Reason.PREEMPTED) for transfer in aborts))
    bench.kvx.tell(*(Released(transfer) for transfer in transfers))
    bench.steps()
    assert bench.outputs["4444"].finish is Finish.LENGTH


# ------------------------------------------------------------ consumer


@pytest.mark.parametrize("mode", Mode)
def test_a_load_begins_when_blocks_are_there_and_ends_with_its_outcome(bench: Bench, mode: Mode) -> None:
    pull = {"do_remote_prefill": True, "kvx": {"ticket": bench.ticket(30)}}
    transfer = "pulled" if mode is Mode.PULL else "t"
    request = bench.add("a", 30, 4, **(pull if mode is Mode.PULL else push_in()))
    (claim,) = bench.kvx.events
    assert isinstance(claim, Claim)
    assert (claim.transfer, claim.ticket is not None) == (transfer, mode is Mode.PULL)
    bench.steps(3)
    begun = bench.kvx.events[1]
    assert isinstance(begun, Stage if mode is Mode.PULL else Expose)
    blocks = begun.part.blocks if isinstance(begun, Stage) else begun.blocks  # type: ignore[union-attr]
    assert blocks == BlockTable.of(request.blocks)
    assert len(bench.kvx.events) == 2
    bench.kvx.tell(Outcome(transfer, True, bytes=999, seconds=0.25))
    bench.steps()
    told = bench.answer("a")["kvx"]
    assert told == {"transfer": transfer, "mode": mode.value, "ok": True, "bytes": 999} | {
        "seconds": 0.25,
        "computed_tokens": 1,
    }
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Released(transfer))
    bench.steps(1)
    assert bench.blocks() == (40, 0)


def test_what_is_here_already_is_not_asked_for(bench: Bench) -> None:
    bench.add("a", 30)
    bench.steps()
    bench.add("a", 30, 2, **push_in())
    bench.steps(1)
    expose = bench.kvx.events[1]
    assert isinstance(expose, Expose)
    assert (expose.first, len(expose.blocks), expose.tokens) == ((7,), 1, 30)


def test_both_sides_of_a_push_state_the_same_digest_of_the_tokens_that_are_pushed(bench: Bench) -> None:
    request = bench.add("a", 21, **push_out("out"))
    bench.steps()
    part = push_in("in")
    bench.add("b", 30, 2, **{**part, "kvx": {**part["kvx"], "tokens": 21}})
    bench.steps(1)
    stages = [event for event in bench.kvx.events if isinstance(event, Stage)]
    assert {stage.prompt for stage in stages} == {prompt_digest(request.prompt)}
    (expose,) = [event for event in bench.kvx.events if isinstance(event, Expose)]
    assert expose.tokens == 21
    assert len(expose.blocks) == 6
    assert expose.prompt == prompt_digest(bench.words("b", 30)[:21])


@pytest.mark.parametrize("same", [True, False])
def test_a_ticket_is_good_for_its_own_prompt_only(bench: Bench, *, same: bool) -> None:
    words = bench.words("a", 30)
    digest = prompt_digest(words[:28] if same else (*words[:27], 198))
    bench.add("a", 30, 2, do_remote_prefill=True, kvx={"ticket": bench.ticket(28), "prompt": digest})
    bench.steps()
    claimed = [event for event in bench.kvx.events if isinstance(event, Claim)]
    assert len(claimed) == same
    if not same:
        told = bench.answer("a")["kvx"]
        assert (told["ok"], told["reason"], told["computed_tokens"]) == (False, "prompt", 30)


def test_a_prompt_that_is_here_wholly_asks_for_nothing_and_says_so(bench: Bench) -> None:
    """A ticket of fewer tokens than are here: an empty stage lets the producer go."""
    bench.add("a", 30)
    bench.steps()
    bench.add("a", 30, 2, do_remote_prefill=True, kvx={"ticket": bench.ticket(28)})
    bench.steps()
    stage = bench.kvx.events[1]
    assert isinstance(stage, Stage)
    assert stage.part.blocks.empty
    assert stage.part.first == (7,)
    assert bench.answer("a")["kvx"]["computed_tokens"] == 2


def test_a_failed_load_is_computed_here_while_the_old_blocks_are_held(bench: Bench) -> None:
    request = bench.add("a", 30, 4, **push_in())
    bench.steps(1)
    old = set(request.blocks)
    bench.kvx.tell(Outcome("t", False, Reason.QUARANTINE, "no answer"))
    bench.steps(1)
    assert not old & set(request.blocks)
    bench.steps()
    told = bench.answer("a")["kvx"]
    assert (told["ok"], told["reason"], told["computed_tokens"]) == (False, "quarantine", 30)
    assert bench.blocks() == (32, 8)
    bench.kvx.tell(Released("t"))
    bench.steps(1)
    assert bench.blocks() == (40, 0)


def test_a_transfer_that_fails_while_its_request_is_queued_is_computed_here(bench: Bench) -> None:
    """Its one outcome has come before there were blocks: another one would be waited for in vain."""
    bench.engine.pool.hold("elsewhere", bench.engine.pool.allocate(40) or [])
    bench.add("a", 30, 4, **push_in())
    bench.steps(1)
    bench.kvx.tell(Outcome("t", False, Reason.PREEMPTED, "no room"))
    bench.steps(1)
    bench.engine.pool.release(sorted(bench.engine.pool.in_use()))
    bench.engine.pool.drop("elsewhere")
    bench.steps()
    assert [type(event) for event in bench.kvx.events] == [Claim]
    told = bench.answer("a")["kvx"]
    assert (told["ok"], told["reason"], told["computed_tokens"]) == (False, "preempted", 30)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_client_that_leaves_aborts_its_load(bench: Bench, steps: int) -> None:
    bench.add("a", 30, **push_in())
    bench.steps(steps)
    bench.engine.end("a", Finish.ABORT)
    abort = bench.kvx.events[-1]
    assert abort == Abort("t", Reason.ABORTED, address=FROM)
    assert bench.blocks() == ((40, 0), (32, 8))[steps]
    bench.kvx.tell(Outcome("t", False, Reason.ABORTED), Released("t"))
    bench.steps(1)
    assert bench.blocks() == (40, 0)
    assert not bench.engine.is_waiting


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_prefill": True}, "unknown_transfer"),
        ({"do_remote_prefill": True, "kvx": {"ticket": "forged"}}, "auth"),
        ({"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": "t", "from": "10.9.9.9:1"}}, "auth"),
        ({"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": "", "from": FROM}}, "other"),
    ],
)
def test_a_faulty_wish_is_computed_here_with_the_reason(bench: Bench, params: dict[str, Any], reason: str) -> None:
    bench.add("a", 30, 4, **params)
    bench.steps()
    told = bench.answer("a")["kvx"]
    assert (told["ok"], told["reason"], told["computed_tokens"]) == (False, reason, 30)
    assert bench.kvx.events == []
    assert bench.blocks() == (40, 0)


def test_an_id_is_good_for_one_request(bench: Bench) -> None:
    bench.add("a", 30, 4, **push_in())
    bench.add("bb", 30, 4, **push_in())
    bench.steps(1)
    bench.kvx.tell(Outcome("t", True), Released("t"))
    bench.steps()
    assert bench.answer("a")["kvx"]["ok"] is True
    assert bench.answer("bb")["kvx"]["reason"] == "unknown_transfer"
    bench.add("ccc", 30, 4, **push_in())
    bench.steps()
    assert bench.answer("ccc")["kvx"]["reason"] == "unknown_transfer"


def test_a_probe_tells_who_and_how_much(bench: Bench) -> None:
    bench.add("held", 30, **push_out())
    bench.steps()
    bench.add("a", 1, kvx={"probe": True})
    bench.steps()
    told = bench.answer("a")["kvx"]
    assert (told["instance"], told["epoch"], told["fingerprint"]) == ("fake", 77, bench.kvx.info.layout.fingerprint())
    assert told["blocks"] == {"total": 40, "free": 32, "held": 8}
    assert told["open"] == 1
