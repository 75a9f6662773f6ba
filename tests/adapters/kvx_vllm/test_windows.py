"""Groups with a sliding window in the scheduler's half: what lies before the window is never handed over.


vLLM's own rule stands here once more, in tokens: `skipped` of them it has let go of, and its table has the null block,
id 0, in their place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from attrs import define, field

from kvx.config import Options
from kvx.core.events import Expose, Stage
from kvx.core.model import BlockTable
from kvx.instance import make_ticket, read_ticket
from kvx_vllm.metadata import Ready
from kvx_vllm.records import Group, Identity, Scheduled
from kvx_vllm.scheduler import SchedulerHalf

BLOCK, WINDOW, NULL = 32, 64, 0
OPTIONS = Options.load({"listen": "127.0.0.1:5700", "max_held_fraction": 1.0}, env={})
PEER = "127.0.0.1:5800"
GROUPS = (Group(BLOCK), Group(BLOCK, WINDOW))


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
    held: int = 0
    free: int = 100
    total: int = 100
    blocks: list[int] = field(factory=list)

    def hold(self, transfer: str, blocks: Iterable[int]) -> None:
        self.blocks += blocks

    def drop(self, transfer: str) -> None:
        self.blocks.clear()


def make(*groups: Group) -> tuple[SchedulerHalf, Pins]:
    pins = Pins()

    def ticket(**grant: Any) -> str:
        return make_ticket(OPTIONS, epoch=99, lease_s=30.0, **grant)

    identity = Identity(99, "f" * 32)
    half = SchedulerHalf(OPTIONS, identity, groups, pins, lambda text: read_ticket(OPTIONS, text), ticket)
    return half, pins


def skipped(tokens: int, window: int | None) -> int:
    return 0 if window is None else max(0, tokens - window + 1)


def table(tokens: int, computed: int, *groups: Group) -> list[list[int]]:
    """vLLM's block table of a request of so many tokens, when `computed` of them had been before its last step."""
    found = []
    for index, group in enumerate(groups):
        gone = skipped(computed, group.window) // group.block_size
        ids = range(100 * (index + 1), 100 * (index + 1) + -(-tokens // group.block_size))
        found.append([NULL if position < gone else block for position, block in enumerate(ids)])
    return found


def load(half: SchedulerHalf, request: Request, local: int = 0) -> tuple[list[list[int]], int]:
    """As vLLM's scheduler does it: its table, and how many tokens it believes to have after the load."""
    half.on_new_request(request)
    external, _ = half.matched_tokens(request, local)
    blocks = table(local + external, local + external, *GROUPS)
    half.blocks_allocated(request, blocks, external)
    return blocks, local + external


def push_consumer(tokens: int) -> Request:
    kvx = {"mode": "push", "transfer": "t1", "from": PEER}
    return Request("r1", {"do_remote_prefill": True, "kvx": kvx}, tokens)


def push_producer(tokens: int) -> Request:
    return Request("r1", {"do_remote_decode": True, "kvx": {"mode": "push", "transfer": "t1"}}, tokens)


LENGTHS = [1, 2, 32, 33, 63, 64, 65, 66, 95, 96, 97, 128, 129, 300, 319, 320, 321, 352, 353]


def sees(token: int) -> set[int]:
    """Blocks that a layer with the window looks at for this token."""
    return {position // BLOCK for position in range(max(0, token - WINDOW + 1), token + 1)}


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_consumers_last_token_finds_all_that_its_window_shows(tokens: int) -> None:
    """vLLM computes the last token again after a load, and by then has let go of what that token sees first."""
    half, pins = make(*GROUPS)
    blocks, loaded = load(half, push_consumer(tokens))
    expose = half.plan((), ()).events[-1]
    assert isinstance(expose, Expose)
    assert expose.tokens == loaded
    assert NULL not in pins.blocks
    assert expose.blocks == BlockTable.of(*([block for block in ids if block != NULL] for ids in blocks))
    if tokens > 1:
        assert loaded == tokens - 1
        here = range(expose.first[1], expose.first[1] + len(expose.blocks.groups[1]))
        assert sees(loaded) - {loaded // BLOCK} <= set(here)


@pytest.mark.parametrize("local", [32, 64, 192, 288])
def test_a_prefix_hit_at_the_consumer_takes_what_is_missing_in_each_group(local: int) -> None:
    half, pins = make(*GROUPS)
    blocks, loaded = load(half, push_consumer(321), local)
    expose = half.plan((), ()).events[-1]
    assert isinstance(expose, Expose)
    starts = local // BLOCK, max(local, skipped(loaded, WINDOW)) // BLOCK
    assert expose.first == starts
    assert expose.blocks == BlockTable.of(*(ids[start:] for ids, start in zip(blocks, starts, strict=True)))
    assert NULL not in pins.blocks


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("chunk", [30, 64, 100, 1000])
def test_a_producer_pushes_from_the_window_on_and_all_of_the_rest(tokens: int, chunk: int) -> None:
    half, pins = make(*GROUPS)
    half.on_new_request(push_producer(tokens))
    parts: list[Ready] = []
    for computed in range(0, tokens, chunk):
        count = min(chunk, tokens - computed)
        blocks = table(computed + count, computed, *GROUPS)
        parts += half.plan([Scheduled("r1", computed, count, tuple(blocks))], ()).ready
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert NULL not in pins.blocks
    wanted, _ = make(*GROUPS)
    _, loaded = load(wanted, push_consumer(tokens))
    expose = wanted.plan((), ()).events[-1]
    assert isinstance(expose, Expose)
    assert {(part.tokens, part.prompt) for part in parts} == {(loaded, expose.prompt)}
    for group in range(len(GROUPS)):
        staged = [
            first for part in parts for first in range(part.first[group], part.first[group] + len(part.blocks[group]))
        ]
        assert staged == list(range(expose.first[group], expose.first[group] + len(expose.blocks.groups[group])))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_ticket_grants_what_the_consumer_takes(tokens: int) -> None:
    half, pins = make(*GROUPS)
    request = Request("p", {"do_remote_decode": True}, tokens, num_computed_tokens=tokens)
    half.on_new_request(request)
    blocks = table(tokens, tokens - 1, *GROUPS)
    answer = half.request_finished(request, blocks, completed=True)
    assert answer is not None and answer["do_remote_prefill"] is True
    assert NULL not in pins.blocks
    taker, taken = make(*GROUPS)
    load(taker, Request("d", answer, tokens))
    stage = taker.plan((), ()).events[-1]
    assert isinstance(stage, Stage)
    expose = half.plan((), ()).events[-1]
    assert isinstance(expose, Expose)
    assert (stage.tokens, stage.part.first) == (expose.tokens, expose.first)
    assert [len(ids) for ids in stage.part.blocks.groups] == [len(ids) for ids in expose.blocks.groups]
    assert NULL not in taken.blocks


def test_a_preempted_producer_that_has_staged_nothing_yet_goes_on() -> None:
    """Its first part begins behind position 0 although nothing has left."""
    half, _ = make(*GROUPS)
    half.on_new_request(push_producer(321))
    half.plan((), ())
    assert half.plan((), ["r1"]).events == ()
    blocks = tuple(table(321, 0, *GROUPS))
    (ready,) = half.plan([Scheduled("r1", 0, 321, blocks)], ()).ready
    assert ready.last


def test_without_a_window_nothing_is_left_out() -> None:
    half, _ = make(Group(BLOCK), Group(2 * BLOCK))
    half.on_new_request(push_producer(100))
    (ready,) = half.plan([Scheduled("r1", 0, 100, ([1, 2, 3, 4], [5, 6]))], ()).ready
    assert (ready.tokens, ready.first, ready.blocks) == (100, (0, 0), ((1, 2, 3, 4), (5, 6)))
