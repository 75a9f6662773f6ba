"""The engine's side of the seam, with a connector that brings what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import define, field

from kvx_reference.engine.connector import Loads, Parts
from kvx_reference.engine.engine import Engine, Settings
from kvx_reference.engine.model import Chunk, Model
from kvx_reference.engine.request import Finish, Request, Scheduled, Status
from kvx_reference.engine.sampling import Sampling

Generate = Callable[..., list[list[int]]]
RunOut = Callable[[Engine], Mapping[str, list[int]]]
SETTINGS = Settings(blocks=40, block_size=4, step_tokens=16)


@define(eq=False)
class Scripted:
    """Offers all of a prompt to requests with parameters, and notes what it is told."""

    parts: Parts
    told: list[str] = field(factory=list)
    next: Loads = field(factory=Loads)
    busy: bool = False
    waiting: dict[str, tuple[Request, int]] = field(factory=dict)

    def on_request(self, request: Request) -> None:
        self.told.append(f"on_request {request.id}")

    def external_tokens(self, request: Request, computed: int) -> int:
        if not request.params or f"allocated {request.id}" in self.told:
            return 0
        return max(0, len(request.prompt) - computed)

    def allocated(self, request: Request, external: int) -> None:
        self.told.append(f"allocated {request.id}")
        self.waiting[request.id] = request, external

    def preempted(self, request: Request) -> None:
        assert request.blocks
        self.told.append(f"preempted {request.id}")

    def layer_computed(self, layer: int, step: Sequence[Scheduled]) -> None:
        self.told.append(f"layer {layer} {[(item.request.id, item.start, item.count) for item in step]}")

    def starving(self) -> None:
        self.told.append("starving")

    def step_done(self, step: Sequence[Scheduled]) -> None:
        assert all(item.request.computed == item.start for item in step)
        self.told.append("step_done")

    def finished(self, request: Request, *, completed: bool) -> Mapping[str, Any] | None:
        self.told.append(f"finished {request.id} {completed}")
        return {"blocks": list(request.blocks), "computed": request.computed}

    def poll(self) -> Loads:
        loads, self.next = self.next, Loads()
        return loads

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def scripted(model: Model) -> tuple[Engine, Scripted]:
    made: list[Scripted] = []

    def connect(parts: Parts, options: Mapping[str, Any]) -> Scripted:
        made.append(Scripted(parts))
        return made[0]

    return Engine(model, SETTINGS, connect), made[0]


def load(engine: Engine, connector: Scripted, request_id: str) -> None:
    """What a transfer does: put the right keys and values into the blocks that were allocated."""
    request, external = connector.waiting[request_id]
    first = (len(request.prompt) - external) // SETTINGS.block_size
    source = Engine(engine.model, SETTINGS)
    source.model.forward([Chunk(request.prompt, 0, range(40))], source.cache)
    for at, block in list(enumerate(request.blocks))[first : -(-len(request.prompt) // SETTINGS.block_size)]:
        engine.cache.array[:, block] = source.cache.array[:, at]


def greedy() -> Sampling:
    return Sampling(max_tokens=10, ignore_eos=True)


def test_a_step_is_told_layer_by_layer(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], run_out: RunOut
) -> None:
    engine, connector = scripted
    engine.add(Request("a", tuple(prompts[7]), Sampling(max_tokens=2, ignore_eos=True)))
    run_out(engine)
    assert connector.told == [
        "on_request a",
        "allocated a",
        *(f"layer {layer} [('a', 0, 16)]" for layer in range(3)),
        "step_done",
        *(f"layer {layer} [('a', 16, 1)]" for layer in range(3)),
        "step_done",
        *(f"layer {layer} [('a', 17, 1)]" for layer in range(3)),
        "step_done",
        "finished a True",
    ]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 16, 17, 60])
def test_what_was_loaded_is_not_computed_again(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], generate: Generate, run_out: RunOut, length: int
) -> None:
    engine, connector = scripted
    (prompt,) = [prompt for prompt in prompts if len(prompt) == length]
    request = Request("a", tuple(prompt), greedy(), params={"load": True})
    engine.add(request)
    assert engine.step() == []
    assert request.status is Status.LOADING
    assert engine.is_waiting
    load(engine, connector, "a")
    connector.next = Loads(done=("a",))
    assert run_out(engine)["a"] == generate([prompt])[0]
    first_step = next(line for line in connector.told if line.startswith("layer"))
    assert first_step == f"layer 0 [('a', {length - 1}, 1)]"
    # What came can be found by the next request, as if it had been computed here.
    again = Request("b", (*prompt, 3, 4, 5, 6), greedy())
    engine.add(again)
    engine.step()
    assert again.found == length // 4 * 4


def test_loads_count_from_what_is_here_already(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], generate: Generate, run_out: RunOut
) -> None:
    engine, connector = scripted
    engine.add(Request("first", tuple(prompts[8][:21]), greedy()))
    run_out(engine)
    engine.add(Request("a", tuple(prompts[8]), greedy(), params={"load": True}))
    engine.step()
    assert connector.waiting["a"][1] == 31 - 20
    load(engine, connector, "a")
    connector.next = Loads(done=("a",))
    assert run_out(engine)["a"] == generate([prompts[8]])[0]


def test_a_failed_load_is_computed_here_from_other_blocks(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], generate: Generate, run_out: RunOut
) -> None:
    engine, connector = scripted
    request = Request("a", tuple(prompts[8]), greedy(), params={"load": True})
    engine.add(request)
    engine.step()
    late = list(request.blocks)
    engine.pool.hold("t", late)
    connector.next = Loads(failed=(("a", "peer_lost"),))
    engine.step()
    assert not set(request.blocks) & set(late)
    engine.cache.array[:, late] = np.nan  # the writer was not dead yet
    assert run_out(engine)["a"] == generate([prompts[8]])[0]
    engine.pool.drop("t")
    assert engine.pool.free == engine.pool.total


def test_a_failed_load_fails_its_request_where_that_is_wanted(model: Model, prompts: list[list[int]]) -> None:
    made: list[Scripted] = []

    def connect(parts: Parts, options: Mapping[str, Any]) -> Scripted:
        made.append(Scripted(parts))
        return made[0]

    engine = Engine(model, Settings(blocks=40, block_size=4, recompute=False), connect)
    engine.add(Request("a", tuple(prompts[8]), greedy(), params={"load": True}))
    engine.step()
    made[0].next = Loads(failed=(("a", "lease_ended: too late"),))
    (output,) = engine.step()
    assert output.finish is Finish.ERROR
    assert "lease_ended" in output.error
    assert engine.pool.free == engine.pool.total


def test_others_run_while_one_loads_and_an_abort_ends_it(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], generate: Generate
) -> None:
    engine, connector = scripted
    loading = Request("a", tuple(prompts[8]), greedy(), params={"load": True})
    engine.add(loading)
    engine.add(Request("b", tuple(prompts[5]), greedy()))
    tokens = [output.drawn.token for _ in range(10) for output in engine.step() if output.drawn]
    assert tokens == generate([prompts[5]])[0]
    engine.pool.hold("t", loading.blocks)
    engine.end("a", Finish.ABORT)
    assert connector.told[-1] == "finished a False"
    assert engine.pool.total - engine.pool.free == 8
    connector.next = Loads(done=("a",))  # too late: nobody waits for it
    assert engine.step() == []
    engine.pool.drop("t")
    assert engine.pool.free == engine.pool.total


def test_answers_carry_what_the_connector_says_while_the_blocks_are_still_there(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]]
) -> None:
    engine, _ = scripted
    engine.add(Request("a", tuple(prompts[5]), Sampling(max_tokens=1)))
    (output,) = engine.step()
    assert output.params == {"blocks": [0, 1, 2, 3], "computed": 13}


def test_a_connector_that_holds_too_much_hears_of_it(
    scripted: tuple[Engine, Scripted], prompts: list[list[int]], run_out: RunOut
) -> None:
    engine, connector = scripted
    engine.pool.hold("t", engine.pool.allocate(39) or [])
    engine.step()
    assert connector.told == []
    engine.add(Request("a", tuple(prompts[5]), Sampling(max_tokens=1)))
    engine.step()
    assert connector.told == ["on_request a", "starving"]
    engine.pool.drop("t")
    engine.pool.release(sorted(engine.pool.in_use()))
    assert run_out(engine)["a"]
    assert connector.told.count("starving") == 1
