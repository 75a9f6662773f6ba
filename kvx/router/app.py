"""The router's HTTP side: OpenAI's completions in front of prefill and decode instances."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web
from attrs import define, field

from kvx.core.errors import ConfigError
from kvx.router.dispatch import Dispatcher
from kvx.router.exchange import Refused
from kvx.router.line import Overloaded
from kvx.router.metrics import CONTENT_TYPE, render
from kvx.router.policy import NoInstance
from kvx.router.settings import Settings
from kvx.router.upstream import PASSED_BACK, Answer, Failure, Reply, Upstream, kept

MAX_BODY = 64 << 20
"""Bytes of a request; a prompt of a million token ids takes about 7 MB."""
MODELS_S = 30.0
"""Longest wait for an instance's list of models."""
SHUTDOWN_S = 2.0
"""How long open requests may go on when the router is told to stop."""
PATHS = ("/v1/completions", "/v1/chat/completions")
_SENT_ON = ("Authorization", "X-Request-Id")
_ENDS = ("ok", "failed", "disconnected", "broken_off")
_log = logging.getLogger(__name__)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@define(eq=False)
class Router:
    """The handlers. Made once per process; `app` makes the aiohttp application."""

    settings: Settings
    counters: Counter[str] = field(factory=Counter)
    dispatcher: Dispatcher = field(init=False)
    _upstream: Upstream = field(init=False)

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

    async def _health(self, _: web.Request) -> web.Response:
        """200 while a request can be served: an instance of each pool is up."""
        pools = {"prefill": self.settings.prefill, "decode": self.settings.decode}
        up = {name: sum(instance.up for instance in pool) for name, pool in pools.items()}
        return web.json_response(up, status=200 if all(up.values()) else 503)

    async def _status(self, _: web.Request) -> web.Response:
        settings, dispatcher = self.settings, self.dispatcher
        return web.json_response(
            {
                "schema": "kvx.router/1",
                "mode": settings.mode.value if settings.mode else "auto",
                "prefill": [instance.status() for instance in settings.prefill],
                "decode": [instance.status() for instance in settings.decode],
                "waiting": {"entry": len(dispatcher.entry), "prefilled": len(dispatcher.prefilled)},
                "modes": [
                    {"mode": mode.value, "reason": reason.value, "requests": count}
                    for (mode, reason), count in dispatcher.modes.items()
                ],
                "counters": dict(self.counters),
            }
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        settings, dispatcher = self.settings, self.dispatcher
        pools = {"prefill": settings.prefill, "decode": settings.decode}
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
                ("kvx_router_instance_up", "gauge", "1: it serves.", [(labels, one.up) for labels, one in each]),
                (
                    "kvx_router_instance_resting",
                    "gauge",
                    "1: it has failed lately and serves only where nobody else can.",
                    [(labels, one.resting) for labels, one in each],
                ),
            ]
        )
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        headers = self._headers(request.headers)
        for instance in self.settings.decode:
            if instance.up:
                try:
                    answer = await self._upstream.ask(instance.url, "/v1/models", None, headers, limit_s=MODELS_S)
                    return _passed(answer)
                except Failure as error:
                    return _error(error)
        return _error(Failure(503, "no_instance", "no decode instance is up"))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.counters["requests"] += 1
        try:
            answer = await self._serve(request)
        except (asyncio.CancelledError, ConnectionError):  # of the client's connection
            self.counters["disconnected"] += 1
            raise
        self.counters["ok" if answer.status == 200 else "failed"] += 1
        return answer

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()

        async def pass_on(reply: Reply) -> bool:
            answer.set_status(reply.status)
            answer.headers.update(kept(reply.response.headers, PASSED_BACK))
            return await self._pass_on(request, reply, answer)

        try:
            body = await _read(request, self.settings.limits.idle_s)
            await self.dispatcher.serve(request.path, body, self._headers(request.headers), pass_on)
        except Refused as error:
            return _passed(error.answer)
        except NoInstance as error:
            return _error(Failure(503, "no_instance", str(error)))
        except Failure as error:
            return _error(error)
        return answer

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
        whole = True
        try:
            while piece is not None:
                await _within(self.settings.limits.idle_s, answer.write(piece))
                piece = await anext(pieces, None)
        except Failure as error:
            # The status is out already: a stream can still say why it ends, anything else can only break off.
            whole = False
            self.dispatcher.failed(reply.instance, error)
            self.counters["broken_off"] += 1
            if answer.content_type != "text/event-stream":
                if request.transport is not None:
                    request.transport.abort()
                return False
            await answer.write(b"data: " + json.dumps(_told(error)).encode() + b"\n\n")
        await answer.write_eof()
        return whole

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
    headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else {}
    return web.json_response(_told(error), status=error.status, headers=headers)


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError where the address cannot be listened on."""
    app = Router(settings).app()
    try:
        web.run_app(
            app,
            host=settings.host,
            port=settings.port,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
            access_log=None,
            print=None,
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from error
