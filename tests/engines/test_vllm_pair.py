"""A prefill and a decode server of vLLM over kvx_tcp; the prefill server without parameters is the oracle."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LENGTHS = [2, 3, 5, 8, 16, 30, 31, 32, 33, 34, 63, 64, 65, 96, 97, 100, 128, 200, 257, 700]
MODES = [Mode.PULL, Mode.PUSH]


@pytest.fixture(scope="module")
def pair(bench: Any) -> Iterator[tuple[Any, Any]]:
    prefill, decode = bench.start("prefill"), bench.start("decode")
    # A second decode server that fails requests where the first one recomputes them, loaded by its module's path.
    config = {
        "kv_connector": "KvxConnector",
        "kv_connector_module_path": "kvx_vllm.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"listen": "127.0.0.1:{control}"},
    }
    bench.start("strict", "--kv-transfer-config", json.dumps(config))
    bench.cluster.wait_ready(timeout_s=480)
    yield prefill, decode
    settled = bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 60)
    assert settled, (prefill.status(), decode.status())


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_single_vllm(bench: Any, pair: Any, keep: Any, mode: Mode) -> None:
    prefill, decode = pair
    rows = []
    for prompt in bench.prompts(1 if mode is Mode.PULL else 2, LENGTHS):
        served = bench.serve(prefill, decode, bench.completion(prompt, 16), mode)
        wanted = prefill.post(bench.completion(prompt, 16)).tokens
        row = {"tokens": len(prompt), "equal": served.decode.tokens == wanted, **served.decode.kvx}
        rows.append({**row, "expected_bytes": bench.moved(len(prompt))})
    keep(f"vllm_tokens_{mode.value}", {"mode": mode.value, "requests": rows, "decode": decode.probe()["counters"]})
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    # Equal tokens alone could be a recompute: the bytes came, and the decode server computed the last token only.
    assert {row["ok"] for row in rows} == {True}
    assert [row["bytes"] for row in rows] == [row["expected_bytes"] for row in rows]
    assert {row["computed_tokens"] for row in rows} == {1}


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_of_one_token(bench: Any, pair: Any, mode: Mode) -> None:
    prefill, decode = pair
    wanted = prefill.post(bench.completion([77])).tokens
    served = bench.serve(prefill, decode, bench.completion([77]), mode)
    assert served.decode.tokens == wanted
    assert served.decode.kvx["ok"] is True
    assert served.decode.kvx["computed_tokens"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_five_at_once_with_chunked_prefill(bench: Any, pair: Any, keep: Any, mode: Mode) -> None:
    prefill, decode = pair
    work = bench.prompts(12 if mode is Mode.PULL else 13, [700, 33, 400, 64, 257])
    with ThreadPoolExecutor(5) as pool:
        served = list(pool.map(lambda prompt: bench.serve(prefill, decode, bench.completion(prompt), mode), work))
    wanted = [prefill.post(bench.completion(prompt)).tokens for prompt in work]
    rows = [
        {"equal": one.decode.tokens == tokens, **one.decode.kvx} for one, tokens in zip(served, wanted, strict=True)
    ]
    keep(f"vllm_concurrent_{mode.value}", rows)
    assert [row["equal"] for row in rows] == [True] * 5
    assert [row["ok"] for row in rows] == [True] * 5


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hits_of_either_side(bench: Any, pair: Any, keep: Any, mode: Mode) -> None:
    """The decode server takes only what it lacks; the producer hands over what it found in its own cache."""
    prefill, decode = pair
    common, *tails = bench.prompts(14 if mode is Mode.PULL else 15, [128, 172, 172, 5])
    rows = []
    for tail, taken in zip(tails, (300, 172, 5), strict=True):
        body = bench.completion(common + tail)
        served = bench.serve(prefill, decode, body, mode)
        wanted = prefill.post(body).tokens
        row = {"tokens": len(common + tail), "equal": served.decode.tokens == wanted, **served.decode.kvx}
        rows.append({**row, "expected_bytes": bench.moved(taken)})
    again = bench.serve(prefill, decode, body, mode)
    rows.append(
        {"tokens": 133, "equal": again.decode.tokens == wanted, **again.decode.kvx, "expected_bytes": bench.moved(5)}
    )
    keep(f"vllm_prefix_hits_{mode.value}", rows)
    assert [row["equal"] and row["ok"] for row in rows] == [True] * 4
    assert [row["bytes"] for row in rows] == [row["expected_bytes"] for row in rows]


def test_a_sequential_proxy_that_knows_nothing_of_kvx(bench: Any, pair: Any) -> None:
    """As upstream's proxies do it: P with the remote keys null, its answer's parameters to D as they are."""
    prefill, decode = pair
    (prompt,) = bench.prompts(3, [100])
    wanted = prefill.post(bench.completion(prompt)).tokens
    ask = bench.completion(prompt)
    null = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    first = prefill.post(
        {
            **ask,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **null},
            "stream": False,
            "max_tokens": 1,
        }
    )
    second = decode.post({**ask, "kv_transfer_params": first.body["kv_transfer_params"]})
    assert second.tokens == wanted
    assert second.kvx["ok"] is True
    assert second.kvx["bytes"] == bench.moved(100)


def test_a_request_that_an_idle_decode_server_refuses_frees_the_producer(pair: Any, bench: Any, keep: Any) -> None:
    prefill, decode = pair
    (prompt,) = bench.prompts(4, [100])
    first = prefill.post(bench.dialect.prefill_leg(bench.completion(prompt), Mode.PULL, ""))
    assert bench.until(lambda: len(prefill.status()["open"]) == 1, 5), prefill.status()  # a step after the answer
    (held,) = prefill.status()["open"].values()
    started = time.monotonic()
    bad = {**bench.completion(prompt, 8), "temperature": -1, "kv_transfer_params": first.body["kv_transfer_params"]}
    refused = decode.post(bad)
    assert refused.status == 400
    answered = time.monotonic()
    assert bench.until(lambda: not prefill.status()["open"], 5)
    seen = time.monotonic()
    keep(
        "vllm_refused_before_admission",
        {
            "state_before": held,
            "lease_s": 10,
            "refused_after_s": answered - started,
            "free_after_answer_s": seen - answered,
        },
    )
    # A lease would have been needed otherwise; there is no other request that could have woken either engine.
    assert seen - answered < 5
    assert prefill.blocks() == {"total": 64, "free": 64, "held": 0}


BAD = [
    ({"do_remote_prefill": True, "kvx": {"ticket": "kvx1.AAAA"}}, "auth"),
    ({"do_remote_prefill": True, "kvx": ["?"]}, "other"),
    ({"do_remote_prefill": True, "remote_engine_id": "x", "remote_port": 7}, "unknown_transfer"),
    ({"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": "t", "from": "192.0.2.1:5700"}}, "auth"),
    ({"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": "t0", "from": "127.0.0.1:1"}}, "peer_lost"),
]


def test_bad_parameters_fail_one_request_with_a_reason(bench: Any, pair: Any, keep: Any) -> None:
    prefill, decode = pair
    rows = []
    for (params, reason), prompt in zip(BAD, bench.prompts(5, [40] * len(BAD)), strict=True):
        answer = decode.post({**bench.completion(prompt), "kv_transfer_params": params})
        equal = answer.tokens == prefill.post(bench.completion(prompt)).tokens
        rows.append({"status": answer.status, "equal": equal, "expected": reason, **answer.kvx})
    keep("vllm_bad_parameters", rows)
    assert [(row["status"], row["equal"], row["ok"], row["computed_tokens"]) for row in rows] == [
        (200, True, False, 40)
    ] * len(BAD)
    assert [row["reason"] for row in rows] == [row["expected"] for row in rows]


def test_a_transfer_that_fails_while_its_request_waits_for_room_does_not_hang(bench: Any, pair: Any) -> None:
    prefill, decode = pair
    large, prompt = bench.prompts(19, [1800, 400])
    bad = {"do_remote_prefill": True, "kvx": {"mode": "push", "transfer": secrets.token_hex(8), "from": "127.0.0.1:1"}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(decode.post, bench.completion(large, 200))
        assert bench.until(lambda: decode.blocks()["free"] < 10, 10), decode.blocks()
        answer = decode.post({**bench.completion(prompt), "kv_transfer_params": bad})
        assert running.result(120).status == 200
    assert answer.started < running.result().ended < answer.ended  # it had to wait for blocks
    assert answer.kvx["reason"] == "peer_lost"
    assert answer.tokens == prefill.post(bench.completion(prompt)).tokens


def test_policy_fail_fails_the_one_request(bench: Any, pair: Any) -> None:
    prefill, strict = pair[0], bench.instances["strict"]
    prompt, other = bench.prompts(16, [100, 70])
    body = bench.completion(prompt)
    served = bench.serve(prefill, strict, body, Mode.PULL).decode
    assert served.kvx["ok"] is True
    assert served.tokens == prefill.post(body).tokens
    for params, _ in BAD:
        assert strict.post({**bench.completion(other), "kv_transfer_params": params}).status == 500
    assert bench.serve(prefill, strict, bench.completion(other), Mode.PUSH).decode.kvx["ok"] is True
    assert bench.until(lambda: strict.blocks() == {"total": 64, "free": 64, "held": 0}, 10)


def test_a_prefill_that_is_abandoned_in_a_push_fails_it(bench: Any, pair: Any) -> None:
    """One that was over when its client left is done again with another prompt."""
    prefill, decode = pair
    reasons = []
    for prompt in bench.prompts(18, [1900] * 8):
        body, transfer = bench.completion(prompt), secrets.token_hex(8)
        with ThreadPoolExecutor(1) as pool:
            leg = bench.dialect.decode_leg(body, Mode.PUSH, transfer, prefill_address=prefill.control)
            waiting = pool.submit(decode.post, leg)
            prefill.enter(bench.dialect.prefill_leg(body, Mode.PUSH, transfer))
            assert bench.until(lambda: transfer in prefill.status()["open"] or waiting.done(), 20)  # noqa: B023
            prefill.leave()
            answer = waiting.result(120)
        assert answer.tokens == prefill.post(body).tokens
        reasons.append(answer.kvx.get("reason"))
        if "aborted" in reasons:
            break
    assert "aborted" in reasons, reasons
    leaves_nothing_behind(bench, pair)


def test_a_prefill_that_is_abandoned_in_a_pull_leaves_nothing_behind(bench: Any, pair: Any) -> None:
    prefill, _ = pair
    (prompt,) = bench.prompts(17, [1900])
    prefill.abandon(bench.dialect.prefill_leg(bench.completion(prompt), Mode.PULL, secrets.token_hex(8)), 0.2)
    leaves_nothing_behind(bench, pair)


def leaves_nothing_behind(bench: Any, pair: Any) -> None:
    prefill, decode = pair
    assert bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 20)
    assert bench.until(lambda: prefill.blocks() == {"total": 64, "free": 64, "held": 0}, 10)
    assert bench.until(lambda: decode.blocks() == {"total": 64, "free": 64, "held": 0}, 10)


def test_a_ticket_is_good_for_one_read(pair: Any, bench: Any) -> None:
    prefill, decode = pair
    (prompt,) = bench.prompts(6, [70])
    first = prefill.post(bench.dialect.prefill_leg(bench.completion(prompt), Mode.PULL, ""))
    leg = {**bench.completion(prompt), "kv_transfer_params": first.body["kv_transfer_params"]}
    one, two = decode.post(leg), decode.post(leg)
    assert one.kvx["ok"] is True
    assert two.kvx["ok"] is False
    assert one.tokens == two.tokens


@pytest.mark.parametrize("late", ["decode", "prefill"])
def test_push_overlaps_prefill_whoever_comes_first(bench: Any, pair: Any, keep: Any, late: str) -> None:
    prefill, decode = pair
    rows = []
    for prompt in bench.prompts(7 if late == "decode" else 8, [700] * 5):
        wanted = prefill.post(bench.completion(prompt)).tokens
        delay = {f"{late}_delay_s": 0.05}
        served = bench.serve(prefill, decode, bench.completion(prompt), Mode.PUSH, **delay)
        rows.append({"late": late, "equal": served.decode.tokens == wanted, **served.decode.kvx})
    keep(f"vllm_push_{late}_late", rows)
    assert [row["equal"] and row["ok"] for row in rows] == [True] * 5


def test_two_hundred_mixed_requests_of_which_a_fifth_is_abandoned(bench: Any, pair: Any, keep: Any) -> None:
    prefill, decode = pair
    draw = random.Random(9)  # noqa: S311
    work = bench.prompts(10, [draw.choice([2, 31, 32, 33, 64, 100, 257, 700]) for _ in range(200)])
    wanted = [prefill.post(bench.completion(prompt)).tokens for prompt in work]
    leaving = set(draw.sample(range(200), 40))
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def one(index: int) -> None:
        prompt, mode = work[index], MODES[index % 2]
        row: dict[str, Any] = {"index": index, "tokens": len(prompt), "mode": mode.value}
        if index not in leaving:
            served = bench.serve(prefill, decode, bench.completion(prompt), mode)
            row |= {"equal": served.decode.tokens == wanted[index], **served.decode.kvx}
        else:
            row |= {"left": leave(prompt, mode, random.Random(index))}  # noqa: S311
        with lock:
            rows.append(row)

    def leave(prompt: list[int], mode: Mode, chance: random.Random) -> str:
        transfer, body = secrets.token_hex(8), bench.completion(prompt, 40)
        after_s = chance.uniform(0.0, 0.3)
        prefill_leg = bench.dialect.prefill_leg(body, mode, transfer)
        if mode is Mode.PULL:
            if chance.random() < 0.3:
                prefill.abandon(prefill_leg, after_s)
                return "pull, prefill"
            first = prefill.post(prefill_leg)
            decode.abandon(bench.dialect.decode_leg(body, mode, transfer, prefill_answer=first.body), after_s)
            return "pull, decode"
        decode_leg = bench.dialect.decode_leg(body, mode, transfer, prefill_address=prefill.control)
        with ThreadPoolExecutor(2) as both:
            gone = both.submit(decode.abandon, decode_leg, after_s)
            both.submit(prefill.abandon, prefill_leg, chance.uniform(0.0, 0.3)).result()
            gone.result()
        return "push, both"

    started = time.monotonic()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(200)))
    seconds = time.monotonic() - started
    assert bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 60)
    stayed = [row for row in rows if "left" not in row]
    summary = {
        "requests": len(rows),
        "abandoned": len(rows) - len(stayed),
        "equal": sum(row["equal"] for row in stayed),
        "ok": sum(row["ok"] is True for row in stayed),
        "failed": sum(row["ok"] is False for row in stayed),
        "seconds": seconds,
        "prefill": prefill.probe(),
        "decode": decode.probe(),
    }
    keep("vllm_two_hundred", {**summary, "rows": sorted(rows, key=lambda row: int(row["index"]))})
    assert summary["equal"] == len(stayed) == 160
    full = {"total": 64, "free": 64, "held": 0}
    for instance in pair:
        assert bench.until(lambda instance=instance: instance.blocks() == full, 10), instance.blocks()


def test_a_killed_producer_is_replaced_without_a_restart_of_the_survivor(bench: Any, pair: Any, keep: Any) -> None:
    prefill, decode = pair
    (prompt,) = bench.prompts(11, [300])
    wanted = prefill.post(bench.completion(prompt)).tokens
    before = prefill.probe()
    first = prefill.post(bench.dialect.prefill_leg(bench.completion(prompt), Mode.PULL, ""))
    prefill.child.signal(9)
    leg = {**bench.completion(prompt), "kv_transfer_params": first.body["kv_transfer_params"]}
    started = time.monotonic()
    orphan = decode.post(leg)
    lost_s = time.monotonic() - started
    assert orphan.tokens == wanted
    assert orphan.kvx["ok"] is False
    bench.restart("prefill")
    after = prefill.probe()
    assert after["instance"] == before["instance"]
    assert after["epoch"] != before["epoch"]
    served = {mode: bench.serve(prefill, decode, bench.completion(prompt), mode) for mode in MODES}
    keep(
        "vllm_killed_producer",
        {
            "orphan": orphan.kvx,
            "orphan_answered_after_s": lost_s,
            "epochs": [before["epoch"], after["epoch"]],
            "after_restart": {mode.value: one.decode.kvx for mode, one in served.items()},
        },
    )
    for one in served.values():
        assert one.decode.tokens == wanted
        assert one.decode.kvx["ok"] is True
    assert bench.until(lambda: decode.blocks()["free"] == 64, 10), decode.blocks()
