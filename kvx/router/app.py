"""The router's HTTP side: OpenAI's completions in front of prefill and decode instances."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from attrs import define, evolve, field

from kvx.core import wire
from kvx.core.errors import ConfigError, KvxError, RemoteProtocolError
from kvx.driver import RequestInfo
from kvx.operator import ask
from kvx.router.exchange import Exchange, Refused
from kvx.router.policy import Choice, NoInstance, Pools, State, choose
from kvx.router.settings import Settings
from kvx.router.upstream import Answer, Failure, Lost, Reply, Unreachable, Upstream

MAX_BODY = 64 << 20
"""Bytes of a request; a prompt of a million token ids takes about 7 MB."""
RELEASE_S = 5.0
"""Longest wait for an instance to take a ticket back."""
MODELS_S = 30.0
"""Longest wait for an instance's list of models."""
SHUTDOWN_S = 2.0
"""How long open requests may go on when the router is told to stop."""
PATHS = ("/v1/completions", "/v1/chat/completions")
_SENT_ON = ("Authorization", "X-Request-Id")
_PASSED_BACK = ("Content-Type", "X-Request-Id", "Retry-After")
_log = logging.getLogger(__name__)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@define(eq=False)
class Router:
    """The handlers and what they share. Made once per process; `app` makes the aiohttp application."""

    settings: Settings
    counters: Counter[str] = field(factory=Counter)
    _upstream: Upstream = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(factory=set)
    _turn: int = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.cleanup_ctx.append(self._run)
        app.router.add_get("/health", self._health)
        app.router.add_get("/status", self._status)
        app.router.add_get("/v1/models", self._models)
        for path in PATHS:
            app.router.add_post(path, self._complete)
        return app

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        settings = self.settings
        async with Upstream(settings.limits) as self._upstream:
            watches = [
                asyncio.create_task(instance.watch(self._upstream, settings.dialect, self._headers({})))
                for instance in (*settings.prefill, *settings.decode)
            ]
            yield
            for task in watches:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=SHUTDOWN_S)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*watches, *self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ what exchanges ask for

    def trouble(self, url: str, error: Failure) -> None:
        _log.warning("%s", error)
        for instance in (*self.settings.prefill, *self.settings.decode):
            if instance.url == url:
                instance.doubt(str(error), down=isinstance(error, Unreachable | Lost))

    def release(self, ticket: str) -> None:
        self.outlive(self._release(ticket))

    def withdraw(self, address: str, transfer: str) -> None:
        self.outlive(self._withdraw(address, transfer))

    def outlive(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, text: str) -> None:
        await self._tell("ticket", "release", lambda: wire.parse_ticket(text).grant.address, text)

    async def _withdraw(self, address: str, transfer: str) -> None:
        await self._tell("push", "withdraw", lambda: address, transfer)

    async def _tell(self, what: str, verb: str, address_of: Callable[[], str], argument: str) -> None:
        """Spare an instance a wait for somebody who will not come."""
        options = self.settings.options
        try:
            address = address_of()
            if not options.may_dial(address):
                raise RemoteProtocolError(f"its address {address} is not in option peers")
            ack = await asyncio.to_thread(ask, address, verb, argument, secret=options.secret, timeout_s=RELEASE_S)
        except KvxError as error:
            _log.warning("%s of a %s failed, a time limit will end it: %s", verb, what, error)
            self.counters[f"{verb}_failed"] += 1
        else:
            # "no" is as good: the other side has ended the transfer itself
            self.counters[f"{verb}_done" if ack.ok else f"{verb}_needless"] += 1

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
        settings = self.settings
        return web.json_response(
            {
                "schema": "kvx.router/1",
                "mode": settings.mode.value if settings.mode else "auto",
                "prefill": [instance.status() for instance in settings.prefill],
                "decode": [instance.status() for instance in settings.decode],
                "counters": dict(self.counters),
            }
        )

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
        try:
            body = await _read(request, self.settings.limits.idle_s)
            headers = self._headers(request.headers)
            exchange = Exchange(self, self._upstream, self.settings.dialect, request.path, body, headers)
            state = State(self._turn)
            self._turn += 1
            while True:
                choice = self._choose(body, state)
                try:
                    with self._counted(choice):
                        async with exchange.answered(choice) as reply:
                            return await self._pass_on(request, reply)
                except Unreachable as error:
                    self.counters["retries"] += 1
                    state = evolve(state, tried=state.tried | {error.instance})
        except Refused as error:
            return _passed(error.answer)
        except NoInstance as error:
            return _error(Failure(503, "no_instance", str(error)))
        except Failure as error:
            return _error(error)

    def _choose(self, body: Mapping[str, Any], state: State) -> Choice:
        settings = self.settings
        pools = Pools(
            [instance.candidate() for instance in settings.prefill],
            [instance.candidate() for instance in settings.decode],
            settings.mode,
        )
        return choose(pools, _info(body), state, settings.wish)

    @contextmanager
    def _counted(self, choice: Choice) -> Generator[None, None, None]:
        """One open request more at both instances."""
        settings = self.settings
        pools = ((settings.prefill, choice.prefill), (settings.decode, choice.decode))
        chosen = [instance for pool, candidate in pools for instance in pool if instance.url == candidate.url]
        for instance in chosen:
            instance.requests += 1
            instance.open += 1
        try:
            yield
        finally:
            for instance in chosen:
                instance.open -= 1

    async def _pass_on(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        """Each piece goes out before the next one is waited for."""
        answer = web.StreamResponse(status=reply.status, headers=_kept(reply.response.headers, _PASSED_BACK))
        await answer.prepare(request)
        try:
            async for piece in reply.pieces():
                await _within(self.settings.limits.idle_s, answer.write(piece))
        except Failure as error:
            # The status is out already: a stream can still say why it ends, anything else can only break off.
            self.trouble(reply.instance, error)
            self.counters["broken_off"] += 1
            if answer.content_type != "text/event-stream":
                if request.transport is not None:
                    request.transport.abort()
                return answer
            await answer.write(b"data: " + json.dumps(_told(error)).encode() + b"\n\n")
        await answer.write_eof()
        return answer

    def _headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """The headers of a leg: the client's, and the router's own key where it has one."""
        key = self.settings.api_key
        return _kept(given, _SENT_ON) | ({"Authorization": f"Bearer {key}"} if key else {})


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


def _info(body: Mapping[str, Any]) -> RequestInfo:
    model, prompt, limit = body.get("model"), body.get("prompt"), body.get("max_tokens")
    return RequestInfo(
        model if isinstance(model, str) else "",
        len(prompt) if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) else None,
        limit if isinstance(limit, int) else None,
    )


async def _within(limit_s: float, work: Coroutine[Any, Any, None]) -> None:
    """A client that reads nothing may not hold the engine's blocks for ever."""
    try:
        async with asyncio.timeout(limit_s):
            await work
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {limit_s:g} s") from error


def _kept(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def _passed(answer: Answer) -> web.Response:
    headers = {"Content-Type": answer.content_type} if answer.content_type else {}
    return web.Response(status=answer.status, body=answer.data, headers=headers)


def _told(error: Failure) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}


def _error(error: Failure) -> web.Response:
    return web.json_response(_told(error), status=error.status)


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
