from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvx.config import Options
from kvx.core.messages import Ack
from kvx.core.model import Mode
from kvx.router import errands
from kvx.router.upstream import Limits
from kvx_sglang.dialect import SglangDialect

MODES = [Mode.PUSH, Mode.PULL]


async def forever(fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def broken(fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    error = {"error": {"message": "out of blocks", "type": "overloaded", "reason": "no_capacity"}}
    return web.json_response(error, status=503, headers={"Retry-After": "7"})


async def dying(fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    request.transport.abort()  # type: ignore[union-attr]
    return web.Response()


class Stream:
    """Sends one event, then waits to be told how to go on."""

    def __init__(self, content_type: str = "text/event-stream") -> None:
        self.content_type = content_type
        self.go_on = asyncio.Event()
        self.die = False

    async def __call__(self, fake: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": self.content_type})
        await answer.prepare(request)
        await answer.write(b'data: {"n": 1}\n\n')
        await self.go_on.wait()
        if self.die:
            request.transport.abort()  # type: ignore[union-attr]
            return answer
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The commands that the router sends to instances, and from which thread."""
    asked: list[tuple[Any, ...]] = []

    def ask(address: str, verb: str, argument: str, *, secret: bytes, timeout_s: float) -> Ack:
        if verb != "status":
            asked.append((address, verb, argument, secret, threading.current_thread() is threading.main_thread()))
        return Ack("t", True)

    monkeypatch.setattr(errands, "ask", ask)
    return asked


def test_push_asks_both_at_once_with_one_new_id(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        both = asyncio.Barrier(2)

        async def meet(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await both.wait()
            return web.json_response({"choices": [{"text": one.name}]})

        async with world(Mode.PUSH, [fake("p", meet)], [fake("d", meet)]) as w:
            ids = set()
            for _ in range(2):
                status, answer = await w.complete(seed=2**80, logit_bias={"3": 0.1})
                assert (status, answer["choices"][0]["text"]) == (200, "d")
            for prefill, decode in zip(w.prefill[0].bodies, w.decode[0].bodies, strict=True):
                params = decode.pop("kv_transfer_params")
                transfer = params["kvx"]["transfer"]
                ids.add(transfer)
                assert len(transfer) == 32
                assert params["kvx"] == {"mode": "push", "transfer": transfer, "from": "127.0.0.1:5700"}
                assert prefill["kv_transfer_params"]["kvx"] == {"mode": "push", "transfer": transfer}
                assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
                asked = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 2**80, "logit_bias": {"3": 0.1}}
                assert decode == asked
            assert len(ids) == 2

    asyncio.run(scenario())


def test_pull_carries_the_prefill_answer_to_decode(world: Any, fake: Any, released: list[Any]) -> None:
    async def scenario() -> None:
        async with world(Mode.PULL, [fake("p", ticket="kvx1.T")], [fake("d")]) as w:
            status, answer = await w.complete("/v1/chat/completions", max_completion_tokens=9)
            assert (status, answer["choices"][0]["text"]) == (200, "d")
            (prefill,), (decode,) = w.prefill[0].bodies, w.decode[0].bodies
            assert prefill["max_completion_tokens"] == 1
            assert decode["max_completion_tokens"] == 9
            assert decode["kv_transfer_params"]["kvx"] == {"ticket": "kvx1.T"}

    asyncio.run(scenario())
    assert released == []


@pytest.mark.parametrize("mode", MODES)
def test_what_a_client_says_of_transfers_counts_for_nothing(world: Any, fake: Any, mode: Mode) -> None:
    async def scenario() -> None:
        async with world(mode, [fake("p")], [fake("d")]) as w:
            hostile = {"mode": "push", "transfer": "mine", "from": "192.0.2.1:1", "ticket": "mine"}
            await w.complete(kv_transfer_params={"do_remote_prefill": True, "kvx": hostile})
            for one in (*w.prefill, *w.decode):
                assert "mine" not in json.dumps(one.bodies)
                assert "192.0.2.1" not in json.dumps(one.bodies)

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_is_passed_on_before_it_has_ended(world: Any, fake: Any, mode: Mode) -> None:
    async def scenario() -> None:
        stream = Stream()
        async with world(mode, [fake("p")], [fake("d", stream)]) as w:
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                assert answer.headers["Content-Type"] == "text/event-stream"
                async with asyncio.timeout(20):
                    assert await answer.content.readany() == b'data: {"n": 1}\n\n'
                stream.go_on.set()  # only now may the instance go on
                assert await answer.read() == b"data: [DONE]\n\n"
            assert w.decode[0].bodies[0]["stream"] is True

    asyncio.run(scenario())


def test_a_client_that_leaves_ends_both_legs_of_a_push(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p", forever)], [fake("d", forever)]) as w:
            request = asyncio.create_task(w.complete())
            await w.prefill[0].asked.wait()
            await w.decode[0].asked.wait()
            assert [one["open"] for one in (await w.status())["decode"]] == [1]
            request.cancel()
            async with asyncio.timeout(20):
                await w.prefill[0].left.wait()
                await w.decode[0].left.wait()
            await w.until(lambda: w.router.counters["disconnected"] == 1)

    asyncio.run(scenario())


def test_a_client_that_leaves_a_stream_ends_it(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p", forever)], [fake("d", Stream())]) as w:
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                await answer.content.readany()
                answer.close()
            async with asyncio.timeout(20):
                await w.decode[0].left.wait()
                await w.prefill[0].left.wait()

    asyncio.run(scenario())


def ticket_of(address: str) -> str:
    from kvx.core.model import BlockTable
    from kvx.instance import make_ticket

    options = Options(listen=address)
    return make_ticket(options, epoch=7, transfer="t", first=(0,), blocks=BlockTable.of([1]), tokens=3, lease_s=9)


@pytest.mark.parametrize("way", ["leaves", "refused", "unreachable", "dies"])
def test_a_ticket_that_nobody_takes_up_is_released(world: Any, fake: Any, released: list[Any], way: str) -> None:
    async def scenario() -> str:
        ticket = ticket_of("127.0.0.1:5701")
        script = {"leaves": forever, "refused": broken, "unreachable": forever, "dies": dying}[way]
        async with world(Mode.PULL, [fake("p", ticket=ticket)], [fake("d", script)]) as w:
            if way == "unreachable":
                await w.decode[0].stop()
                status, told = await w.complete()
                assert (status, told["error"]["type"]) == (503, "no_instance")
                assert "cannot be reached" in told["error"]["message"]
            elif way == "leaves":
                request = asyncio.create_task(w.complete())
                await w.decode[0].asked.wait()
                request.cancel()
            else:
                status, told = await w.complete()
                assert status == {"refused": 503, "dies": 502}[way]
            await w.until(lambda: w.router.counters["release_done"] == 1)
        return ticket

    ticket = asyncio.run(scenario())
    assert released == [("127.0.0.1:5701", "release", ticket, b"", False)]


@pytest.mark.parametrize("way", ["leaves", "refused", "unreachable", "dies"])
def test_a_push_that_nobody_takes_up_is_withdrawn(world: Any, fake: Any, released: list[Any], way: str) -> None:
    """The prefill leg has long been answered: the end of its connection tells its engine nothing."""

    async def scenario() -> str:
        script = {"leaves": forever, "refused": broken, "unreachable": forever, "dies": dying}[way]
        async with world(Mode.PUSH, [fake("p")], [fake("d", script)]) as w:
            if way == "unreachable":
                await w.decode[0].stop()
                assert (await w.complete())[0] == 503
            elif way == "leaves":
                request = asyncio.create_task(w.complete())
                await w.decode[0].asked.wait()
                await w.until(lambda: w.prefill[0].bodies)
                request.cancel()
            else:
                assert (await w.complete())[0] == {"refused": 503, "dies": 502}[way]
            await w.until(lambda: w.router.counters["withdraw_done"] == 1)
            await w.until(lambda: w.prefill[0].bodies)
            return str(w.prefill[0].bodies[0]["kv_transfer_params"]["kvx"]["transfer"])

    transfer = asyncio.run(scenario())
    assert released == [("127.0.0.1:5700", "withdraw", transfer, b"", False)]


def test_a_push_that_was_answered_is_not_withdrawn(world: Any, fake: Any, released: list[Any]) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            assert (await w.complete())[0] == 200

    asyncio.run(scenario())
    assert released == []


def test_legs_that_meet_at_an_address_know_it_and_nothing_is_withdrawn(
    world: Any, fake: Any, released: list[Any]
) -> None:
    """As SGLang's do: the decode side names the transfer, so a router has no name by which to withdraw it."""

    async def scenario() -> list[Any]:
        prefill = fake("p", address="127.0.0.1:8998")
        async with world(Mode.PUSH, [prefill], [fake("d", broken)], addresses=True, dialect=SglangDialect()) as w:
            assert (await w.complete())[0] == 503
            await w.until(lambda: w.prefill[0].bodies)
            return [one.bodies[0] for one in (w.prefill[0], w.decode[0])]

    legs = asyncio.run(scenario())
    assert {(leg["bootstrap_host"], leg["bootstrap_port"]) for leg in legs} == {("127.0.0.1", 8998)}
    assert len({leg["bootstrap_room"] for leg in legs}) == 1
    assert released == []


def test_a_ticket_that_points_elsewhere_is_not_followed(
    world: Any, fake: Any, released: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        far = Options(listen="192.0.2.1:5701", insecure=True)
        from kvx.core.model import BlockTable
        from kvx.instance import make_ticket

        ticket = make_ticket(far, epoch=7, transfer="t", first=(0,), blocks=BlockTable.of([1]), tokens=3, lease_s=9)
        async with world(Mode.PULL, [fake("p", ticket=ticket)], [fake("d", broken)]) as w:
            await w.complete()
            await w.until(lambda: w.router.counters["release_failed"] == 1)

    asyncio.run(scenario())
    assert released == []
    assert "192.0.2.1:5701 is not in option peers" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_decode_instance_is_passed_on_as_it_is(
    world: Any, fake: Any, mode: Mode, released: list[Any]
) -> None:
    async def scenario() -> None:
        prefill = fake("p", forever if mode is Mode.PUSH else None)
        if mode is Mode.PULL:
            prefill = fake("p")
        async with world(mode, [prefill], [fake("d", broken)]) as w:
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": [1]}) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "7"
                assert (await answer.json())["error"] == {
                    "message": "out of blocks",
                    "type": "overloaded",
                    "reason": "no_capacity",
                }
            if mode is Mode.PUSH:  # nobody needs its work any more
                async with asyncio.timeout(20):
                    await w.prefill[0].left.wait()

    asyncio.run(scenario())


def test_pull_passes_on_what_the_prefill_instance_refuses(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PULL, [fake("p", broken)], [fake("d")]) as w:
            status, told = await w.complete()
            assert (status, told["error"]["reason"]) == (503, "no_capacity")
            assert w.decode[0].bodies == []

    asyncio.run(scenario())


def test_pull_says_when_the_prefill_instance_has_no_kvx(world: Any, fake: Any) -> None:
    async def plain(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": []})

    async def scenario() -> None:
        async with world(Mode.PULL, [fake("p", plain)], [fake("d")]) as w:
            status, told = await w.complete()
            assert status == 502
            assert "no kv_transfer_params" in told["error"]["message"]

    asyncio.run(scenario())


def test_push_lets_the_decode_instance_decide(world: Any, fake: Any) -> None:
    """P fails, D has recomputed: the client has its answer. Both fail: it has both reasons."""

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def recomputed(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response({"choices": [{"text": "recomputed"}]})

        async def failed(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response({"error": {"message": "KV load failed"}}, status=500)

        for script, expected in ((recomputed, 200), (failed, 500)):
            go_on.clear()
            async with world(Mode.PUSH, [fake("p", broken)], [fake("d", script)]) as w:
                request = asyncio.create_task(w.complete())
                await w.decode[0].asked.wait()
                await w.prefill[0].asked.wait()
                await w.until(lambda w=w: w.router.dispatcher.pools.prefill[0].open == 0)  # P's answer is there
                go_on.set()
                status, told = await request
                assert status == expected
                if status == 500:
                    assert "KV load failed" in told["error"]["message"]
                    assert "out of blocks" in told["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", MODES)
def test_who_cannot_be_reached_is_replaced_by_the_next(world: Any, fake: Any, mode: Mode, released: list[Any]) -> None:
    async def scenario() -> None:
        async with world(mode, [fake("p0"), fake("p1")], [fake("d0"), fake("d1")]) as w:
            await w.prefill[0].stop()
            await w.decode[1].stop()
            for _ in range(6):
                status, answer = await w.complete()
                assert (status, answer["choices"][0]["text"]) == (200, "d0")
            assert 1 <= w.router.counters["retries"] <= 4
            told = await w.status()
            assert [one["up"] for one in told["prefill"]] == [False, True]
            assert "cannot be reached" in told["prefill"][0]["note"]
            if mode is Mode.PUSH:
                attempts = [body["kv_transfer_params"]["kvx"]["transfer"] for body in w.decode[0].bodies]
                assert len(set(attempts)) == len(attempts) >= 6

    asyncio.run(scenario())


def test_an_instance_that_comes_back_is_used_again_with_its_new_address(
    world: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvx.router.pool.RETRY_S", 0.02)

    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            port = int(w.prefill[0].url.rpartition(":")[2])
            await w.prefill[0].stop()
            assert (await w.complete())[0] == 503
            async with w.client.get(f"{w.url}/health") as answer:
                assert (answer.status, await answer.json()) == (503, {"prefill": 0, "decode": 1})
            w.prefill[0].address, w.prefill[0].epoch = "127.0.0.1:5999", 2
            await w.prefill[0].start(port)
            await w.until(lambda: w.router.dispatcher.pools.prefill[0].up)
            assert (await w.complete())[0] == 200
            assert w.decode[0].bodies[-1]["kv_transfer_params"]["kvx"]["from"] == "127.0.0.1:5999"
            (told,) = (await w.status())["prefill"]
            assert (told["epoch"], told["instance"], told["address"]) == (2, "p", "127.0.0.1:5999")

    asyncio.run(scenario())


def test_a_restart_between_requests_is_noticed(world: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx.router.pool.LOOK_S", 0.02)

    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            w.prefill[0].address, w.prefill[0].epoch = "127.0.0.1:5999", 2
            await w.until(lambda: w.router.dispatcher.pools.prefill[0].address == "127.0.0.1:5999")

    asyncio.run(scenario())


def test_an_address_that_the_operator_gave_needs_no_probe(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p", address="127.0.0.1:5801")], [fake("d")], addresses=True) as w:
            await w.complete()
            assert w.decode[0].bodies[0]["kv_transfer_params"]["kvx"]["from"] == "127.0.0.1:5801"
            assert w.prefill[0].probes == 0

    asyncio.run(scenario())


def test_data_parallel_instances_are_not_pushed_to_one_url(world: Any, fake: Any, released: list[Any]) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p", dp_size=2)], [fake("d")]) as w:
            status, told = await w.complete()
            assert status == 503
            assert "2 data-parallel ranks" in told["error"]["message"]
        async with world(None, [fake("p", dp_size=2)], [fake("d")]) as w:
            assert (await w.complete())[0] == 200
            assert "ticket" in w.decode[0].bodies[0]["kv_transfer_params"]["kvx"]

    asyncio.run(scenario())


def test_round_robin_over_all(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p0"), fake("p1")], [fake("d0"), fake("d1"), fake("d2")]) as w:
            names = [(await w.complete())[1]["choices"][0]["text"] for _ in range(6)]
            assert names == ["d0", "d1", "d2", "d0", "d1", "d2"]
            await w.until(lambda: [len(one.bodies) for one in w.prefill] == [3, 3])
            told = await w.status()
            assert [one["requests"] for one in told["prefill"]] == [3, 3]
            assert [(one["requests"], one["open"]) for one in told["decode"]] == [(2, 0)] * 3
            assert told["counters"] == {"requests": 6, "ok": 6}

    asyncio.run(scenario())


def test_a_plugin_may_choose_the_mode(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        asked = []

        def wish(info: Any) -> Mode:
            asked.append(info)
            return Mode.PULL

        async with world(None, [fake("p")], [fake("d")], wish=wish) as w:
            await w.complete()
            assert "ticket" in w.decode[0].bodies[0]["kv_transfer_params"]["kvx"]
        assert [(one.model, one.prompt_tokens, one.max_tokens) for one in asked] == [("m", 3, 4)]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"), [(Mode.PULL, forever, None), (Mode.PULL, None, forever), (Mode.PUSH, None, forever)]
)
def test_every_wait_has_a_limit(
    world: Any, fake: Any, released: list[Any], mode: Mode, prefill: Any, decode: Any
) -> None:
    async def scenario() -> None:
        limits = Limits(prefill_s=1.5, idle_s=30.0) if prefill else Limits(prefill_s=30.0, idle_s=1.5)
        pools = [[fake(name, script) if script else fake(name)] for name, script in (("p", prefill), ("d", decode))]
        async with world(mode, *pools, limits=limits) as w:
            status, told = await w.complete()
            assert (status, told["error"]["type"]) == (504, "instance_timeout")
            assert "1.5 s" in told["error"]["message"]
            slow = w.prefill[0] if prefill else w.decode[0]
            async with asyncio.timeout(20):
                await slow.left.wait()  # it was told
            assert all(one["up"] for one in (await w.status())["prefill"])  # slow is not gone

    asyncio.run(scenario())


def test_an_address_that_swallows_packets_ends_the_attempt(world: Any, fake: Any) -> None:
    """A listener with a full backlog: no connection comes about, and nobody refuses it."""

    async def scenario() -> None:
        async with world(Mode.PULL, [fake("p")], [fake("d")], limits=Limits(connect_s=0.3)) as w:
            with socket.socket() as deaf:
                deaf.bind(("127.0.0.1", 0))
                deaf.listen(0)
                port = deaf.getsockname()[1]
                fillers = [socket.socket() for _ in range(4)]
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(("127.0.0.1", port))
                await asyncio.sleep(0.1)
                w.router.dispatcher.pools.prefill[0].url = f"http://127.0.0.1:{port}"
                status, told = await w.complete()
                for filler in fillers:
                    filler.close()
            assert status == 503
            assert "cannot be reached" in told["error"]["message"]

    asyncio.run(scenario())


def test_a_stream_that_breaks_says_why(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        stream = Stream()
        stream.die = True
        async with world(Mode.PUSH, [fake("p")], [fake("d", stream)]) as w:
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                await answer.content.readany()
                stream.go_on.set()
                event = (await answer.read()).decode()
            assert event.startswith("data: ")
            assert json.loads(event.removeprefix("data: "))["error"]["type"] == "instance_lost"
            assert "[DONE]" not in event

    asyncio.run(scenario())


def test_an_answer_that_breaks_is_not_taken_for_whole(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        stream = Stream("application/json")
        stream.die = True
        async with world(Mode.PUSH, [fake("p")], [fake("d", stream)]) as w:
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": "x"}) as answer:
                await answer.content.readany()
                stream.go_on.set()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            assert w.router.counters["broken_off"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{", "not JSON"), (b"[1]", "not a JSON object"), (b"[" * 100_000, "not JSON"), (b"\xff", "JSON")],
)
def test_what_is_no_request_is_refused(world: Any, fake: Any, data: bytes, said: str) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            async with w.client.post(f"{w.url}/v1/completions", data=data) as answer:
                told = await answer.json()
                assert (answer.status, told["error"]["type"]) == (400, "invalid_request_error")
                assert said in told["error"]["message"]
            async with w.client.post(f"{w.url}/v1/nothing") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, 404)
            assert w.prefill[0].bodies == w.decode[0].bodies == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 200),
        ("?prefill=2&decode=1", 200),
        ("?prefill=3", 503),
        ("?decode=2", 503),
        ("?prefill=0&decode=-1", 200),
        ("?prefill=all", 400),
    ],
)
def test_health_says_whether_so_many_serve(world: Any, fake: Any, query: str, status: int) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p"), fake("q")], [fake("d")]) as w:
            await w.until(lambda: all(one.up for one in w.router.dispatcher.pools.prefill))
            async with w.client.get(f"{w.url}/health{query}") as answer:
                assert answer.status == status

    asyncio.run(scenario())


def test_the_key_is_asked_for_and_shown(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        key = "a-key-of-20-letters!"
        async with world(Mode.PUSH, [fake("p")], [fake("d")], api_key=key) as w:
            status, told = await w.complete()
            assert (status, told["error"]["type"]) == (401, "invalid_api_key")
            async with w.client.get(f"{w.url}/status", headers={"Authorization": "Bearer x"}) as answer:
                assert answer.status == 401
            async with w.client.get(f"{w.url}/health") as answer:
                assert answer.status == 200
            right = {"Authorization": f"Bearer {key}", "X-Request-Id": "r1", "Cookie": "c"}
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": "x"}, headers=right) as answer:
                assert answer.status == 200
            await w.until(lambda: w.prefill[0].headers)
            for one in (*w.prefill, *w.decode):
                assert one.headers[0]["Authorization"] == f"Bearer {key}"
                assert one.headers[0]["X-Request-Id"] == "r1"
                assert "Cookie" not in one.headers[0]

    asyncio.run(scenario())


def test_a_key_that_is_no_text_is_a_wrong_key(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")], api_key="a-key-of-20-letters!") as w:
            told = await raw(w.url, b"GET /status HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 401")

    asyncio.run(scenario())


def test_a_body_that_never_comes_ends(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")], limits=Limits(idle_s=0.3)) as w:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 10\r\n\r\n{"
            told = await raw(w.url, head)
            assert told.startswith(b"HTTP/1.1 408")

    asyncio.run(scenario())


async def raw(url: str, sent: bytes) -> bytes:
    """The beginning of what a server answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(sent)
    async with asyncio.timeout(20):
        told = await reader.read(100)
    writer.close()
    return told


def test_models_are_those_of_a_decode_instance(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            async with w.client.get(f"{w.url}/v1/models") as answer:
                assert (answer.status, (await answer.json())["data"]) == (200, [{"id": "m"}])
            await w.decode[0].stop()
            async with w.client.get(f"{w.url}/v1/models") as answer:
                assert answer.status in (502, 503)

    asyncio.run(scenario())
