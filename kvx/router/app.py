"""The router's HTTP side: OpenAI's completions in front of prefill and decode instances."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web
from attrs import define, field

from kvx.core.errors import ConfigError
from kvx.router.dispatch import Dispatcher
from kvx.router.exchange import Refused
from kvx.router.metrics import CONTENT_TYPE, Samples, render
from kvx.router.policy import NoInstance
from kvx.router.settings import Settings
from kvx.router.upstream import PASSED_BACK, Answer, Failure, Reply, Upstream, kept

MAX_BODY = 64 << 20
"""Bytes of a request; a prompt of a million token ids takes about 7 MB."""
MODELS_S = 30.0
"""Longest wait for an instance's list of models."""
SHUTDOWN_S = 2.0
"""How long connections and errands may take to end when no request is open any more."""
RETRY_AFTER_S = 1
"""When a client that a stopping router has turned away may come again: another router answers then."""
PATHS = ("/v1/completions", "/v1/chat/completions")
_SENT_ON = ("Authorization", "X-Request-Id")
_ENDS = ("ok", "failed", "disconnected", "broken_off", "turned_away")
_log = logging.getLogger(__name__)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stopping(Failure):
    """The router has been told to stop."""

    retry_after = RETRY_AFTER_S

    def __init__(self, message: str) -> None:
        super().__init__(503, "stopping", message)


@define(eq=False)
class Router:
    """The handlers. Made once per process; `app` makes the aiohttp application."""

    settings: Settings
    counters: Counter[str] = field(factory=Counter)
    stopping: bool = False
    dispatcher: Dispatcher = field(init=False)
    _upstream: Upstream = field(init=False)
    _open: set[asyncio.Timeout] = field(factory=set)
    """One for each open request: without a limit until the router is told to stop."""
    _idle: asyncio.Event = field(factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.cleanup_ctx.append(self._run)
        app.router.add_get("/health", self._health)
        app.router.add_get("/status", self._status)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        for path in PATHS:
            app.router.add_post(path, self._complete)
        return app

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        async with Upstream(self.settings.limits) as self._upstream:
            self.dispatcher = Dispatcher(self.settings, self._upstream, self.counters)
            self.dispatcher.watch(self._headers({}))
            yield
            await self.dispatcher.close(SHUTDOWN_S)

    async def drain(self, limit_s: float) -> None:
        """Take no new request; wait until none is open, and end those that still are after `limit_s` seconds."""
        self.stopping = True
        until = asyncio.get_running_loop().time() + limit_s
        for limit in self._open:
            limit.reschedule(until)
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    # ------------------------------------------------------------ handlers

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The API key, and one form for every error."""
        key = self.settings.api_key
        shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if key and request.path != "/health" and not hmac.compare_digest(shown, f"Bearer {key}".encode()):
            return _error(Failure(401, "invalid_api_key", "the API key is missing or wrong"))
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error(Failure(error.status, "invalid_request_error", error.reason))

    async def _health(self, request: web.Request) -> web.Response:
        """200 while a request can be served: an instance of each pool serves, and the router is to go on.

        A query such as `?prefill=2&decode=3` asks for so many of them.
        """
        pools = {"prefill": self.dispatcher.pools.prefill, "decode": self.dispatcher.pools.decode}
        serving = {name: sum(instance.serves for instance in pool) for name, pool in pools.items()}
        try:
            least = {name: max(1, int(request.query.get(name, "1"))) for name in pools}
        except ValueError as error:
            raise web.HTTPBadRequest(reason="the query says how many: ?prefill=1&decode=1") from error
        enough = all(serving[name] >= least[name] for name in pools)
        return web.json_response(serving, status=200 if enough and not self.stopping else 503)

    async def _status(self, _: web.Request) -> web.Response:
        settings, dispatcher, pools = self.settings, self.dispatcher, self.dispatcher.pools
        file = settings.pool_file
        return web.json_response(
            {
                "schema": "kvx.router/1",
                "mode": settings.mode.value if settings.mode else "auto",
                "stopping": self.stopping,
                "prefill": [instance.status() for instance in pools.prefill],
                "decode": [instance.status() for instance in pools.decode],
                "pool_file": {"path": str(file.path), "error": pools.error} if file else None,
                "dns": pools.lookups(),
                "waiting": {"entry": len(dispatcher.entry), "prefilled": len(dispatcher.prefilled)},
                "modes": [
                    {"mode": mode.value, "reason": reason.value, "requests": count}
                    for (mode, reason), count in dispatcher.modes.items()
                ],
                "counters": dict(self.counters),
            }
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        dispatcher = self.dispatcher
        pools = {"prefill": dispatcher.pools.prefill, "decode": dispatcher.pools.decode}
        followed: Samples = [({}, not dispatcher.pools.error)] if self.settings.pool_file else []
        looked_up = [
            ({key: one[key] for key in ("pool", "url")}, not one["error"]) for one in dispatcher.pools.lookups()
        ]
        each = [({"pool": pool, "instance": one.url}, one) for pool, ones in pools.items() for one in ones]
        chosen = [({"mode": mode.value, "reason": reason.value}, n) for (mode, reason), n in dispatcher.modes.items()]
        ends = [({"outcome": end}, self.counters[end]) for end in _ENDS]
        lines = {"entry": dispatcher.entry, "prefilled": dispatcher.prefilled}
        text = render(
            [
                ("kvx_router_mode_total", "counter", "Attempts by mode, and why it was chosen.", chosen),
                ("kvx_router_requests_total", "counter", "Requests that have ended, by how.", ends),
                ("kvx_router_retries_total", "counter", "Attempts after the first.", [({}, self.counters["retries"])]),
                (
                    "kvx_router_waiting_requests",
                    "gauge",
                    "Requests that wait for room at an instance: at the entry, or prefilled.",
                    [({"line": name}, len(line)) for name, line in lines.items()],
                ),
                ("kvx_router_open_legs", "gauge", "Open legs.", [(labels, one.open) for labels, one in each]),
                ("kvx_router_instance_up", "gauge", "1: it answers.", [(labels, one.up) for labels, one in each]),
                (
                    "kvx_router_instance_draining",
                    "gauge",
                    "1: it finishes what it has and gets nothing new.",
                    [(labels, one.draining) for labels, one in each],
                ),
                (
                    "kvx_router_instance_resting",
                    "gauge",
                    "1: it has failed lately and serves only where nobody else can.",
                    [(labels, one.resting) for labels, one in each],
                ),
                ("kvx_router_pool_file_ok", "gauge", "0: the pools are not what the pool file says.", followed),
                ("kvx_router_dns_ok", "gauge", "0: the newest lookup of this name has failed.", looked_up),
            ]
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        headers = self._headers(request.headers)
        for instance in self.dispatcher.pools.decode:
            if instance.serves:
                try:
                    answer = await self._upstream.ask(instance.url, "/v1/models", None, headers, limit_s=MODELS_S)
                    return _passed(answer)
                except Failure as error:
                    return _error(error)
        return _error(Failure(503, "no_instance", "no decode instance is up"))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.counters["requests"] += 1
        if self.stopping:
            self.counters["turned_away"] += 1
            return _error(Stopping("this router is about to stop: it takes no new requests"))
        limit = asyncio.timeout(None)
        self._open.add(limit)
        try:
            answer, whole = await self._serve(request, limit)
        except (asyncio.CancelledError, ConnectionError):  # of the client's connection
            self.counters["disconnected"] += 1
            raise
        finally:
            self._open.discard(limit)
            self._idle.set()
        self.counters["broken_off" if not whole else "ok" if answer.status == 200 else "failed"] += 1
        return answer

    async def _serve(self, request: web.Request, limit: asyncio.Timeout) -> tuple[web.StreamResponse, bool]:
        """The answer, and whether the client has got all of it."""
        answer = web.StreamResponse()
        whole = True

        async def pass_on(reply: Reply) -> bool:
            answer.set_status(reply.status)
            answer.headers.update(kept(reply.response.headers, PASSED_BACK))
            nonlocal whole
            whole = await self._pass_on(request, reply, answer)
            return whole

        try:
            async with limit:
                body = await _read(request, self.settings.limits.idle_s)
                await self.dispatcher.serve(request.path, body, self._headers(request.headers), pass_on)
        except Refused as error:
            return _passed(error.answer), True
        except NoInstance as error:
            return _error(Failure(503, "no_instance", str(error))), True
        except Failure as error:
            return _error(error), True
        except TimeoutError:
            stopped = Stopping(f"this router stops, and the request was not over in {self.settings.drain_s:g} s")
            if not answer.prepared:
                return _error(stopped), True
            await _break_off(request, answer, stopped)
            return answer, False
        return answer, whole

    async def _pass_on(self, request: web.Request, reply: Reply, answer: web.StreamResponse) -> bool:
        """Each piece goes out before the next one is waited for; nothing does before there is a first one."""
        pieces = reply.pieces()
        try:
            piece = await anext(pieces, None)
        except Failure as error:
            error.instance = reply.instance
            self.dispatcher.failed(reply.instance, error)
            raise
        await answer.prepare(request)
        try:
            while piece is not None:
                await _within(self.settings.limits.idle_s, answer.write(piece))
                piece = await anext(pieces, None)
        except Failure as error:
            self.dispatcher.failed(reply.instance, error)
            await _break_off(request, answer, error)
            return False
        await answer.write_eof()
        return True

    def _headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """The headers of a leg: the client's, and the router's own key where it has one."""
        key = self.settings.api_key
        return kept(given, _SENT_ON) | ({"Authorization": f"Bearer {key}"} if key else {})


async def _read(request: web.Request, limit_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(limit_s):
            body = json.loads(await request.read())
    except TimeoutError as error:
        raise Failure(408, "invalid_request_error", f"the body did not come in {limit_s:g} s") from error
    except (ValueError, RecursionError) as error:
        raise Failure(400, "invalid_request_error", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Failure(400, "invalid_request_error", "the body is not a JSON object")
    return body


async def _break_off(request: web.Request, answer: web.StreamResponse, error: Failure) -> None:
    """The status is out already: a stream can still say why it ends, anything else can only break off."""
    if answer.content_type == "text/event-stream":
        await _within(SHUTDOWN_S, answer.write(b"data: " + json.dumps(_told(error)).encode() + b"\n\n"))
        await answer.write_eof()
    elif request.transport is not None:
        request.transport.abort()


async def _within(limit_s: float, work: Coroutine[Any, Any, None]) -> None:
    """A client that reads nothing may not hold the engine's blocks for ever."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {limit_s:g} s") from error


def _passed(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.data, headers=answer.headers)


def _told(error: Failure) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}


def _error(error: Failure) -> web.Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return web.json_response(_told(error), status=error.status, headers=headers)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, and then until no request is open; a second signal waits for none of them.

    Raises ConfigError where the address cannot be listened on.
    """
    asyncio.run(_serve(Router(settings)))


async def _serve(router: Router) -> None:
    settings = router.settings
    runner = web.AppRunner(router.app(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
        await _told_to_stop(router)
    finally:
        await runner.cleanup()


async def _told_to_stop(router: Router) -> None:
    """Return when no request is open after a first signal, or at a second one."""
    loop, told, again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def tell() -> None:
        (again if told.is_set() else told).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell)
    await told.wait()
    _log.warning("told to stop: open requests have %g s", router.settings.drain_s)
    ends = [asyncio.create_task(router.drain(router.settings.drain_s)), asyncio.create_task(again.wait())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
