"""Two prefill and two decode servers under load, while one of each is killed and one is drained and replaced."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from attrs import define, field, frozen

from kvx.cluster import Child
from kvx.operator import ask
from kvx.report import summary
from kvx.up import Node, Site, site

REQUESTS = 3000
AT_ONCE = 100
TOKENS = 8
LONG = 0.1
"""Share of prompts that are too long to be pushed for being short, so that both modes are used."""
WAIT_S = 120.0
"""Longest wait for what has to happen, on a machine that others use as well."""
FAST: Mapping[str, Any] = {
    "lease_s": 10,
    "lost_s": 3,
    "keepalive_s": 1,
    "op_timeout_s": 6,
    "drain_limit_s": 3,
    "grace_s": 4,
}


@frozen
class Ended:
    """How one request ended. `told` is the error's type; without tokens and without it the request was lost."""

    tokens: tuple[int, ...] = ()
    told: str = ""
    first_s: float = 0.0
    all_s: float = 0.0


async def complete(client: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Ended:
    started = time.monotonic()
    first_s = 0.0
    tokens: list[int] = []
    done = False
    try:
        async with client.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status != 200:
                error = json.loads(await answer.read())["error"]
                return Ended(told=f"{answer.status} {error['type']}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        return Ended(told=f"in the stream: {event['error']['type']}")
                    first_s = first_s or time.monotonic() - started
                    tokens += event["choices"][0]["token_ids"]
                done = done or line.startswith(b"data: [DONE]")
    except (aiohttp.ClientError, OSError, ValueError):
        return Ended()
    return Ended(tuple(tokens), "", first_s, time.monotonic() - started) if done else Ended()


@define
class Progress:
    """What the faults wait for: that so many requests have ended."""

    ended: int = 0
    reached: asyncio.Condition = field(factory=asyncio.Condition)

    async def tick(self) -> None:
        async with self.reached:
            self.ended += 1
            self.reached.notify_all()

    async def wait(self, count: int) -> None:
        async with self.reached:
            await self.reached.wait_for(lambda: self.ended >= count)


async def load(
    client: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    progress: Progress | None = None,
    course: asyncio.Task[None] | None = None,
) -> list[Ended]:
    """All of the requests once, and from the first one on again as long as the `course` of faults is not over."""
    ended: list[Ended | None] = []

    async def work() -> None:
        while len(ended) < len(bodies) or (course is not None and not course.done()):
            number = len(ended)
            ended.append(None)
            ended[number] = await complete(client, url, bodies[number % len(bodies)])
            if progress is not None:
                await progress.tick()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return [one for one in ended if one is not None]


async def status(client: aiohttp.ClientSession, router: Child) -> dict[str, dict[str, Any]]:
    """What the router tells of each instance, by URL."""
    async with client.get(f"{router.url}/status") as answer:
        told = await answer.json()
    return {one["url"]: one for one in (*told["prefill"], *told["decode"])}


async def until(look: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await look():
            await asyncio.sleep(0.1)


def percentiles(ended: Sequence[Ended]) -> dict[str, Any]:
    good = [one for one in ended if one.tokens]
    return {
        "first_token_ms": summary([1000 * one.first_s for one in good]),
        "whole_ms": summary([1000 * one.all_s for one in good]),
    }


@define
class Faults:
    """Kills a prefill and a decode server and drains the other decode server, each at its place in the run."""

    place: Site
    router: Child
    prefill: list[Node]
    decode: list[Node]
    client: aiohttp.ClientSession
    progress: Progress = field(factory=Progress)
    done: dict[str, Any] = field(factory=dict)

    async def run(self) -> None:
        progress = self.progress
        await progress.wait(REQUESTS // 5)
        self.prefill[0] = await self._kill(self.prefill[0], "killed_prefill")
        await progress.wait(2 * REQUESTS // 5)
        self.decode[0] = await self._kill(self.decode[0], "killed_decode")
        await progress.wait(3 * REQUESTS // 5)
        self.decode[1] = await self._drain(self.decode[1])

    async def _kill(self, node: Node, name: str) -> Node:
        at = self.progress.ended
        node.child.signal(signal.SIGKILL)
        return await self._again(node, name, {"after_requests": at})

    async def _drain(self, node: Node) -> Node:
        """As docs/operations.md says: drain, wait until the router has nothing open there, stop."""
        secret = self.place.secret_file.read_bytes()
        ack = await asyncio.to_thread(ask, node.control, "drain", str(WAIT_S), secret=secret, timeout_s=WAIT_S)
        assert ack.ok, ack
        at, started = self.progress.ended, time.monotonic()

        async def empty() -> bool:
            told = (await status(self.client, self.router))[node.url]
            return bool(told["draining"]) and told["open"] == 0

        await until(empty)
        return await self._again(
            node, "drained_decode", {"after_requests": at, "empty_after_s": time.monotonic() - started}
        )

    async def _again(self, node: Node, name: str, told: Mapping[str, Any]) -> Node:
        """Start it again at the same addresses, and see it serve."""
        await asyncio.to_thread(self.place.cluster.stop, node.child)
        before = (await status(self.client, self.router))[node.url]["requests"]
        new = self.place.engine(f"{node.child.name}-again", instead_of=node, **FAST)
        started = time.monotonic()

        async def serves() -> bool:
            told = (await status(self.client, self.router))[node.url]
            return bool(told["up"]) and not told["draining"] and told["requests"] > before

        await until(serves)
        self.done[name] = {**told, "serves_again_after_s": time.monotonic() - started}
        return new


def sorted_out(ended: Sequence[Ended], alone: Sequence[Ended]) -> dict[str, Any]:
    ends: Counter[str] = Counter(equal=0, different=0, lost=0, told=0)
    told: Counter[str] = Counter()
    for number, got in enumerate(ended):
        right = alone[number % len(alone)]
        if got.told:
            ends["told"] += 1
            told[got.told] += 1
        else:
            ends["lost" if not got.tokens else "equal" if got.tokens == right.tokens else "different"] += 1
    return {"requests": len(ended), "ends": dict(ends), "told": dict(told), **percentiles(ended)}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_nothing_is_lost_while_servers_are_killed_and_drained(
    evidence: Callable[[str, Mapping[str, Any]], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    draw = random.Random(11)  # noqa: S311

    with site("reference", "", (), lambda line: None) as place:
        fixed = {"model": place.model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

        def body() -> dict[str, Any]:
            length = draw.randrange(257, 400) if draw.random() < LONG else draw.randrange(2, 200)
            return {**fixed, "return_token_ids": True, "prompt": [draw.randrange(3, 2000) for _ in range(length)]}

        calm_bodies, bodies = ([body() for _ in range(REQUESTS)] for _ in range(2))  # new ones: no prefix is known
        prefill = [place.engine(f"prefill-{number}", **FAST) for number in range(2)]
        decode = [place.engine(f"decode-{number}", **FAST) for number in range(2)]
        single = place.single("single")
        router = place.router("router", prefill, decode, None)
        place.wait_ready()
        secret = place.secret_file.read_bytes()

        async def settled(client: aiohttp.ClientSession, nodes: Sequence[Node]) -> bool:
            """No transfer is open, and every block is free."""
            for node in nodes:
                ack = await asyncio.to_thread(ask, node.control, "status", secret=secret, timeout_s=10)
                async with client.get(f"{node.url}/stats") as answer:
                    blocks = (await answer.json())["blocks"]
                if json.loads(ack.body)["open"] or blocks["free"] != blocks["total"]:
                    return False
            return True

        async def scenario() -> dict[str, Any]:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
                calm_alone = await load(client, single.url, calm_bodies)
                calm = await load(client, router.url, calm_bodies)
                alone = await load(client, single.url, bodies)
                faults = Faults(place, router, prefill, decode, client)
                course = asyncio.create_task(faults.run())
                faulted = await load(client, router.url, bodies, faults.progress, course)
                await course
                nodes = [*faults.prefill, *faults.decode]
                await until(lambda: settled(client, nodes))
                async with client.get(f"{router.url}/status") as answer:
                    told = await answer.json()
            assert all(one.tokens for one in (*calm_alone, *alone))
            return {
                "requests": REQUESTS,
                "at_once": AT_ONCE,
                "alone": percentiles(calm_alone),
                "calm": sorted_out(calm, calm_alone),
                "faulted": sorted_out(faulted, alone),
                "faults": faults.done,
                "modes": told["modes"],
                "router_counters": told["counters"],
            }

        told = asyncio.run(scenario())
    with capsys.disabled():
        evidence("soak-router", told)
    assert told["calm"]["ends"] == {"equal": REQUESTS, "different": 0, "lost": 0, "told": 0}
    ends = told["faulted"]["ends"]
    assert (ends["different"], ends["lost"]) == (0, 0)
    # A stream whose decode server is killed cannot go on elsewhere; whatever else fails is tried again.
    assert ends["told"] <= AT_ONCE
    assert all(kind.startswith("in the stream: instance_lost") for kind in told["faulted"]["told"])
    assert {one["mode"] for one in told["modes"]} == {"push", "pull"}
