"""What the router does when instances are busy or fail, before the client has seen anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from kvx.core.messages import Ack
from kvx.core.model import Mode
from kvx.router import errands
from kvx.router.pool import FAILURES, Instance
from kvx.router.settings import Flow


@pytest.fixture(autouse=True)
def _nobody_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "ask", lambda *_, **__: Ack("t", True))


async def broken(fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


async def dying(fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Its head is out, and no token."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    request.transport.abort()  # type: ignore[union-attr]
    return answer


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("script", [broken, dying])
def test_a_failed_leg_is_tried_again_elsewhere_once(world: Any, fake: Any, mode: Mode, script: Any) -> None:
    async def scenario() -> None:
        async with world(mode, [fake("p")], [fake("d0", script), fake("d1")]) as w:
            status, told = await w.complete()
            assert (status, told["choices"][0]["text"]) == (200, "d1")
            assert w.router.counters["retries"] == 1
        async with world(mode, [fake("p")], [fake("d0", script), fake("d1", script), fake("d2")]) as w:
            assert (await w.complete())[0] in (500, 502)
            assert w.router.counters["retries"] == 1

    asyncio.run(scenario())


class Held:
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await self.go_on.wait()
        return web.json_response({"choices": [{"text": fake.name}]})


def test_a_full_queue_says_when_to_come_again(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        held = Held()
        async with world(Mode.PUSH, [fake("p")], [fake("d", held)], flow=Flow(room=1, queue=1)) as w:
            first = asyncio.create_task(w.complete())
            await w.decode[0].asked.wait()
            second = asyncio.create_task(w.complete())
            await w.until(lambda: len(w.router.dispatcher.entry) == 1)
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": [1]}) as answer:
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) >= 1
                assert (await answer.json())["error"]["type"] == "overloaded"
            held.go_on.set()
            assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]

    asyncio.run(scenario())


def test_nothing_is_prefilled_while_prefilled_prompts_wait(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        held = Held()
        async with world(Mode.PULL, [fake("p")], [fake("d", held)], flow=Flow(room=1, stall_s=0.001)) as w:
            router = w.router.dispatcher
            tasks = [asyncio.create_task(w.complete())]
            await w.decode[0].asked.wait()
            tasks.append(asyncio.create_task(w.complete()))
            await w.until(lambda: router.prefilled.oldest_s() > 0.001)
            tasks.append(asyncio.create_task(w.complete()))
            await w.until(lambda: len(router.entry) == 1)
            assert len(w.prefill[0].bodies) == 2
            held.go_on.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 3

    asyncio.run(scenario())


def test_what_was_chosen_and_why_is_a_metric(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(None, [fake("p")], [fake("d0"), fake("d1")]) as w:
            long = list(range(640))
            for prompt in ([1, 2], long, [*long, 7]):
                assert (await w.complete(prompt=prompt))[0] == 200
            async with w.client.get(f"{w.url}/metrics") as answer:
                text = await answer.text()
            for reason in ("short_prompt", "overlap", "conversation"):
                assert f'kvx_router_mode_total{{mode="push",reason="{reason}"}} 1\n' in text
            assert 'kvx_router_requests_total{outcome="ok"} 3\n' in text
            assert w.decode[1].bodies[-1]["prompt"][-1] == 7  # where the conversation was

    asyncio.run(scenario())


def test_who_fails_again_and_again_rests_until_it_works() -> None:
    one = Instance("http://d0", up=True)
    for failures in range(1, FAILURES + 1):
        assert not one.resting
        one.failed(f"failure {failures}", down=False)
    assert one.candidate().resting
    one.worked()
    assert not one.candidate().resting
    one.failed("once more", down=False)  # what it failed before does not count any more
    assert not one.resting


def test_who_comes_back_serves_at_once_where_nobody_else_can(
    world: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several legs break when an instance dies: it rests then, and alone in its pool it is needed all the same."""
    monkeypatch.setattr("kvx.router.pool.RETRY_S", 0.02)
    monkeypatch.setattr("kvx.router.pool.REST_S", 3600.0)

    async def scenario() -> None:
        held = Held()
        async with world(Mode.PULL, [fake("p")], [fake("d", held)]) as w:
            requests = [asyncio.create_task(w.complete()) for _ in range(FAILURES)]
            await w.until(lambda: len(w.decode[0].bodies) == FAILURES)
            port = int(w.decode[0].url.rpartition(":")[2])
            await w.decode[0].stop()
            assert all(status >= 500 for status, _ in await asyncio.gather(*requests))
            (instance,) = w.router.dispatcher.pools.decode
            assert instance.resting
            await w.decode[0].start(port)
            held.go_on.set()
            await w.until(lambda: instance.up)
            assert (await w.complete())[0] == 200
            await w.until(lambda: not instance.resting)  # it has worked

    asyncio.run(scenario())


def test_a_rest_ends_when_its_time_is_over(world: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx.router.pool.REST_S", 0.02)

    async def scenario() -> None:
        async with world(Mode.PULL, [fake("p")], [fake("d")]) as w:
            (instance,) = w.router.dispatcher.pools.decode
            for _ in range(FAILURES):
                instance.failed("it failed", down=False)
            assert instance.resting
            await w.until(lambda: not instance.resting)

    asyncio.run(scenario())
