"""Aborts, kills and refusals: failed requests end in bounded time with a reason, and servers live on."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvx.config import Options, bounds
from kvx.core.model import Role

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SLACK_S = 10.0
"""For a scheduler that is busy, an HTTP answer, and two cores for five servers."""


@pytest.fixture(autouse=True)
def _at_rest_afterwards(bench: Any, pair: Any) -> Any:
    """Whatever a test has done: all pages are free again, and the next request is served right."""
    yield
    for switch in ("hold", "mute"):
        bench.turn(switch, on=False)
    assert bench.until(pair.idle, 60), (
        pair.prefill.loads(),
        pair.decode.loads(),
        pair.prefill.status(),
        pair.decode.status(),
    )
    (prompt,) = bench.prompts(int(time.monotonic_ns()), [100])
    body = bench.completion(prompt)
    served = bench.serve(pair.prefill, pair.decode, body)
    assert served.decode.status == 200, served.decode.text
    assert served.decode.tokens == pair.single.post(body).tokens


def bound(pair: Any, what: str) -> float:
    return bounds(Options.load(pair.decode.server.options, env={}))[what]


def open_states(instance: Any) -> set[str]:
    return {state for legs in instance.status()["open"].values() for state in legs}


def has_requests(instance: Any) -> bool:
    """Whether its scheduler has any, in whatever queue."""
    return any(value for value in instance.loads().values() if isinstance(value, int))


@pytest.mark.parametrize("state", ["exposed", "moving", "settling"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_in_each_state(bench: Any, pair: Any, keep: Any, state: str, side: str) -> None:
    """`exposed`: only this side has the request. `moving`: posts are held back. `settling`: completions are."""
    rows = []
    for number, prompt in enumerate(bench.prompts(10, [200] * 3)):
        rid = f"{state}-{side}-{number}-{time.monotonic_ns()}"
        body = bench.completion(prompt, rid=rid)
        bench.turn("hold", on=state == "moving")
        bench.turn("mute", on=state == "settling")
        first, second = bench.legs(pair.prefill, body)
        victim = getattr(pair, side)
        with ThreadPoolExecutor(2) as pool:
            asked = {}
            if state != "exposed" or side == "prefill":
                asked["prefill"] = pool.submit(pair.prefill.post, first)
            if state != "exposed" or side == "decode":
                asked["decode"] = pool.submit(pair.decode.post, second)
            if state != "exposed":
                assert bench.until(lambda: "moving" in open_states(pair.prefill), 20), pair.prefill.status()
                time.sleep(0.3)
            elif side == "decode":
                assert bench.until(lambda: "exposed" in open_states(pair.decode), 20), pair.decode.status()
            else:
                assert bench.until(lambda: has_requests(pair.prefill), 20), pair.prefill.loads()
            aborted = time.monotonic()
            victim.abort(rid)
            time.sleep(0.2)
            bench.turn("hold", on=False)
            bench.turn("mute", on=False)
            answers = {name: one.result(60) for name, one in asked.items()}
            seconds = time.monotonic() - aborted
        told = {name: [answer.status, answer.text[:300]] for name, answer in answers.items()}
        rows.append({"seconds": seconds, **told})
        assert answers[side].status != 200 or "abort" in answers[side].text, told
        assert seconds < bound(pair, "an abort") + SLACK_S
    keep(f"sglang_abort_{state}_{side}", rows)


def test_a_client_that_leaves(bench: Any, pair: Any) -> None:
    for number, prompt in enumerate(bench.prompts(11, [300] * 4)):
        first, second = bench.legs(pair.prefill, bench.completion(prompt, 200))
        with ThreadPoolExecutor(2) as pool:
            prefill = pool.submit(pair.prefill.post, first)
            pool.submit(pair.decode.leave, second, 0.1 * number)
            prefill.result(60)


def test_a_leg_that_never_comes(bench: Any, pair: Any, keep: Any) -> None:
    """Decode's pages, and prefill's request, wait for the other side for a limited time."""
    one, other = bench.prompts(12, [64, 64])
    first, _ = bench.legs(pair.prefill, bench.completion(one))
    _, second = bench.legs(pair.prefill, bench.completion(other))
    with ThreadPoolExecutor(2) as pool:
        prefill, decode = pool.submit(pair.prefill.post, first), pool.submit(pair.decode.post, second)
        answers = {"prefill": prefill.result(90), "decode": decode.result(90)}
    keep("sglang_one_leg", {name: [a.status, a.seconds, a.text[:300]] for name, a in answers.items()})
    assert answers["prefill"].status == answers["decode"].status == 500
    assert answers["prefill"].seconds < 20 + SLACK_S  # SGLang's own limit
    assert answers["decode"].seconds < bound(pair, "the peer's blocks or grant never come") + SLACK_S


def test_a_prefill_server_killed_in_mid_transfer(bench: Any, pair: Any, keep: Any) -> None:
    """Decode's client hears why in bounded time; prefill comes again on its ports, and decode was never restarted."""
    text = killed(bench, pair, keep, "prefill", "decode", 13)
    assert "kvx" in text or "Lost connection" in text


def test_a_decode_server_killed_in_mid_transfer(bench: Any, pair: Any, keep: Any) -> None:
    assert "kvx" in killed(bench, pair, keep, "decode", "prefill", 14)


def killed(bench: Any, pair: Any, keep: Any, victim: str, witness: str, seed: int) -> str:
    """What the client of the witness is told when the victim is killed, which then comes again on its ports."""
    (prompt,) = bench.prompts(seed, [400])
    beside = getattr(pair, witness)
    pid = beside.child.pid
    bench.turn("hold", on=True)
    with ThreadPoolExecutor(2) as pool:
        sent = bench.send(pool, pair.prefill, pair.decode, bench.completion(prompt))
        answering = sent[("prefill", "decode").index(witness)]
        assert bench.until(lambda: "moving" in open_states(pair.prefill), 20), pair.prefill.status()
        getattr(pair, victim).child.signal(signal.SIGKILL)
        at = time.monotonic()
        answer = answering.result(90)
        seconds = time.monotonic() - at
    bench.turn("hold", on=False)
    limit = bound(pair, "the peer dies or stops in mid-transfer")
    bench.restart(victim)
    row = {"seconds": seconds, "bound_s": limit, "status": answer.status, "text": answer.text}
    keep(f"sglang_killed_{victim}", row)
    assert answer.status == 500
    assert seconds < limit + SLACK_S
    assert beside.child.pid == pid
    assert beside.child.running
    text: str = answer.text
    return text


def test_another_page_size_is_refused_for_each_request(bench: Any, pair: Any, keep: Any) -> None:
    """Where SGLang ends its whole decode server, kvx fails the request with the fact that differs."""
    other = bench.start("prefill-32", Role.PRODUCER, "--page-size", "32", **bench.prefill_options())
    bench.cluster.wait_ready(other.child)
    rows = []
    for prompt in bench.prompts(15, [64, 200]):
        served = bench.serve(other, pair.decode, bench.completion(prompt))
        rows.append({name: [a.status, a.text[:400]] for name, a in (("p", served.prefill), ("d", served.decode))})
        assert served.decode.status == served.prefill.status == 500
    keep("sglang_page_size", rows)
    bench.stop("prefill-32")
    told = json.dumps(rows)
    assert "kvx: layout" in told
