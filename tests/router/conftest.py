"""The router in front of scripted instances, all in one event loop and on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from attrs import define, field, frozen

from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.driver import Dialect, RequestInfo
from kvx.router.app import Router
from kvx.router.settings import Flow, Listing, PoolFile, Settings
from kvx.router.upstream import Limits

WAIT_S = 20.0
"""Longest wait of a test for what has to happen."""

_TURNS = 8
"""Of the event loop; from accepting a connection until its server knows it there are three in Python 3.11."""

Script = Callable[["Fake", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def completion(fake: Fake, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What an instance says that has nothing to hide: a ticket where one is asked for."""
    params = body.get("kv_transfer_params") or {}
    answer: dict[str, Any] = {"choices": [{"text": fake.name}], "kv_transfer_params": {"kvx": {}}}
    if params.get("do_remote_decode") and "kvx" not in params:
        answer["kv_transfer_params"] = {"do_remote_prefill": True, "kvx": {"ticket": fake.ticket}}
    return web.json_response(answer)


@define(eq=False)
class Fake:
    """An instance: what it was asked, and whether somebody went away in the middle."""

    name: str
    script: Script = completion
    ticket: str = "kvx1.none"
    address: str = "127.0.0.1:5700"
    epoch: int = 1
    dp_size: int = 1
    bodies: list[dict[str, Any]] = field(factory=list)
    headers: list[Mapping[str, str]] = field(factory=list)
    probes: int = 0
    asked: asyncio.Event = field(factory=asyncio.Event)
    left: asyncio.Event = field(factory=asyncio.Event)
    url: str = ""
    _served: Served | None = None

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", _health)
        app.router.add_get("/v1/models", _models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        # Not a port of the kernel's choice, which somebody else may be given once this one has stopped.
        self._served = await Served.begin(app, host, port or free_ports(1)[0])
        self.url = self._served.url

    async def stop(self) -> None:
        if self._served is not None:
            await self._served.end()
            self._served = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (body.get("kv_transfer_params") or {}).get("kvx", {}).get("probe"):
            self.probes += 1
            probe = {
                "instance": self.name,
                "epoch": self.epoch,
                "addresses": [self.address],
                "dp_rank": 0,
                "dp_size": self.dp_size,
                "fingerprint": "f",
            }
            return web.json_response({"choices": [], "kv_transfer_params": {"kvx": probe}})
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.asked.set()
        try:
            return await self.script(self, request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise


@frozen
class Served:
    """An application that listens, until `end`."""

    runner: web.AppRunner
    listener: socket.socket

    @classmethod
    async def begin(cls, app: web.Application, host: str = "127.0.0.1", port: int = 0) -> Served:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server((host, port))
        await web.SockSite(runner, listener).start()
        return cls(runner, listener)

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()
        return f"http://{host}:{port}"

    async def end(self) -> None:
        """Accept no more, let the loop make known what it has accepted, and only then close.

        A connection that Python 3.11 has accepted, but not yet attached to its server when that one closes, is never
        closed: a ResourceWarning, and by that a failure of whichever test the garbage is collected in.
        """
        asyncio.get_running_loop().remove_reader(self.listener.fileno())
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        await self.runner.cleanup()


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m"}]})


@define(eq=False)
class World:
    """A router on a port, its instances, and a client."""

    url: str
    client: aiohttp.ClientSession
    router: Router
    prefill: Sequence[Fake]
    decode: Sequence[Fake]

    async def complete(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, **body}
        async with self.client.post(self.url + path, json=body) as answer:
            return answer.status, json.loads(await answer.read())

    def write_pools(self, prefill: Sequence[Fake], decode: Sequence[Fake]) -> None:
        """Say in the pool file that these are the pools."""
        file = self.router.settings.pool_file
        assert file is not None
        _write_pools(file.path, prefill, decode)

    async def status(self) -> dict[str, Any]:
        async with self.client.get(f"{self.url}/status") as answer:
            told: dict[str, Any] = await answer.json()
            return told

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)


def _write_pools(path: Path, prefill: Sequence[Fake], decode: Sequence[Fake]) -> None:
    """In one step, as an operator should."""
    lists = {"prefill": [fake.url for fake in prefill], "decode": [fake.url for fake in decode]}
    new = path.with_suffix(".new")
    new.write_text("".join(f"{name} = {json.dumps(urls)}\n" for name, urls in lists.items()))
    new.replace(path)


@asynccontextmanager
async def _world(
    mode: Mode | None,
    prefill: Sequence[Fake],
    decode: Sequence[Fake],
    *,
    wish: Callable[[RequestInfo], Mode | None] = lambda _: None,
    limits: Limits | None = None,
    flow: Flow | None = None,
    options: Options | None = None,
    addresses: bool = False,
    wait: bool = True,
    api_key: str = "",
    dialect: Dialect | None = None,
    pool_file: Path | None = None,
    listing: Listing | None = None,
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        for fake in (*prefill, *decode):
            await fake.start()
            stack.push_async_callback(fake.stop)
        texts = [f"{fake.url}={fake.address}" if addresses else fake.url for fake in prefill]
        if pool_file is not None:
            _write_pools(pool_file, prefill, decode)
        router = Router(
            Settings(
                listing=listing or Listing(texts, [fake.url for fake in decode]),
                mode=mode,
                dialect=dialect or CompletionsDialect(),
                wish=wish,
                options=options or Options(),
                limits=limits or Limits(),
                flow=flow or Flow(),
                host="127.0.0.1",
                port=0,
                api_key=api_key,
                pool_file=PoolFile(pool_file) if pool_file else None,
            )
        )
        served = await Served.begin(router.app())
        stack.push_async_callback(served.end)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(served.url, client, router, prefill, decode)
        if wait:
            await world.until(lambda: all(one.up for one in router.dispatcher.pools.instances))
        yield world


@pytest.fixture
def fake() -> type[Fake]:
    return Fake


@pytest.fixture
def world() -> Callable[..., AbstractAsyncContextManager[World]]:
    """`async with world(mode, [prefill fakes], [decode fakes], ...) as w`."""
    return _world
