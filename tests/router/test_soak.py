"""Many requests at once through the router, clients that leave among them, before real reference servers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.operator import ask
from kvx.up import Node, site

REQUESTS = 500
AT_ONCE = 16
LEAVING = 0.15
TOKENS = 8


async def complete(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> list[int]:
    """The tokens of a streamed answer."""
    tokens: list[int] = []
    async with client.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
    return tokens


async def probe(client: aiohttp.ClientSession, node: Node, model: str) -> dict[str, Any]:
    async with client.post(f"{node.url}/v1/completions", json=CompletionsDialect().probe_request(model)) as answer:
        told: dict[str, Any] = (await answer.json())["kv_transfer_params"]["kvx"]
        return told


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", list(Mode))
def test_five_hundred_requests_sixteen_at_once(
    mode: Mode,
    evidence: Callable[[str, Mapping[str, Any]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    draw = random.Random(5)  # noqa: S311
    work = [[draw.randrange(3, 2000) for _ in range(draw.randrange(2, 200))] for _ in range(REQUESTS)]
    leave = [draw.uniform(0, 0.4) if draw.random() < LEAVING else None for _ in work]

    with site("reference", "", (), lambda line: None) as place:
        prefill, decode = place.engine("prefill"), place.engine("decode")
        router = place.router("router", [prefill], [decode], mode)
        place.wait_ready()
        secret = place.secret_file.read_bytes()

        async def scenario() -> dict[str, Any]:
            turns = asyncio.Semaphore(AT_ONCE)
            body = {"model": place.model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body["return_token_ids"] = True
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:

                async def one(number: int) -> list[int]:
                    """No tokens: the client has left, at whatever point of the request that was."""
                    async with turns:
                        try:
                            async with asyncio.timeout(leave[number]):
                                return await complete(client, router.url, {**body, "prompt": work[number]})
                        except TimeoutError:
                            return []

                started = time.monotonic()
                got = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
                seconds = time.monotonic() - started
                ends: Counter[str] = Counter()
                for prompt, tokens in zip(work, got, strict=True):
                    if not tokens:
                        ends["left"] += 1
                        continue
                    alone = await complete(client, prefill.url, {**body, "prompt": prompt})
                    ends["equal" if tokens == alone else "different"] += 1

                end = time.monotonic() + 60
                while time.monotonic() < end:
                    open_now = [
                        json.loads(ask(node.control, "status", secret=secret, timeout_s=10).body)["open"]
                        for node in (prefill, decode)
                    ]
                    probes = [await probe(client, node, place.model) for node in (prefill, decode)]
                    if not any(open_now) and all(told["blocks"]["free"] == told["blocks"]["total"] for told in probes):
                        break
                    await asyncio.sleep(0.2)
                async with client.get(f"{router.url}/status") as answer:
                    counters = (await answer.json())["counters"]
            return {
                "mode": mode.value,
                "requests": REQUESTS,
                "at_once": AT_ONCE,
                "seconds": seconds,
                "ends": dict(ends),
                "open": [len(transfers) for transfers in open_now],
                "blocks": [told["blocks"] for told in probes],
                "engine_counters": [told["counters"] for told in probes],
                "router_counters": counters,
            }

        told = asyncio.run(scenario())
    with capsys.disabled():
        evidence(f"router_soak_{mode.value}", told)
    leaving = sum(one is not None for one in leave)
    assert 0.1 * REQUESTS < leaving < 0.2 * REQUESTS
    assert told["ends"].get("different", 0) == 0
    assert told["ends"]["equal"] >= REQUESTS - leaving
    assert told["ends"].get("left", 0) >= 3  # a fast machine has answered the others before
    assert told["open"] == [0, 0]
    for blocks in told["blocks"]:
        assert (blocks["free"], blocks["held"]) == (blocks["total"], 0)
