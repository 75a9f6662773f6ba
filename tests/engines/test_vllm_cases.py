"""What one client's request can be: turns of a conversation, several sequences or prompts, salts, the longest prompt.

The oracle is a vLLM without kvx: here blocks go both ways, and a server that takes part could only confirm itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from kvx.cluster import free_ports
from kvx.core.model import Mode
from kvx.driver import Launch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

MODES = [Mode.PULL, Mode.PUSH]
UPSTREAM = ("test_edge_cases.py", "toy_proxy_server.py")
EMPTY = {"total": 64, "free": 64, "held": 0}


@frozen
class Servers:
    """`multi` has kvx and vLLM's OffloadingConnector in a MultiConnector."""

    prefill: Any
    decode: Any
    multi: Any
    single: Any

    def wanted(self, body: dict[str, Any]) -> list[int]:
        tokens: list[int] = self.single.post(body).tokens
        return tokens


@pytest.fixture(scope="module")
def servers(bench: Any) -> Iterator[Servers]:
    offload = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "host_offload",
            "cpu_bytes_to_use": 256 << 20,
        },
    }
    kvx = {
        "kv_connector": "KvxConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": "127.0.0.1:{control}", "max_held_fraction": 1.0},
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [kvx, offload]},
    }
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    multi_env = {"PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"}
    multi = bench.start("multi", "--kv-transfer-config", json.dumps(config), env=multi_env)
    made = Servers(bench.start("prefill"), bench.start("decode"), multi, bench.start_single("single"))
    bench.cluster.wait_ready(timeout_s=900)
    yield made
    for instance in (made.prefill, made.decode, made.multi):
        assert bench.until(lambda instance=instance: not instance.status()["open"], 60), instance.status()


def both_pools_are_full(bench: Any, servers: Servers) -> bool:
    pair = (servers.prefill, servers.decode)
    return bool(bench.until(lambda: all(instance.blocks() == EMPTY for instance in pair), 20))


# ------------------------------------------------------------------ a second turn


def test_a_second_turn_takes_the_decode_servers_blocks_back_by_pull(bench: Any, servers: Servers, keep: Any) -> None:
    prefill, decode = servers.prefill, servers.decode
    prompt, question = bench.prompts(41, [100, 31])
    body = bench.completion(prompt, 40)
    first = prefill.post(bench.dialect.prefill_leg(body, Mode.PULL, ""))
    leg = bench.dialect.decode_leg(body, Mode.PULL, "", prefill_answer=first.body)
    leg["kv_transfer_params"]["do_remote_decode"] = True
    answer = decode.post(leg)
    assert answer.tokens == servers.wanted(body)
    assert answer.kvx["loaded"]["ok"] is True
    # The answer's parameters go to the prefill server as they are, but for who continues.
    body = bench.completion([*prompt, *answer.tokens, *question], 16)
    leg = bench.dialect.prefill_leg(body, Mode.PULL, "")
    leg["kv_transfer_params"] = {**answer.body["kv_transfer_params"], "do_remote_decode": True}
    second = prefill.post(leg)
    again = decode.post(bench.dialect.decode_leg(body, Mode.PULL, "", prefill_answer=second.body))
    row = {"prefill": second.kvx["loaded"], "decode": again.kvx, "equal": again.tokens == servers.wanted(body)}
    keep("vllm_second_turn_pull", row)
    assert row["equal"]
    # 139 tokens are computed at D; P has three whole blocks of its own, and takes the two that remain.
    assert (row["prefill"]["ok"], row["prefill"]["bytes"]) == (True, bench.moved(139 - 96))
    assert row["prefill"]["computed_tokens"] == 171 - 139
    assert (again.kvx["ok"], again.kvx["bytes"]) == (True, bench.moved(171 - 128))
    assert both_pools_are_full(bench, servers)


def test_a_second_turn_by_push_in_both_directions(bench: Any, servers: Servers, keep: Any) -> None:
    prefill, decode = servers.prefill, servers.decode
    prompt, question = bench.prompts(42, [100, 31])
    body = bench.completion(prompt, 40)
    answer = bench.serve(prefill, decode, body, Mode.PUSH).decode
    assert answer.tokens == servers.wanted(body)
    history = [*prompt, *answer.tokens]
    body = bench.completion([*history, *question], 16)
    back, forth = secrets.token_hex(8), secrets.token_hex(8)
    taken = {"mode": "push", "transfer": back, "from": decode.control, "tokens": len(history)}
    onward = {"mode": "push", "transfer": forth}
    both = {"do_remote_prefill": True, "do_remote_decode": True, "kvx": {**taken, "next": onward}}
    with ThreadPoolExecutor(3) as pool:
        last = pool.submit(
            decode.post, bench.dialect.decode_leg(body, Mode.PUSH, forth, prefill_address=prefill.control)
        )
        middle = pool.submit(prefill.post, {**body, "max_tokens": 1, "kv_transfer_params": both})
        decode.post(bench.dialect.prefill_leg(bench.completion(history), Mode.PUSH, back))
        second, again = middle.result(), last.result()
    outcomes = prefill.outcomes()
    row = {"prefill": outcomes[back], "decode": again.kvx, "equal": again.tokens == servers.wanted(body)}
    keep("vllm_second_turn_push", row)
    assert row["equal"]
    assert second.kvx["loaded"]["computed_tokens"] == len(question)
    assert (row["prefill"]["ok"], row["prefill"]["role"], row["prefill"]["bytes"]) == (
        True,
        "consumer",
        bench.moved(140 - 96),
    )
    assert again.kvx["ok"] is True
    assert both_pools_are_full(bench, servers)


# ------------------------------------------------------------------ several of vLLM's requests for one of the client


@pytest.mark.parametrize("mode", MODES)
def test_several_sequences_of_one_prompt(bench: Any, servers: Servers, mode: Mode) -> None:
    """Greedy sampling allows one only; the most probable token is the same by another name."""
    (prompt,) = bench.prompts(43 if mode is Mode.PULL else 44, [100])
    body = {**bench.completion(prompt), "temperature": 1, "top_k": 1, "n": 3}
    served = bench.serve(servers.prefill, servers.decode, body, mode).decode
    wanted = servers.wanted(bench.completion(prompt))
    assert [choice["token_ids"] for choice in served.body["choices"]] == [wanted] * 3
    assert both_pools_are_full(bench, servers)


def test_a_prefill_of_several_sequences_is_refused_with_a_sentence(bench: Any, servers: Servers) -> None:
    (prompt,) = bench.prompts(45, [100])
    params = {"do_remote_decode": True}
    body = {**bench.completion(prompt, 1), "temperature": 1, "top_k": 1, "n": 2, "kv_transfer_params": params}
    answer = servers.prefill.post(body)
    assert answer.status == 200
    assert "n is more than 1" in answer.kvx["detail"]
    assert servers.prefill.blocks() == EMPTY


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_one_request_never_take_one_anothers_blocks(bench: Any, servers: Servers, mode: Mode) -> None:
    prompts = bench.prompts(46 if mode is Mode.PULL else 47, [100, 100, 100])
    body = {**bench.completion(prompts[0]), "prompt": prompts}
    served = bench.serve(servers.prefill, servers.decode, body, mode).decode
    wanted = [servers.wanted(bench.completion(prompt)) for prompt in prompts]
    assert [choice["token_ids"] for choice in served.body["choices"]] == wanted
    assert both_pools_are_full(bench, servers)


def test_a_ticket_of_another_prompt_is_refused(bench: Any, servers: Servers) -> None:
    one, other = bench.prompts(48, [100, 100])
    first = servers.prefill.post(bench.dialect.prefill_leg(bench.completion(one), Mode.PULL, ""))
    leg = bench.dialect.decode_leg(bench.completion(other), Mode.PULL, "", prefill_answer=first.body)
    answer = servers.decode.post(leg)
    assert answer.tokens == servers.wanted(bench.completion(other))
    assert answer.kvx["ok"] is False
    assert "another prompt" in answer.kvx["detail"]
    assert answer.kvx["reason"] == "prompt"
    right = servers.decode.post({**leg, "prompt": one})
    assert right.kvx["ok"] is True
    assert right.tokens == servers.wanted(bench.completion(one))


def test_a_push_of_another_prompt_of_the_same_length_moves_no_byte(bench: Any, servers: Servers, keep: Any) -> None:
    one, other = bench.prompts(59, [300, 300])
    transfer, dialect = secrets.token_hex(8), bench.dialect
    leg = dialect.decode_leg(bench.completion(other), Mode.PUSH, transfer, prefill_address=servers.prefill.control)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(servers.prefill.post, dialect.prefill_leg(bench.completion(one), Mode.PUSH, transfer))
        answer = pool.submit(servers.decode.post, leg).result()
    ends = {name: getattr(servers, name).outcomes()[transfer] for name in ("prefill", "decode")}
    row = {"equal": answer.tokens == servers.wanted(bench.completion(other)), "decode": answer.kvx, "outcomes": ends}
    keep("vllm_push_of_another_prompt", row)
    assert row["equal"]
    assert first.result().status == 200
    assert (answer.kvx["ok"], answer.kvx["reason"], answer.kvx["computed_tokens"]) == (False, "prompt", 300)
    assert [(end["reason"], end["bytes"] if name == "prefill" else 0) for name, end in ends.items()] == [
        ("prompt", 0)
    ] * 2
    assert both_pools_are_full(bench, servers)


# ------------------------------------------------------------------ lengths, salts, pressure


@pytest.mark.parametrize("mode", MODES)
def test_the_longest_prompt_that_vllm_takes(bench: Any, servers: Servers, mode: Mode) -> None:
    """2047 of 2048 tokens: every block of either pool."""
    (prompt,) = bench.prompts(49 if mode is Mode.PULL else 50, [2047])
    body = bench.completion(prompt, 1)
    served = bench.serve(servers.prefill, servers.decode, body, mode).decode
    assert served.tokens == servers.wanted(body)
    assert (served.kvx["ok"], served.kvx["bytes"], served.kvx["computed_tokens"]) == (True, bench.moved(2047), 1)
    assert both_pools_are_full(bench, servers)


@pytest.mark.parametrize("mode", MODES)
def test_cache_salts_keep_requests_apart(bench: Any, servers: Servers, keep: Any, mode: Mode) -> None:
    (prompt,) = bench.prompts(51 if mode is Mode.PULL else 52, [130])
    wanted = servers.wanted(bench.completion(prompt))
    rows = []
    for salt in ("a", "a", "b"):
        served = bench.serve(servers.prefill, servers.decode, bench.completion(prompt, cache_salt=salt), mode).decode
        rows.append({"salt": salt, "equal": served.tokens == wanted, **served.kvx})
    keep(f"vllm_cache_salt_{mode.value}", rows)
    assert [row["equal"] and row["ok"] for row in rows] == [True] * 3
    assert [row["bytes"] for row in rows] == [bench.moved(130), bench.moved(2), bench.moved(130)]


@pytest.mark.parametrize("mode", MODES)
def test_preemption_at_the_decode_server(bench: Any, servers: Servers, keep: Any, mode: Mode) -> None:
    """Eight answers that grow at once do not fit; who is preempted computes again."""
    work = bench.prompts(53 if mode is Mode.PULL else 54, [150] * 8)
    before = servers.decode.preemptions()
    with ThreadPoolExecutor(8) as pool:
        bodies = [bench.completion(prompt, 180) for prompt in work]
        served = list(pool.map(lambda body: bench.serve(servers.prefill, servers.decode, body, mode), bodies))
    preempted = servers.decode.preemptions() - before
    rows = [
        {"equal": one.decode.tokens == servers.wanted(body), **one.decode.kvx}
        for one, body in zip(served, bodies, strict=True)
    ]
    keep(f"vllm_preempted_decode_{mode.value}", {"preemptions": preempted, "rows": rows})
    assert preempted > 0
    assert [row["equal"] for row in rows] == [True] * 8
    assert both_pools_are_full(bench, servers)


@pytest.mark.parametrize("mode", MODES)
def test_preemption_at_the_prefill_server(bench: Any, servers: Servers, keep: Any, mode: Mode) -> None:
    """Long answers of the prefill server's own grow while prompts come in chunks: the youngest is preempted."""
    own = [bench.completion(prompt, 220) for prompt in bench.prompts(55, [200] * 5)]
    long = bench.prompts(56 if mode is Mode.PULL else 57, [700] * 12)
    before, rows = servers.prefill.preemptions(), []
    with ThreadPoolExecutor(8) as pool:
        for prompt in long:
            growing = [pool.submit(servers.prefill.post, body) for body in own]
            time.sleep(0.3)
            body = bench.completion(prompt)
            served = bench.serve(servers.prefill, servers.decode, body, mode)
            rows.append({"equal": served.decode.tokens == servers.wanted(body), **served.decode.kvx})
            grown = [one.result().tokens for one in growing]
            preempted = servers.prefill.preemptions() - before
            if len(rows) >= 3 and preempted > 0:
                break
    keep(f"vllm_preempted_prefill_{mode.value}", {"preemptions": preempted, "rows": rows})
    assert preempted > 0
    assert [row["equal"] for row in rows] == [True] * len(rows)
    assert grown == [servers.wanted(body) for body in own]
    assert both_pools_are_full(bench, servers)


# ------------------------------------------------------------------ what an operator sees


def test_metrics_and_log_lines(bench: Any, servers: Servers, keep: Any) -> None:
    decode, prefill = servers.decode, servers.prefill
    good = 'vllm:kvx_transfers_total{mode="push",outcome="ok",role="%s"}'
    moved = 'vllm:kvx_bytes_total{mode="push",role="%s"}'
    before = {"decode": decode.metrics(), "prefill": prefill.metrics()}
    (prompt,) = bench.prompts(58, [300])
    transfer = secrets.token_hex(8)
    bench.serve(prefill, decode, bench.completion(prompt), Mode.PUSH, transfer=transfer)
    refused = {"do_remote_prefill": True, "kvx": {"ticket": "kvx1.AAAA"}}
    decode.post({**bench.completion(prompt), "kv_transfer_params": refused})
    for instance, name, role in ((decode, "decode", "consumer"), (prefill, "prefill", "producer")):
        due = before[name][good % role] + 1
        assert bench.until(lambda: instance.metrics()[good % role] == due, 10), name  # noqa: B023
    after = {"decode": decode.metrics(), "prefill": prefill.metrics()}
    shown = {key: {name: value for name, value in one.items() if "kvx" in name} for key, one in after.items()}
    keep("vllm_metrics", shown)
    for name, role in (("decode", "consumer"), ("prefill", "producer")):
        assert after[name][good % role] == before[name][good % role] + 1
        assert after[name][moved % role] == before[name][moved % role] + bench.moved(300)
        assert after[name]["vllm:kvx_held_blocks{}"] == 0
        assert after[name]["vllm:kvx_open_transfers{}"] == 0
    refusals = 'vllm:kvx_refused_total{reason="auth"}'
    assert after["decode"][refusals] == before["decode"].get(refusals, 0) + 1
    line = f"kvx: transfer {transfer} of request cmpl-"
    assert bench.until(lambda: line in decode.log() and line in prefill.log(), 10)


# ------------------------------------------------------------------ upstream's own judge


@pytest.mark.skipif("UPSTREAM_TESTS" not in os.environ, reason="UPSTREAM_TESTS names no folder with upstream's files")
def test_upstreams_edge_cases_through_its_own_proxy(bench: Any, servers: Servers, keep: Any) -> None:
    """test_edge_cases.py and toy_proxy_server.py of vllm's tests/v1/kv_connector/nixl_integration, as they are."""
    folder = Path(os.environ["UPSTREAM_TESTS"])
    (port,) = free_ports(1)
    ports = {"PREFILL": servers.prefill.server.port, "DECODE": servers.decode.server.port, "PROXY": port}
    command = [sys.executable, str(folder / "toy_proxy_server.py"), "--port", str(port)]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(ports["PREFILL"])]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(ports["DECODE"])]
    before = len(servers.decode.outcomes())
    proxy = bench.cluster.start("proxy", Launch(tuple(command), {}, "/healthcheck"), f"http://127.0.0.1:{port}")
    try:
        bench.cluster.wait_ready(proxy)
        env = {**os.environ, **{f"{name}_PORT": str(number) for name, number in ports.items()}}
        judge = (sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(folder / "test_edge_cases.py"))
        done = subprocess.run(judge, check=False, env=env, capture_output=True, text=True, timeout=240)
    finally:
        bench.cluster.stop(proxy)
    ends = [{"ok": end["ok"], "bytes": end["bytes"]} for end in list(servers.decode.outcomes().values())[before:]]
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in UPSTREAM}
    keep("vllm_upstream_edge_cases", {"status": done.returncode, "files": digests, "transfers": ends})
    assert done.returncode == 0, done.stdout
    assert [end["ok"] for end in ends] == [True] * 3


# ------------------------------------------------------------------ beside another connector


@pytest.mark.parametrize("mode", MODES)
def test_beside_vllms_offloading_connector(bench: Any, servers: Servers, keep: Any, mode: Mode) -> None:
    """What came through kvx is offloaded, and later found there: vLLM waits for that load too."""
    multi = servers.multi
    prompt, other = bench.prompts(59 if mode is Mode.PULL else 60, [300, 100])
    body = bench.completion(prompt)
    wanted = servers.wanted(body)
    served = bench.serve(servers.prefill, multi, body, mode).decode
    assert served.tokens == wanted
    assert (served.kvx["ok"], served.kvx["bytes"]) == (True, bench.moved(300))
    hits = "vllm:external_prefix_cache_hits_total{}"
    before = multi.metrics()[hits]
    with contextlib.closing(multi.connect()) as connection:
        connection.request("POST", "/reset_prefix_cache")
        assert connection.getresponse().status == 200
    again = multi.post(body)
    bench.until(lambda: multi.metrics()[hits] - before >= 256, 10)
    found = multi.metrics()[hits] - before
    # Both have the first blocks now: kvx comes first in the list, and what it brings is not asked of the other.
    third = bench.serve(servers.prefill, multi, bench.completion(prompt[:280] + other), mode).decode
    keep(
        f"vllm_offloading_{mode.value}",
        {"first": served.kvx, "offloaded_tokens_found": found, "third": third.kvx},
    )
    assert again.tokens == wanted
    assert found >= 256
    assert third.tokens == servers.wanted(bench.completion(prompt[:280] + other))
    assert third.kvx["ok"] is True
    good = f'vllm:kvx_transfers_total{{mode="{mode.value}",outcome="ok",role="consumer"}}'
    assert bench.until(lambda: multi.metrics()[good] >= 2, 10)
    assert bench.until(lambda: multi.blocks() == EMPTY, 20)
