"""`python -m abacus --model FILE --port N`: the engine behind OpenAI's completions, as far as a router needs them."""

from __future__ import annotations

import argparse
import importlib
import json
import queue
import secrets
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from abacus.engine import Engine, Pool, Request
from abacus.model import VOCABULARY, Model

_MAX_BODY = 1 << 20
_MAX_TOKENS = 4096
_LOOK_S = 0.02
"""How often a handler that waits for tokens looks whether its client is still there."""

Piece = tuple[list[int], bool, Mapping[str, Any] | None]


def serve(engine: Engine, model: str, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/health":
                    self._answer(200, {"free_blocks": engine.pool.free, "blocks": engine.pool.total})
                case "/v1/models":
                    self._answer(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
                case _:
                    self._answer(404, {"error": {"message": "not here"}})

        def do_POST(self) -> None:
            pieces: queue.Queue[Piece] = queue.Queue()
            try:
                length = int(self.headers.get("Content-Length", ""))
                if not 0 < length <= _MAX_BODY:
                    raise ValueError(f"a body has 1 to {_MAX_BODY} bytes")
                body = json.loads(self.rfile.read(length))
                request = _request(body, lambda *piece: pieces.put(piece))
                engine.submit(request)
            except (ValueError, RecursionError) as error:
                self._answer(400, {"error": {"message": str(error)}})
                return
            try:
                self._tell(body, request, _pieces(pieces, self.connection))
            except ConnectionError:
                engine.abort(request.id)

        def _tell(self, body: Mapping[str, Any], request: Request, pieces: Iterator[Piece]) -> None:
            head = {"id": f"cmpl-{request.id}", "object": "text_completion", "model": model}
            stream, tokens = bool(body.get("stream")), []
            if stream:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
            for new, last, added in pieces:
                tokens += new
                choice = {"index": 0, "text": "", "token_ids": new, "finish_reason": "length" if last else None}
                extra = {"kv_transfer_params": added} if added else {}
                if stream:
                    self.wfile.write(b"data: " + json.dumps({**head, "choices": [choice], **extra}).encode() + b"\n\n")
                elif last:
                    self._answer(200, {**head, "choices": [{**choice, "token_ids": tokens}], **extra})
            if stream:
                self.wfile.write(b"data: [DONE]\n\n")

        def _answer(self, status: int, content: Mapping[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class has named it
            """Say nothing."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    engine.start()
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    engine.close()


def _request(body: Any, deliver: Any) -> Request:
    """Raises ValueError for a body that cannot be served."""
    body = body if isinstance(body, dict) else {}
    prompt, wanted = body.get("prompt"), body.get("max_tokens", 16)
    if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < VOCABULARY for token in prompt):
        raise ValueError(f"prompt has to be a list of tokens from 0 to {VOCABULARY - 1}")
    if type(wanted) is not int or not 1 <= wanted <= _MAX_TOKENS:
        raise ValueError(f"max_tokens has to be a number from 1 to {_MAX_TOKENS}")
    return Request(secrets.token_hex(8), tuple(prompt), wanted, body.get("kv_transfer_params"), deliver)


def _pieces(pieces: queue.Queue[Piece], client: socket.socket) -> Iterator[Piece]:
    """Until the last one. Raises ConnectionError where the client has left."""
    last = False
    while not last:
        try:
            piece = pieces.get(timeout=_LOOK_S)
        except queue.Empty:
            if select.select([client], [], [], 0)[0] and not client.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError("the client has left") from None
            continue
        last = piece[1]
        yield piece


def main() -> None:
    parser = argparse.ArgumentParser("abacus")
    parser.add_argument("--model", required=True, help="a file that holds the seed of the weights")
    parser.add_argument("--make", type=int, metavar="SEED", help="write this file and end")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--mover", metavar="MODULE:FUNCTION", help="who brings and takes parts of the cache")
    parser.add_argument("--mover-options", type=json.loads, default={}, metavar="JSON")
    options = parser.parse_args()
    path = Path(options.model)
    if options.make is not None:
        path.write_text(str(options.make), encoding="utf-8")
        return
    model, pool = Model(int(path.read_text(encoding="utf-8")), options.blocks), Pool(options.blocks)
    mover = None
    if options.mover:
        module, _, name = options.mover.partition(":")
        mover = getattr(importlib.import_module(module), name)(model, pool, options.mover_options)
    serve(Engine(model, pool, mover), options.model, options.host, options.port)


if __name__ == "__main__":
    main()
