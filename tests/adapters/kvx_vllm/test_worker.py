from __future__ import annotations

import pickle

from kvx.core.events import Claim, Stage
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Outcome, Part, Reason, Released, Role
from kvx.testing import FakeInstance
from kvx_vllm.metadata import Ended, Plan, Ready, WorkerReport
from kvx_vllm.worker import MAX_EARLY, WorkerHalf


def group(index: int, *layers: str) -> CacheGroup:
    specs = tuple(LayerSpec(name, 0, 0, 64, 64) for name in layers)
    return CacheGroup(index, "full_attention", 32, specs, 1, 1)


LAYOUT = Layout("m", "float32", "v", (group(0, "a", "b"),), 16)
READY = Ready("t1", first=(2,), blocks=((7, 8, 9),), full=(2,), last=True, tokens=150, prompt="aa")


def half(layout: Layout = LAYOUT) -> tuple[WorkerHalf, FakeInstance]:
    instance = FakeInstance(layout)
    return WorkerHalf(instance, layout), instance


def staged(layer: str, *blocks: int, first: int = 2) -> Stage:
    return Stage("t1", Mode.PUSH, Part((layer,), (first,), BlockTable.of(blocks)), last=False, tokens=150, prompt="aa")


LAST = Stage("t1", Mode.PUSH, Part(None, (4,), BlockTable.of([9])), last=True, tokens=150, prompt="aa")


def test_decisions_are_put_before_the_forward_in_one_batch() -> None:
    worker, instance = half()
    claims = (Claim("x", Mode.PUSH), Claim("y", Mode.PUSH))
    worker.begin_step(Plan(events=claims))
    assert instance.batches == [claims]
    worker.begin_step(Plan())
    worker.end_step()
    assert instance.batches == [claims]


def test_each_layer_leaves_as_it_is_computed_and_the_rest_last() -> None:
    worker, instance = half()
    worker.begin_step(Plan(ready=(READY,)))
    worker.layer_saved("a")
    assert instance.batches == [(staged("a", 7, 8),)]
    worker.layer_saved("b")
    worker.end_step()
    assert instance.batches[1:] == [(staged("b", 7, 8),), (LAST,)]


def test_layers_whose_hook_did_not_fire_leave_at_the_end_of_the_step() -> None:
    worker, instance = half()
    worker.begin_step(Plan(ready=(READY,)))
    worker.layer_saved("a")
    worker.layer_saved("a")
    worker.layer_saved("stranger")
    worker.end_step()
    assert instance.batches == [(staged("a", 7, 8),), (staged("b", 7, 8), LAST)]


def test_a_part_that_is_not_the_last_ends_with_its_blocks() -> None:
    worker, instance = half()
    worker.begin_step(Plan(ready=(Ready("t1", (0,), ((5,),), (1,), False, 150, "aa"),)))
    worker.layer_saved("a")
    worker.layer_saved("b")
    worker.end_step()
    assert instance.events == [staged("a", 5, first=0), staged("b", 5, first=0)]


def test_a_prompt_of_full_blocks_ends_with_an_empty_part() -> None:
    worker, instance = half()
    worker.begin_step(Plan(ready=(Ready("t1", (0,), ((5,),), (1,), True, 32),)))
    worker.end_step()
    assert instance.events[-1] == Stage("t1", Mode.PUSH, Part(None, (1,), BlockTable.of([])), last=True, tokens=32)


def test_a_layer_hands_over_blocks_of_its_own_group_only() -> None:
    layout = Layout("m", "float32", "v", (group(0, "a"), group(1, "b")), 16)
    worker, instance = half(layout)
    worker.begin_step(Plan(ready=(Ready("t1", (0, 0), ((1, 2), (3,)), (2, 1), False, 100),)))
    worker.layer_saved("a")
    worker.layer_saved("b")
    assert [event.part.blocks for event in instance.events if isinstance(event, Stage)] == [
        BlockTable.of([1, 2], []),
        BlockTable.of([], [3]),
    ]


def test_outcomes_reach_vllm_by_request_and_the_scheduler_by_transfer() -> None:
    worker, instance = half()
    worker.begin_step(Plan(loads=(("t1", "r1"), ("t2", "r2")), refused=("r3",)))
    instance.tell(
        Outcome("t1", ok=True, mode=Mode.PULL, role=Role.CONSUMER, bytes=64),
        Released("t1"),
        Outcome("t2", ok=False, reason=Reason.LEASE_ENDED, mode=Mode.PULL, role=Role.CONSUMER),
        Outcome("p", ok=True, mode=Mode.PULL, role=Role.PRODUCER, bytes=32),
        Released("p"),
    )
    results = worker.results()
    assert results.finished == {"r1", "r2", "r3"}
    assert results.failed == {"r2", "r3"}
    report = worker.take_report()
    assert report is not None
    assert {name: end.ok for name, end in report.ended.items()} == {"t1": True, "t2": False, "p": True}
    assert report.released == {"t1": 1, "p": 1}
    assert worker.take_report() is None
    assert worker.results().finished == set()


def test_a_load_whose_transfer_has_ended_before_fails_at_once() -> None:
    worker, instance = half()
    instance.tell(Outcome("t1", ok=False, reason=Reason.PATIENCE, mode=Mode.PUSH, role=Role.CONSUMER))
    assert worker.results().finished == set()
    worker.begin_step(Plan(loads=(("t1", "r1"), ("t2", "r2"))))
    results = worker.results()
    assert results.finished == results.failed == {"r1"}


def test_early_ends_are_remembered_in_bounded_memory() -> None:
    worker, instance = half()
    for index in range(MAX_EARLY + 10):
        instance.tell(Outcome(f"t{index}", ok=False, reason=Reason.PATIENCE, role=Role.CONSUMER))
    worker.results()
    worker.begin_step(Plan(loads=(("t0", "old"), (f"t{MAX_EARLY}", "new"))))
    assert worker.results().finished == {"new"}


def test_news_of_a_step_without_a_report_are_kept() -> None:
    worker, instance = half()
    instance.tell(Released("a"))
    worker.results()
    instance.tell(Released("b"))
    worker.results()
    report = worker.take_report()
    assert report is not None
    assert report.released == {"a": 1, "b": 1}


def test_reports_of_ranks_are_merged_into_one_that_is_ok_only_if_all_are() -> None:
    ok = WorkerReport({"t": Ended(True, None, None, bytes=5, seconds=1.0)}, {"t": 1})
    bad = WorkerReport({"t": Ended(False, None, None, Reason.BOUNDS, bytes=7, seconds=3.0)}, {"t": 1, "u": 1})
    for merged in (ok.merged(bad), bad.merged(ok)):
        assert merged.ended["t"] == Ended(False, None, None, Reason.BOUNDS, bytes=12, seconds=3.0)
        assert merged.released == {"t": 2, "u": 1}


def test_vllm_can_carry_both_between_its_processes() -> None:
    plan = Plan((LAST, Claim("x", Mode.PUSH)), (READY,), (("t", "r"),), ("q",))
    report = WorkerReport({"t": Ended(True, Mode.PULL, Role.CONSUMER)}, {"t": 1})
    for value in (plan, report):
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301 - vLLM's way, not kvx's


def test_close() -> None:
    worker, instance = half()
    worker.close()
    assert instance.closed
