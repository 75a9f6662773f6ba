"""The HTTP face of an engine: `/v1/completions`, `/v1/models`, `/health`; for a look inside `/stats` and `/cache`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kvx_reference.engine.completions import Answers, Piece, TextStream, Wanted, error_body, parse
from kvx_reference.engine.engine import RequestError
from kvx_reference.engine.request import Finish, Request
from kvx_reference.engine.tokenizer import Tokenizer
from kvx_reference.engine.worker import EngineDead, Worker

_MAX_BODY = 16 << 20
_SHUTDOWN_S = 1.0
_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Server:
    """Handlers of one engine, which `name` is what clients call the model."""

    def __init__(self, worker: Worker, tokenizer: Tokenizer, name: str) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._name = name

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        app.router.add_post("/cache", self._cache)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._close)
        return app

    async def _start(self, app: web.Application) -> None:
        self._worker.start()

    async def _close(self, app: web.Application) -> None:
        await asyncio.to_thread(self._worker.close)

    async def _health(self, request: web.Request) -> web.Response:
        failure = self._worker.failure
        return web.Response() if failure is None else _error(503, failure)

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(self._worker.engine.snapshot())

    async def _cache(self, request: web.Request) -> web.Response:
        try:
            tokens = [int(token) for token in json.loads(await request.read())["prompt"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return _error(400, f"the body is no JSON with a prompt of tokens: {error}")
        return web.Response(body=self._worker.engine.cached(tokens))

    async def _models(self, request: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": self._name, "object": "model", "owned_by": "kvx_reference"}
        model["max_model_len"] = self._worker.engine.model.config.max_position
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = parse(json.loads(await request.read()), self._tokenizer)
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body is no JSON: {error}")
        except RequestError as error:
            return _error(400, str(error))
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        work = Request(secrets.token_hex(8), wanted.prompt, wanted.sampling, wanted.params, wanted.salt)
        try:
            self._worker.submit(work, TextStream(self._tokenizer, wanted.stops), _into(pieces, loop))
        except RequestError as error:
            return _error(400, str(error))
        except EngineDead as error:
            return _error(503, str(error))
        answers = Answers(f"cmpl-{work.id}", self._name, int(time.time()), wanted, self._tokenizer)
        try:
            if wanted.stream:
                return await self._stream(request, wanted, answers, pieces)
            return await self._whole(answers, pieces)
        finally:
            # Reached by cancellation too: aiohttp cancels a handler whose client has left.
            self._worker.abort(work.id)

    @staticmethod
    async def _whole(answers: Answers, pieces: asyncio.Queue[Piece]) -> web.Response:
        got = [await pieces.get()]
        while got[-1].finish is None:
            got.append(await pieces.get())
        if _failed(got[-1]):
            return _error(500, got[-1].error)
        return web.json_response(answers.whole(got))

    @staticmethod
    async def _stream(
        request: web.Request, wanted: Wanted, answers: Answers, pieces: asyncio.Queue[Piece]
    ) -> web.StreamResponse:
        piece = await pieces.get()
        if _failed(piece):
            return _error(500, piece.error)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        await response.write(_event(answers.chunk(piece, first=True)))
        while piece.finish is None:
            piece = await pieces.get()
            event = error_body(500, piece.error) if _failed(piece) else answers.chunk(piece, first=False)
            await response.write(_event(event))
        if wanted.usage:
            await response.write(_event(answers.usage_chunk()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _into(pieces: asyncio.Queue[Piece], loop: asyncio.AbstractEventLoop) -> Callable[[Piece], None]:
    def deliver(piece: Piece) -> None:
        if not loop.is_closed():  # at the end of the process the engine may be the last one to notice
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    return deliver


def _failed(piece: Piece) -> bool:
    return piece.finish is Finish.ERROR


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _error(status: int, text: str) -> web.Response:
    return web.json_response(error_body(status, text), status=status)


def serve(server: Server, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    web.run_app(
        server.app(),
        host=host,
        port=port,
        access_log=None,
        handle_signals=True,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
        print=None,
    )
