"""vLLM's own Scheduler with KvxConnector, workers played: what it makes of loads that fail, end late, or are aborted.

The flows of upstream's tests of load failures (test_kv_load_failure_recovery, test_error_propagation,
test_invalid_blocks_correctness), which put a mock in the connector's place; here the connector is kvx's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import define

from kvx.config import Options
from kvx.core.model import BlockTable, Mode, Reason, Role
from kvx.instance import make_ticket
from kvx_vllm.metadata import Ended, WorkerReport

# What vLLM's own imports warn of is not kvx's.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

BLOCK, POOL = 32, 64
PRODUCER = Options.load({"listen": "127.0.0.1:5800"}, env={})


@define
class Engine:
    """A scheduler, and the ids of what it runs."""

    scheduler: Any
    made: int = 0
    hash_block: Any = None
    out: Any = None

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def request(self, tokens: int, *, transfer: str = "", like: Any = None) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.made += 1
        params: dict[str, Any] = {}
        if transfer:
            blocks = BlockTable.of(range(1, -(-tokens // BLOCK) + 1))
            grant = {"transfer": transfer, "first": (0,), "blocks": blocks, "tokens": tokens}
            ticket = make_ticket(PRODUCER, epoch=5, lease_s=30.0, **grant)
            params = {"do_remote_prefill": True, "kvx": {"ticket": ticket}}
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, 1)
        prompt = list(like.prompt_token_ids) if like else [100 * self.made + index for index in range(tokens)]
        made = Request(f"cmpl-{self.made}-0-0123abcd", prompt, sampling, None, block_hasher=self.hash_block)
        self.scheduler.add_request(made)
        return made

    def step(self, report: WorkerReport | None = None, *, finished: Any = (), failed: Any = ()) -> dict[str, Any]:
        """One step of the engine: schedule, let the workers say this, take every sampled token to be 7."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvx_vllm.connector import KvxWorkerMetadata

        self.out = self.scheduler.schedule()
        ids = list(self.out.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [7] if requests[i].num_computed_tokens >= requests[i].num_tokens else [] for i in ids if i in requests
        ]
        worker = KVConnectorOutput(
            finished_recving=set(finished),
            failed_recving=set(failed),
            kv_connector_worker_meta=None if report is None else KvxWorkerMetadata(report),
        )
        output = ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, sampled, kv_connector_output=worker)
        engine_outputs = self.scheduler.update_from_output(self.out, output)
        return {one.request_id: one for group in engine_outputs.values() for one in group.outputs}

    def run(self, steps: int = 20) -> dict[str, Any]:
        """Until nothing is left to do: the last output of each request."""
        last: dict[str, Any] = {}
        for _ in range(steps):
            if not self.scheduler.requests:
                break
            last |= self.step()
        return last

    def is_empty(self) -> bool:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        return (
            not self.scheduler.requests
            and not self.scheduler.running
            and not any(manager.req_to_blocks for manager in manager.coordinator.single_type_managers)
            and all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
            and self.free == POOL
        )


MakeEngine = Callable[[str], Engine]


@pytest.fixture
def make_engine(tiny_model: str) -> MakeEngine:
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvx_vllm.connector import KvxHandshake

    load_general_plugins()

    def make(policy: str) -> Engine:
        kvx = {"listen": "127.0.0.1:5700", "max_held_fraction": 1.0}
        transfer = KVTransferConfig(
            kv_connector="KvxConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=kvx,
        )
        config = EngineArgs(
            model=tiny_model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            block_size=BLOCK,
            max_num_batched_tokens=2048,
            async_scheduling=False,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = POOL + 1
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(POOL + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)
        scheduler.connector.set_xfer_handshake_metadata({0: KvxHandshake(9, "f" * 32)})
        init_none_hash(sha256)
        return Engine(scheduler, hash_block=get_request_block_hasher(BLOCK, sha256))

    return make


def ended(transfer: str, *, ok: bool, request: str = "", released: bool = True) -> WorkerReport:
    end = Ended(ok, Mode.PULL, Role.CONSUMER, None if ok else Reason.PEER_LOST)
    return WorkerReport({transfer: end}, {transfer: 1} if released else {}, frozenset({request} - {""}))


def waiting(request: Any) -> bool:
    return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")


def test_a_load_that_is_ok_computes_the_last_token_only(make_engine: MakeEngine) -> None:
    engine = make_engine("recompute")
    request = engine.request(100, transfer="t1")
    engine.step()
    assert waiting(request)
    engine.step(ended("t1", ok=True, request=request.request_id), finished=[request.request_id])
    engine.step()
    assert engine.out.num_scheduled_tokens == {request.request_id: 1}
    assert engine.run()[request.request_id].kv_transfer_params["kvx"]["ok"] is True
    assert engine.is_empty()


def test_a_failed_load_is_recomputed_and_its_blocks_wait_for_released(make_engine: MakeEngine) -> None:
    engine = make_engine("recompute")
    request = engine.request(100, transfer="t1")
    engine.request(70)
    engine.step()
    assert waiting(request)
    failed = [request.request_id]
    engine.step(ended("t1", ok=False, request=failed[0], released=False), finished=failed, failed=failed)
    engine.step()
    assert engine.out.num_scheduled_tokens[request.request_id] == 100
    answer = engine.run()
    assert answer[request.request_id].kv_transfer_params["kvx"]["reason"] == "peer_lost"
    assert engine.free == POOL - 4  # failing and freeing are two things
    engine.step(WorkerReport({}, {"t1": 1}))
    assert engine.is_empty()


def test_a_failed_load_fails_its_request_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("fail")
    request, other = engine.request(100, transfer="t1"), engine.request(70, transfer="t2")
    engine.step()
    failed = [request.request_id]
    outputs = engine.step(ended("t1", ok=False, request=failed[0]), finished=failed, failed=failed)
    assert outputs[request.request_id].finish_reason.name == "ERROR"
    engine.step(ended("t2", ok=True, request=other.request_id), finished=[other.request_id])
    assert engine.run()[other.request_id].finish_reason.name == "LENGTH"
    assert engine.is_empty()


@pytest.mark.parametrize(("ok", "computed"), [(False, 100), (True, 4)])
def test_only_blocks_of_a_load_that_was_ok_are_found_in_the_prefix_cache(
    make_engine: MakeEngine, ok: bool, computed: int
) -> None:
    engine = make_engine("fail")
    request = engine.request(100, transfer="t1")
    engine.step()
    over = [request.request_id]
    engine.step(ended("t1", ok=ok, request=over[0]), finished=over, failed=[] if ok else over)
    engine.run()
    again = engine.request(100, like=request)
    engine.step()
    assert engine.out.num_scheduled_tokens == {again.request_id: computed}
    engine.run()
    assert engine.is_empty()


def test_two_loads_of_one_prompt_share_no_block_and_one_fails_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("fail")
    request = engine.request(100, transfer="t1")
    other = engine.request(100, transfer="t2", like=request)
    engine.step()
    assert waiting(request) and waiting(other)
    manager = engine.scheduler.kv_cache_manager
    own, others = (set(manager.get_block_ids(one.request_id)[0]) for one in (request, other))
    assert (len(own), len(others), own & others) == (4, 4, set())
    failed = [request.request_id]
    engine.step(ended("t1", ok=False, request=failed[0]), finished=failed, failed=failed)
    engine.step(ended("t2", ok=True, request=other.request_id), finished=[other.request_id])
    engine.step()
    assert engine.out.num_scheduled_tokens == {other.request_id: 1}
    assert engine.run()[other.request_id].finish_reason.name == "LENGTH"
    assert engine.is_empty()


@pytest.mark.parametrize("ok", [True, False])
def test_an_aborted_load_keeps_its_blocks_until_the_workers_say_so(make_engine: MakeEngine, ok: bool) -> None:
    from vllm.v1.request import RequestStatus

    engine = make_engine("recompute")
    request = engine.request(100, transfer="t1")
    engine.step()
    engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert engine.free == POOL - 4
    late = [request.request_id]
    engine.step(ended("t1", ok=ok, request=late[0]), finished=late, failed=[] if ok else late)
    assert engine.is_empty()
    # Said once more, or of nobody: vLLM would die of it.
    engine.step(WorkerReport(told=frozenset({"cmpl-gone"})), finished=["cmpl-gone"])
    assert engine.is_empty()


def test_a_load_that_waits_for_room_begins_when_there_is_some(make_engine: MakeEngine) -> None:
    engine = make_engine("recompute")
    large, request = engine.request(1990, transfer="t1"), engine.request(100, transfer="t2")
    engine.step()
    assert waiting(large)
    assert not waiting(request)
    engine.step(ended("t1", ok=True, request=large.request_id), finished=[large.request_id])
    for _ in range(4):
        engine.step()
    assert waiting(request)
    engine.step(ended("t2", ok=True, request=request.request_id), finished=[request.request_id])
    engine.run()
    assert engine.is_empty()


def test_a_ticket_is_made_of_the_blocks_that_were_computed_and_they_wait_for_released(make_engine: MakeEngine) -> None:
    engine = make_engine("recompute")
    request = engine.request(70)
    request.kv_transfer_params = {"do_remote_decode": True}
    engine.scheduler.connector._scheduler.on_new_request(request)
    answer = engine.run()[request.request_id]
    assert answer.kv_transfer_params["do_remote_prefill"] is True
    assert engine.free == POOL - 3
    (transfer,) = engine.scheduler.connector._scheduler._transfers
    engine.step(WorkerReport({transfer: Ended(True, Mode.PULL, Role.PRODUCER)}, {transfer: 1}))
    assert engine.is_empty()
