"""Pools that change while the router runs: an instance comes, goes, or is being drained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvx.core.messages import Ack
from kvx.core.model import Mode
from kvx.router import errands


@pytest.fixture(autouse=True)
def draining(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The control addresses that say they are being drained."""
    addresses: set[str] = set()

    def ask(address: str, verb: str, *_: Any, **__: Any) -> Ack:
        return Ack("t", True, body=json.dumps({"draining": address in addresses}) if verb == "status" else "")

    monkeypatch.setattr(errands, "ask", ask)
    monkeypatch.setattr("kvx.router.pool.LOOK_S", 0.02)
    monkeypatch.setattr("kvx.router.pools.FILE_S", 0.02)
    return addresses


async def text(w: Any) -> str:
    """Who has decoded."""
    status, answer = await w.complete()
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


async def until_all_decode(w: Any, names: set[str]) -> None:
    """A request may still count at its instance when its answer is here, so that the next one goes elsewhere."""
    seen: set[str] = set()
    async with asyncio.timeout(20):
        while seen != names:
            seen.add(await text(w))


async def metrics(w: Any) -> str:
    async with w.client.get(f"{w.url}/metrics") as answer:
        return str(await answer.text())


@pytest.mark.parametrize("mode", list(Mode))
def test_an_instance_that_is_drained_gets_nothing_new(world: Any, fake: Any, mode: Mode, draining: set[str]) -> None:
    async def scenario() -> None:
        prefill = [fake(name, address=f"127.0.0.1:570{n}") for n, name in enumerate(("p0", "p1"))]
        decode = [fake(name, address=f"127.0.0.1:580{n}") for n, name in enumerate(("d0", "d1"))]
        async with world(mode, prefill, decode) as w:
            pools = w.router.dispatcher.pools
            draining.update(("127.0.0.1:5700", "127.0.0.1:5801"))
            await w.until(lambda: pools.prefill[0].draining and pools.decode[1].draining)
            before = len(prefill[0].bodies)
            assert [await text(w) for _ in range(4)] == ["d0"] * 4
            assert len(prefill[0].bodies) == before
            assert [one["draining"] for one in (await w.status())["prefill"]] == [True, False]
            assert f'kvx_router_instance_draining{{pool="decode",instance="{decode[1].url}"}} 1' in await metrics(w)

            draining.add("127.0.0.1:5701")
            await w.until(lambda: pools.prefill[1].draining)
            status, told = await w.complete()
            assert (status, told["error"]["type"]) == (503, "no_instance")
            assert "it is being drained" in told["error"]["message"]
            async with w.client.get(f"{w.url}/health") as answer:
                assert (answer.status, await answer.json()) == (503, {"prefill": 0, "decode": 1})

            draining.clear()  # a new process at the same address
            await w.until(lambda: all(one.serves for one in pools.instances))
            await until_all_decode(w, {"d0", "d1"})

    asyncio.run(scenario())


def test_who_does_not_tell_goes_on_serving(world: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def ask(*_: Any, **__: Any) -> Ack:
            loop.call_soon_threadsafe(asked.set)
            return Ack("t", False, detail="the proof does not hold")

        monkeypatch.setattr(errands, "ask", ask)
        async with world(Mode.PUSH, [fake("p")], [fake("d")]) as w:
            await asked.wait()
            assert await text(w) == "d"

    asyncio.run(scenario())


def test_the_pools_follow_their_file(world: Any, fake: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def held(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response({"choices": [{"text": one.name}]})

        d0, d1 = fake("d0", held), fake("d1")
        async with world(Mode.PUSH, [fake("p")], [d0], pool_file=tmp_path / "pools.toml") as w:
            pools = w.router.dispatcher.pools
            (prefill,) = pools.prefill
            leaving = asyncio.create_task(text(w))
            await d0.asked.wait()
            await d1.start()
            try:
                w.write_pools(w.prefill, [d1])
                await w.until(lambda: [one.url for one in pools.decode] == [d1.url] and pools.decode[0].up)
                assert pools.prefill[0] is prefill  # who stays is not asked anew who it is
                assert [await text(w) for _ in range(3)] == ["d1"] * 3
                go_on.set()
                assert await leaving == "d0"  # what was open there goes on
                w.write_pools(w.prefill, [d0, d1])
                await w.until(lambda: len(pools.decode) == 2 and all(one.up for one in pools.decode))
                await until_all_decode(w, {"d0", "d1"})
            finally:
                await d1.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prefill = [", "Invalid value"),
        ("", "at least one prefill URL"),
        ('prefill = ["http://p"]\ndecode = ["http://p"]', "http://p stands in both pools"),
        ('prefill = ["p:1"]\ndecode = ["http://d"]', "'p:1' is not a URL"),
        ('prefill = "http://p"\ndecode = ["http://d"]', "have to be lists of texts"),
        ('prefil = ["http://p"]', "unknown key 'prefil'"),
        ("#" * (1 << 20) + "#", "more than 1048576 bytes"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_changes_nothing_and_says_why(
    world: Any, fake: Any, tmp_path: Path, content: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        path = tmp_path / "pools.toml"
        async with world(Mode.PUSH, [fake("p")], [fake("d")], pool_file=path) as w:
            pools = w.router.dispatcher.pools
            path.unlink()
            if content is not None:
                path.write_text(content)
            await w.until(lambda: said in pools.error)
            told = (await w.status())["pool_file"]
            assert told["path"] == str(path)
            assert told["error"].startswith(f"pool file {path}: ")
            assert "kvx_router_pool_file_ok 0\n" in await metrics(w)
            assert await text(w) == "d"
            w.write_pools(w.prefill, w.decode)
            await w.until(lambda: not pools.error)
            assert "kvx_router_pool_file_ok 1\n" in await metrics(w)

    asyncio.run(scenario())
    assert "the pools stay as they are" in caplog.text


def test_an_instance_that_is_set_up_differently_is_another_one(world: Any, fake: Any, tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "pools.toml"
        async with world(Mode.PUSH, [fake("p")], [fake("d")], pool_file=path) as w:
            pools = w.router.dispatcher.pools
            path.write_text(f'prefill = ["{w.prefill[0].url}=127.0.0.1:5801"]\ndecode = ["{w.decode[0].url}"]\n')
            await w.until(lambda: pools.prefill[0].address == "127.0.0.1:5801" and pools.prefill[0].up)
            await text(w)
            assert w.decode[0].bodies[0]["kv_transfer_params"]["kvx"]["from"] == "127.0.0.1:5801"

    asyncio.run(scenario())
