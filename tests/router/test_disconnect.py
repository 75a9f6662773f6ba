"""How soon both legs of a request end in real servers when its client leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import evolve

from kvx.core.model import Mode
from kvx.operator import ask
from kvx.report import summary
from kvx.up import Node, site

TIMES = 25
LENGTH = 1800
"""Tokens of a prompt, or of an answer, in the middle of which its client leaves; one is computed in each step."""
WAIT_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_leaves_ends_each_leg_that_is_open(
    evidence: Callable[[str, Mapping[str, Any]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with site("reference", "", ("--step-tokens", "1", "--no-prefix-caching"), lambda line: None) as place:
        prefill, decode = place.engine("prefill"), place.engine("decode")
        prefill = evolve(prefill, address=prefill.control)  # told, so that no request but the test's comes there
        routers = {mode: place.router(f"router-{mode.value}", [prefill], [decode], mode) for mode in Mode}
        place.wait_ready()
        secret = place.secret_file.read_bytes()

        async def count(client: aiohttp.ClientSession, node: Node, name: str) -> int:
            async with client.get(f"{node.url}/stats") as answer:
                return int((await answer.json())["counters"].get(name, 0))

        async def transfers(node: Node) -> set[str]:
            ack = await asyncio.to_thread(ask, node.control, "status", secret=secret, timeout_s=10)
            return set(json.loads(ack.body)["open"])

        async def served(client: aiohttp.ClientSession, mode: Mode) -> int:
            async with client.get(f"{routers[mode].url}/status") as answer:
                return int((await answer.json())["counters"].get("ok", 0))

        async def until(look: Callable[[], Any], pause_s: float = 0.002) -> float:
            async with asyncio.timeout(WAIT_S):
                while not await look():
                    await asyncio.sleep(pause_s)
            return time.monotonic()

        async def left(
            client: aiohttp.ClientSession, mode: Mode, legs: Sequence[Node], *, begun: bool
        ) -> dict[str, Any]:
            """Leave when a request runs at each of the `legs`, or when its answer has `begun`.

            A leg that was over before the client had left tells nothing, and the client comes once more.
            """
            aborts: Counter[str] = Counter()
            lasted: list[float] = []
            for number in range(4 * TIMES):
                length, tokens = (20, LENGTH) if begun else (LENGTH, 8)
                prompt = [3 + (number + place_) % 2000 for place_ in range(length)]
                body = {"model": place.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
                requests, known = await count(client, prefill, "requests"), await transfers(decode)
                finished, ok = await count(client, prefill, "length"), await served(client, mode)
                aborted = [await count(client, node, "abort") for node in legs]
                first = asyncio.Event()

                async def request(body: Mapping[str, Any], first: asyncio.Event) -> None:
                    asked = {**body, "ignore_eos": True, "stream": True}
                    async with client.post(f"{routers[mode].url}/v1/completions", json=asked) as answer:
                        await answer.content.readany()
                        first.set()
                        await answer.read()

                task = asyncio.create_task(request(body, first))
                if begun:
                    await asyncio.wait_for(first.wait(), WAIT_S)
                else:
                    await until(lambda seen=requests: more(client, prefill, seen, "requests"))
                    if decode in legs:
                        await until(lambda known=known, task=task: new_transfer(known, task))
                task.cancel()
                started = time.monotonic()
                done = asyncio.gather(
                    *(
                        until(lambda node=node, seen=seen: more(client, node, seen, "abort"))
                        for node, seen in zip(legs, aborted, strict=True)
                    )
                )
                over = asyncio.create_task(
                    until(lambda seen=ok, had=finished: late(client, mode, legs, seen, had), 0.05)
                )
                await asyncio.wait((done, over), return_when=asyncio.FIRST_COMPLETED)
                if done.done():
                    lasted.append(max(done.result()) - started)
                    aborts.update("prefill" if node is prefill else "decode" for node in legs)
                for one in (done, over):
                    one.cancel()
                await asyncio.gather(task, done, over, return_exceptions=True)
                if len(lasted) == TIMES:
                    break
            return {
                "mode": mode.value,
                "left": "in its answer" if begun else "before its answer",
                "times": len(lasted),
                "aborts": dict(aborts),
                "until_the_last_leg_was_aborted_ms": summary([1000 * one for one in lasted]),
            }

        async def more(client: aiohttp.ClientSession, node: Node, seen: int, name: str) -> bool:
            return await count(client, node, name) > seen

        async def late(
            client: aiohttp.ClientSession, mode: Mode, legs: Sequence[Node], seen: int, finished: int
        ) -> bool:
            prefilled = prefill in legs and await more(client, prefill, finished, "length")
            return prefilled or await served(client, mode) > seen

        async def new_transfer(known: set[str], task: asyncio.Task[None]) -> bool:
            return task.done() or not await transfers(decode) <= known

        async def settled(client: aiohttp.ClientSession) -> bool:
            for node in (prefill, decode):
                async with client.get(f"{node.url}/stats") as answer:
                    blocks = (await answer.json())["blocks"]
                if await transfers(node) or blocks["free"] != blocks["total"]:
                    return False
            return True

        async def scenario() -> list[dict[str, Any]]:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=connector) as client:
                told = [
                    await left(client, Mode.PUSH, [prefill, decode], begun=False),
                    await left(client, Mode.PUSH, [decode], begun=True),
                    await left(client, Mode.PULL, [prefill], begun=False),
                    await left(client, Mode.PULL, [decode], begun=True),
                ]
                await until(lambda: settled(client))
            return told

        told = asyncio.run(scenario())
    with capsys.disabled():
        evidence("router_disconnects", {"cases": told})
    for one in told:
        assert {one["times"], *one["aborts"].values()} == {TIMES}, one
