from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from attrs import define, evolve, field

from kvx.config import Options
from kvx.core.events import Abort, Claim, Expose, Stage
from kvx.core.model import BlockTable, Grant, Mode, Part, Peer, Reason, Role
from kvx.instance import make_ticket, read_ticket
from kvx.params import prompt_digest
from kvx_vllm.metadata import Ended, Plan, WorkerReport
from kvx_vllm.records import Group, Identity, Scheduled, Traits
from kvx_vllm.scheduler import SchedulerHalf
from kvx_vllm.tally import merged, summary

BLOCK = 32
OPTIONS = Options.load({"listen": "127.0.0.1:5700", "max_held_fraction": 1.0}, env={})
PRODUCER = Options.load({"listen": "127.0.0.1:5800"}, env={})
PULL = {"do_remote_decode": True}


@define
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.num_prompt_tokens))

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_prompt_tokens + 8))


@define
class Pins:
    total: int = 64
    blocks: dict[str, list[int]] = field(factory=dict)

    def hold(self, transfer: str, blocks: Iterable[int]) -> None:
        self.blocks.setdefault(transfer, []).extend(blocks)

    def drop(self, transfer: str) -> None:
        del self.blocks[transfer]

    @property
    def held(self) -> int:
        return sum(map(len, self.blocks.values()))

    @property
    def free(self) -> int:
        return self.total - self.held


class Half(SchedulerHalf):
    def __init__(
        self, options: Options = OPTIONS, *, ranks: int = 1, groups: Sequence[Group] = (Group(BLOCK),)
    ) -> None:
        self.pins = Pins()
        super().__init__(
            options,
            Identity(99, "f" * 32, ranks),
            groups,
            self.pins,
            lambda text: read_ticket(options, text),
            lambda **grant: make_ticket(options, epoch=99, lease_s=30.0, **grant),
        )

    def take(self, *scheduled: Scheduled, preempted: Iterable[str] = ()) -> Plan:
        return self.plan(scheduled, preempted)

    def outcome(self, transfer: str, *, ok: bool, reason: Reason | None = None, released: bool = True) -> None:
        end = Ended(ok, Mode.PULL, Role.CONSUMER, reason, bytes=100)
        self.report(WorkerReport({transfer: end}, {transfer: 1} if released else {}))


def busy(half: SchedulerHalf) -> bool:
    return half.busy


def ticket(transfer: str = "t1", tokens: int = 100) -> str:
    count = -(-tokens // BLOCK)
    table = BlockTable.of(range(1, count + 1))
    return make_ticket(PRODUCER, epoch=5, transfer=transfer, first=(0,), blocks=table, tokens=tokens, lease_s=30.0)


def consumer(transfer: str = "t1", tokens: int = 100, request_id: str = "r1") -> Request:
    params = {"do_remote_prefill": True, "kvx": {"ticket": ticket(transfer, tokens)}}
    return Request(request_id, params, tokens)


def push_consumer(tokens: int = 100) -> Request:
    kvx = {"mode": "push", "transfer": "t1", "from": "127.0.0.1:5800"}
    return Request("r1", {"do_remote_prefill": True, "kvx": kvx}, tokens)


def push_producer(tokens: int = 100) -> Request:
    return Request("r1", {"do_remote_decode": True, "kvx": {"mode": "push", "transfer": "t1"}}, tokens)


def load(half: Half, request: Request, blocks: Sequence[int], local: int = 0) -> None:
    """What vLLM's scheduler does with a request whose tokens come from elsewhere."""
    half.on_new_request(request)
    count, later = half.matched_tokens(request, local)
    assert later == (count > 0)
    half.blocks_allocated(request, [blocks], count)


# ------------------------------------------------------------------ pull, producer


def test_a_finished_prefill_is_exposed_and_answered_with_a_ticket() -> None:
    half = Half()
    request = Request("r1", dict(PULL), 70, num_computed_tokens=70)
    half.on_new_request(request)
    assert half.take() == Plan()
    answer = half.request_finished(request, [[4, 5, 6, 7]], completed=True)
    assert answer is not None
    text = answer["kvx"]["ticket"]
    assert {key: answer[key] for key in ("do_remote_prefill", "do_remote_decode", "remote_host")} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": None,
    }
    grant = read_ticket(OPTIONS, text).grant
    assert (grant.epoch, grant.tokens, grant.blocks, grant.first) == (99, 70, BlockTable.of([4, 5, 6]), (0,))
    assert grant.owner == Peer("127.0.0.1:5700", 0)
    assert busy(half)
    (event,) = half.take().events
    assert event == Expose(grant.transfer, Mode.PULL, BlockTable.of([4, 5, 6]), (0,), 70, 30.0)
    assert busy(half)  # blocks are held: the engine has to step to hear of their release
    half.outcome(grant.transfer, ok=True)
    assert not busy(half)
    assert half.pins.held == 0


@pytest.mark.parametrize("ended", ["aborted", "error"])
def test_an_aborted_prefill_offers_nothing(ended: str) -> None:
    half = Half()
    request = Request("r1", dict(PULL), 70, num_computed_tokens=33)
    half.on_new_request(request)
    assert half.request_finished(request, [[4, 5]], completed=False) is None
    assert half.take() == Plan()
    assert not busy(half)


def test_too_many_held_blocks_are_refused_with_a_reason() -> None:
    half = Half(evolve(OPTIONS, max_held_fraction=0.05))
    request = Request("r1", dict(PULL), 128, num_computed_tokens=128)
    half.on_new_request(request)
    answer = half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert answer is not None
    assert answer["do_remote_prefill"] is False
    assert answer["kvx"]["reason"] == "no_capacity"
    assert not busy(half)


# ------------------------------------------------------------------ pull, consumer


def test_a_load_claims_at_once_and_stages_the_prompts_blocks_only() -> None:
    half = Half()
    request = consumer(tokens=100)
    half.on_new_request(request)
    (claim,) = half.take().events
    assert isinstance(claim, Claim)
    assert claim.ticket is not None
    assert claim.transfer == "t1"
    assert half.matched_tokens(request, 0) == (100, True)
    assert half.matched_tokens(request, 0) == (100, True)  # vLLM asks again while it has no room
    half.blocks_allocated(request, [[11, 12, 13, 14, 15]], 100)  # the fifth is look-ahead
    plan = half.take()
    (stage,) = plan.events
    assert stage == Stage("t1", Mode.PULL, Part(None, (0,), BlockTable.of([11, 12, 13, 14])), True, 100, claim.ticket)
    assert plan.loads == (("t1", "r1"),)
    assert half.matched_tokens(request, 0) == (0, False)
    assert half.pins.blocks == {"t1": [11, 12, 13, 14]}
    half.outcome("t1", ok=True)
    assert half.loaded({"r1"}, ()) == {"r1"}
    assert half.loaded({"r1"}, ()) == set()  # vLLM would die of a second one
    half.blocks_allocated(request, [[11, 12, 13, 14, 15]], 0)  # vLLM calls again after the load
    half.take(Scheduled("r1", 99, 1, ((11, 12, 13, 14, 15),)))
    answer = half.request_finished(request, [[11, 12, 13, 14, 15]], completed=True)
    assert answer == {
        "kvx": {"transfer": "t1", "mode": "pull", "ok": True, "bytes": 100, "seconds": 0.0, "computed_tokens": 1}
    }
    assert half.take() == Plan()
    assert not busy(half)


def test_a_partial_prefix_hit_loads_the_tail() -> None:
    half = Half()
    load(half, consumer(tokens=100), [1, 2, 13, 14], local=64)
    stage = half.take().events[-1]
    assert isinstance(stage, Stage)
    assert stage.part == Part(None, (2,), BlockTable.of([13, 14]))


def test_a_full_prefix_hit_stages_nothing_and_vllm_waits_for_nothing() -> None:
    half = Half()
    request = consumer(tokens=64)
    half.on_new_request(request)
    assert half.matched_tokens(request, 64) == (0, False)
    half.blocks_allocated(request, [[1, 2]], 0)
    plan = half.take()
    stage = plan.events[-1]
    assert isinstance(stage, Stage)
    assert stage.part == Part(None, (2,), BlockTable.of([]))
    assert stage.last
    assert plan.loads == ()
    assert half.pins.held == 0
    half.outcome("t1", ok=True, released=False)
    assert half.loaded({"r1"}, ()) == set()
    half.request_finished(request, [[1, 2]], completed=True)
    assert half.take() == Plan()


def test_a_prompt_longer_than_the_ticket_computes_the_rest_itself() -> None:
    half = Half()
    request = evolve(consumer(tokens=40), num_prompt_tokens=41)
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (40, True)
    half.blocks_allocated(request, [[1, 2]], 40)
    half.take()
    half.take(Scheduled("r1", 40, 1, ((1, 2),)), Scheduled("r1", 41, 1, ((1, 2),)))
    answer = half.request_finished(request, [[1, 2]], completed=True)
    assert answer is not None
    assert answer["kvx"]["computed_tokens"] == 1


def test_a_failed_load_keeps_its_blocks_pinned_until_released() -> None:
    half = Half()
    request = consumer()
    load(half, request, [1, 2, 3, 4])
    half.take()
    half.outcome("t1", ok=False, reason=Reason.PEER_LOST, released=False)
    assert half.loaded({"r1"}, {"r1"}) == {"r1"}
    answer = half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert answer is not None
    assert answer["kvx"]["reason"] == "peer_lost"
    assert half.pins.held == 4
    assert busy(half)
    half.report(WorkerReport({}, {"t1": 1}))
    assert half.pins.held == 0
    assert not busy(half)
    assert half.counters["consumer_failed"] == 1
    assert half.counters["failed_loads"] == 1


@pytest.mark.parametrize("params", [{}, {"kvx": {"ticket": "kvx1.x"}}, {"remote_engine_id": "nixl", "remote_port": 1}])
def test_a_faulty_request_fails_through_vllms_own_policy(params: dict[str, Any]) -> None:
    half = Half()
    request = Request("r1", {"do_remote_prefill": True, **params}, 50)
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (50, True)
    half.blocks_allocated(request, [[1, 2]], 50)
    assert busy(half)
    plan = half.take()
    assert plan.refused == ("r1",)
    assert plan.events == ()
    assert half.loaded({"r1"}, ()) == {"r1"}
    answer = half.request_finished(request, [[1, 2]], completed=True)
    assert answer is not None
    assert answer["kvx"]["ok"] is False
    assert answer["kvx"]["reason"] in ("auth", "unknown_transfer")


def test_a_transfer_that_failed_while_its_request_waited_for_room_is_refused_when_placed() -> None:
    half = Half()
    request = push_consumer()
    half.on_new_request(request)
    half.take()
    half.outcome("t1", ok=False, reason=Reason.PEER_LOST, released=False)
    assert half.matched_tokens(request, 0) == (100, True)
    half.blocks_allocated(request, [[1, 2, 3, 4]], 100)
    assert half.take() == Plan(refused=("r1",))
    assert half.pins.held == 0
    assert half.loaded({"r1"}, {"r1"}) == {"r1"}
    answer = half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert answer is not None
    assert answer["kvx"]["reason"] == "peer_lost"
    assert not half._transfers


def test_two_requests_with_one_ticket_do_not_mix() -> None:
    half = Half()
    load(half, consumer(request_id="r1"), [1, 2, 3, 4])
    half.take()
    load(half, consumer(request_id="r2"), [5, 6, 7, 8])
    plan = half.take()
    assert plan.refused == ("r2",)
    assert plan.events == ()


def test_a_ticket_is_not_taken_again_after_its_transfer_is_over() -> None:
    half = Half()
    request = consumer()
    load(half, request, [1, 2, 3, 4])
    half.take()
    half.outcome("t1", ok=True)
    half.loaded({"r1"}, ())
    half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    load(half, consumer(request_id="r2"), [5, 6, 7, 8])
    assert half.take() == Plan(refused=("r2",))


# ------------------------------------------------------------------ aborts of a consumer


def test_a_request_that_is_refused_before_admission_frees_the_producer() -> None:
    half = Half()
    request = evolve(consumer(), num_prompt_tokens=1)  # as vLLM submits it: prompt [0], aborted at once
    half.on_new_request(request)
    half.request_finished(request, [[]], completed=False)
    assert busy(half)
    abort = half.take().events[-1]
    assert isinstance(abort, Abort)
    assert abort.ticket is not None
    assert not busy(half)


def test_abort_while_waiting_for_room_frees_the_producer_of_a_push() -> None:
    half = Half()
    request = push_consumer()
    half.on_new_request(request)
    half.take()
    half.request_finished(request, [[]], completed=False)
    assert half.take().events == (Abort("t1", address="127.0.0.1:5800"),)


def test_abort_of_a_load_is_still_answered_to_vllm_once() -> None:
    half = Half()
    request = consumer()
    load(half, request, [1, 2, 3, 4])
    half.take()
    half.request_finished(request, [[1, 2, 3, 4]], completed=False)
    (abort,) = half.take().events
    assert isinstance(abort, Abort)
    assert half.pins.held == 4
    half.outcome("t1", ok=False, reason=Reason.ABORTED)
    for expected in ({"r1"}, set()):
        half.report(WorkerReport(told=frozenset({"r1"})))
        assert half.loaded({"r1"}, ()) == expected
    assert not busy(half)


def test_unknown_requests_are_never_reported() -> None:
    half = Half()
    half.report(WorkerReport(told=frozenset({"gone"})))
    assert half.loaded({"gone"}, {"gone"}) == set()


def test_loads_of_another_connector_are_passed_on() -> None:
    half = Half()
    half.report(WorkerReport(told=frozenset({"gone"})))
    assert half.loaded({"gone", "of another connector"}, ()) == {"of another connector"}


# ------------------------------------------------------------------ push


def test_a_push_consumer_exposes_to_the_producers_address() -> None:
    half = Half()
    load(half, push_consumer(tokens=64), [7, 8])
    claim, expose = half.take().events
    assert claim == Claim("t1", Mode.PUSH, address="127.0.0.1:5800")
    assert expose == Expose(
        "t1", Mode.PUSH, BlockTable.of([7, 8]), (0,), 64, 30.0, "127.0.0.1:5800", prompt_digest(range(64))
    )


def test_a_chunked_push_hands_over_full_blocks_once_and_the_rest_last() -> None:
    half = Half()
    request = push_producer(tokens=100)
    half.on_new_request(request)
    assert half.take().events == (Claim("t1", Mode.PUSH),)
    (one,) = half.take(Scheduled("r1", 0, 50, ([1, 2],))).ready
    assert (one.first, one.blocks, one.full, one.last) == ((0,), ((1,),), (1,), False)
    assert half.take(Scheduled("r1", 50, 10, ([1, 2],))).ready == ()
    (two,) = half.take(Scheduled("r1", 60, 30, ([1, 2, 3],))).ready
    assert (two.first, two.blocks, two.full, two.last) == ((1,), ((2,),), (1,), False)
    (three,) = half.take(Scheduled("r1", 90, 10, ([1, 2, 3, 4],))).ready
    assert (three.first, three.blocks, three.full, three.last) == ((2,), ((3, 4),), (1,), True)
    assert {ready.prompt for ready in (one, two, three)} == {prompt_digest(range(100))}
    assert half.pins.blocks == {"t1": [1, 2, 3, 4]}
    assert half.take(Scheduled("r1", 100, 1, ([1, 2, 3, 4],))).ready == ()
    answer = half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert answer == {"kvx": {"transfer": "t1", "mode": "push", "ok": None}}
    assert half.take().events == ()
    half.outcome("t1", ok=True)
    assert not busy(half)


def test_a_producers_own_prefix_hit_is_handed_over_too() -> None:
    half = Half()
    half.on_new_request(push_producer(tokens=64))
    (ready,) = half.take(Scheduled("r1", 32, 32, ([9, 1],))).ready
    assert (ready.first, ready.blocks, ready.full, ready.last) == ((0,), ((9, 1),), (2,), True)


def test_groups_of_different_block_sizes_keep_their_own_positions() -> None:
    half = Half(groups=(Group(32), Group(64)))
    half.on_new_request(push_producer(tokens=100))
    (one,) = half.take(Scheduled("r1", 0, 70, ([1, 2, 3], [4, 5]))).ready
    assert (one.first, one.blocks, one.full) == ((0, 0), ((1, 2), (4,)), (2, 1))
    (two,) = half.take(Scheduled("r1", 70, 30, ([1, 2, 3, 6], [4, 5]))).ready
    assert (two.first, two.blocks, two.full) == ((2, 1), ((3, 6), (5,)), (1, 0))


def test_preemption_after_parts_have_left_aborts_and_before_that_waits() -> None:
    half = Half()
    request = push_producer()
    half.on_new_request(request)
    half.take()
    assert half.take(preempted=["r1"]).events == ()
    half.take(Scheduled("r1", 0, 40, ([1, 2],)))
    assert half.take(preempted=["r1"]).events == (Abort("t1", Reason.PREEMPTED),)
    assert half.take(Scheduled("r1", 0, 100, ([5, 6, 7, 8],))).ready == ()
    assert half.pins.blocks == {"t1": [1]}
    half.request_finished(request, [[5, 6, 7, 8]], completed=True)
    assert half.take().events == ()
    half.outcome("t1", ok=False, reason=Reason.PREEMPTED)
    assert not busy(half)


def test_a_failed_push_stages_nothing_more_and_says_so() -> None:
    half = Half()
    half.on_new_request(push_producer())
    half.take(Scheduled("r1", 0, 40, ([1, 2],)))
    half.outcome("t1", ok=False, reason=Reason.PEER_LOST, released=False)
    plan = half.take(Scheduled("r1", 40, 60, ([1, 2, 3, 4],)))
    assert plan.events == (Abort("t1"),)
    assert plan.ready == ()


@pytest.mark.parametrize(("steps", "completed", "aborts"), [(0, False, 1), (1, False, 1), (2, False, 1), (2, True, 0)])
def test_the_end_of_a_push_request(steps: int, completed: bool, aborts: int) -> None:
    half = Half()
    request = push_producer(tokens=64)
    half.on_new_request(request)
    half.take()
    for step in range(steps):
        half.take(Scheduled("r1", 32 * step, 32, ([1, 2],)))
    half.request_finished(request, [[1, 2]], completed=completed)
    events = half.take().events
    assert len([event for event in events if isinstance(event, Abort)]) == aborts
    assert half.pins.held == steps


# ------------------------------------------------------------------ what a request can be


@pytest.mark.parametrize("request_", [consumer(), push_consumer()])
def test_what_cannot_be_transferred_is_refused_with_its_sentence_and_frees_the_producer(request_: Request) -> None:
    half = Half()
    half.on_new_request(request_, Traits(obstacle="has a LoRA adapter"))
    (abort,) = half.take().events
    assert isinstance(abort, Abort)
    assert abort.transfer == "t1"
    assert abort.ticket is not None or abort.address is not None
    assert half.matched_tokens(request_, 0) == (100, True)
    half.blocks_allocated(request_, [[1, 2, 3, 4]], 100)
    assert half.take().refused == ("r1",)
    answer = half.request_finished(request_, [[1, 2, 3, 4]], completed=True)
    assert answer is not None
    assert answer["kvx"]["detail"] == "has a LoRA adapter"


def test_of_several_sequences_the_first_takes_the_blocks_and_none_offers_any() -> None:
    half = Half()
    for index in range(3):
        request = evolve(consumer(), request_id=f"{index}_r")
        half.on_new_request(request, Traits(siblings=True, first=index == 0))
        assert half.matched_tokens(request, 0) == ((100, True) if index == 0 else (0, False))
    both = Request("0_p", dict(PULL), 40, num_computed_tokens=40)
    half.on_new_request(both, Traits(siblings=True))
    answer = half.request_finished(both, [[1, 2]], completed=True)
    assert answer is not None
    assert answer["do_remote_prefill"] is False
    assert "n is more than 1" in answer["kvx"]["detail"]


@pytest.mark.parametrize("same", [True, False])
def test_a_ticket_is_good_for_its_own_prompt_only(same: bool) -> None:
    half = Half()
    request = consumer(tokens=100)
    assert request.kv_transfer_params is not None
    digest = prompt_digest(range(100) if same else range(1, 101))
    request.kv_transfer_params["kvx"]["prompt"] = digest
    load(half, request, [1, 2, 3, 4])
    assert half.take().refused == (() if same else ("r1",))
    early = evolve(request, request_id="r2", num_prompt_tokens=1)  # what vLLM makes of a request that it refuses
    other = Half()
    other.on_new_request(early)
    other.request_finished(early, [[]], completed=False)
    assert isinstance(other.take().events[-1], Abort)


def test_a_push_that_brings_a_part_of_the_prompt_leaves_the_rest_to_compute() -> None:
    half = Half()
    request = push_consumer(tokens=100)
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["kvx"]["tokens"] = 70
    half.on_new_request(request)
    assert half.matched_tokens(request, 32) == (38, True)
    half.blocks_allocated(request, [[1, 2, 3, 4]], 38)
    expose = half.take().events[-1]
    digest = prompt_digest(range(70))
    assert expose == Expose("t1", Mode.PUSH, BlockTable.of([2, 3]), (1,), 70, 30.0, "127.0.0.1:5800", digest)


def test_who_takes_blocks_may_hand_them_on_and_tells_of_both() -> None:
    half = Half()
    request = evolve(consumer(tokens=40), num_prompt_tokens=70, num_computed_tokens=70)
    assert request.kv_transfer_params is not None
    request.kv_transfer_params["do_remote_decode"] = True
    load(half, request, [1, 2, 3])
    half.take()
    half.outcome("t1", ok=True)
    half.loaded({"r1"}, ())
    answer = half.request_finished(request, [[1, 2, 3]], completed=True)
    assert answer is not None
    assert answer["kvx"]["loaded"]["ok"] is True
    assert read_ticket(OPTIONS, answer["kvx"]["ticket"]).grant.tokens == 70


def test_what_metrics_are_told() -> None:
    half = Half()
    assert half.take_stats() is None
    request = consumer()
    load(half, request, [1, 2, 3, 4])
    first = half.take_stats()
    assert first == {"ended": [], "refused": [], "open": 1, "held": 4, "quarantined": 0}
    half.outcome("t1", ok=False, reason=Reason.PEER_LOST, released=False)
    load(half, evolve(request, request_id="r2"), [5, 6, 7, 8])  # the same ticket again
    second = half.take_stats()
    assert second is not None
    assert second["ended"] == [("pull", "consumer", "peer_lost", 100, 0.0)]
    assert (second["refused"], second["held"], second["quarantined"]) == (["unknown_transfer"], 4, 4)
    half.report(WorkerReport({}, {"t1": 1}))
    half.loaded({"r1"}, {"r1"})
    half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    third = half.take_stats()
    assert third == {"ended": [], "refused": [], "open": 0, "held": 0, "quarantined": 0}
    assert half.take_stats() is None
    assert merged(merged(first, second), third) == {**third, "ended": second["ended"], "refused": second["refused"]}
    assert summary(merged(second, third))["failed"] == 1


# ------------------------------------------------------------------ several ranks, and the probe


def test_blocks_are_free_when_every_rank_has_released_and_one_failure_stops_all() -> None:
    half = Half(ranks=2)
    request = consumer()
    load(half, request, [1, 2, 3, 4])
    half.take()
    half.report(WorkerReport({"t1": Ended(False, Mode.PULL, Role.CONSUMER, Reason.TRANSPORT)}, {"t1": 1}))
    (abort,) = half.take().events
    assert isinstance(abort, Abort)
    assert half.pins.held == 4
    half.report(WorkerReport({"t1": Ended(False, Mode.PULL, Role.CONSUMER, Reason.ABORTED)}, {"t1": 1}))
    assert half.pins.held == 0
    answer = half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert answer is not None
    assert answer["kvx"]["reason"] == "transport"  # the first cause, not the echo


def test_the_probe_names_every_rank_and_what_is_held() -> None:
    half = Half(ranks=2)
    half.pins.hold("x", [1, 2])
    request = Request("r1", {"kvx": {"probe": True}}, 1)
    half.on_new_request(request)
    answer = half.request_finished(request, [[9]], completed=True)
    assert answer is not None
    probe = answer["kvx"]
    assert probe["addresses"] == ["127.0.0.1:5700", "127.0.0.1:5701"]
    assert (probe["epoch"], probe["instance"]) == (99, "127.0.0.1:5700")
    assert probe["blocks"] == {"total": 64, "free": 63, "held": 2}


def test_nothing_is_remembered_of_requests_that_are_over() -> None:
    half = Half()
    for index in range(50):
        request = consumer(f"t{index}", request_id=f"r{index}")
        load(half, request, [1, 2, 3, 4])
        half.take()
        half.outcome(f"t{index}", ok=index % 2 == 0)
        half.loaded({f"r{index}"}, ())
        half.request_finished(request, [[1, 2, 3, 4]], completed=True)
    assert not half._loads
    assert not half._sends
    assert not half._transfers
    assert not half.pins.blocks


def test_grants_of_tickets_and_exposures_agree() -> None:
    half = Half()
    request = Request("r1", dict(PULL), 33, num_computed_tokens=33)
    half.on_new_request(request)
    answer = half.request_finished(request, [[1, 2]], completed=True)
    assert answer is not None
    grant: Grant = read_ticket(OPTIONS, answer["kvx"]["ticket"]).grant
    (expose,) = half.take().events
    assert isinstance(expose, Expose)
    assert (grant.transfer, grant.blocks, grant.first, grant.tokens) == (
        expose.transfer,
        expose.blocks,
        expose.first,
        expose.tokens,
    )
