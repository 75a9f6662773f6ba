"""The engine's own thread: takes requests, steps, and hands out what came of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from attrs import define, field

from kvx_reference.engine.completions import Piece, TextStream
from kvx_reference.engine.engine import Engine
from kvx_reference.engine.request import Finish, Output, Request

logger = logging.getLogger("kvx_reference")

_LOADING_POLL_S = 0.001
_IDLE_POLL_S = 0.02
"""How often a connector is asked for news while there is nothing to compute: a request waits for them, or none does."""
_JOIN_S = 10.0

Deliver = Callable[[Piece], None]


class EngineDead(Exception):
    """The engine has failed and serves nothing any more."""


@define(eq=False)
class _Client:
    stream: TextStream
    deliver: Deliver


@define(eq=False)
class Worker:
    """Runs an engine. `submit` and `abort` may be called from any thread; `Deliver` runs in the engine's."""

    engine: Engine
    _inbox: deque[Callable[[], None]] = field(factory=deque, init=False)
    _awake: threading.Condition = field(factory=threading.Condition, init=False)
    _clients: dict[str, _Client] = field(factory=dict, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _stop: bool = field(default=False, init=False)
    failure: str | None = field(default=None, init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step, and the engine with it."""
        with self._awake:
            self._stop = True
            self._awake.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def submit(self, request: Request, stream: TextStream, deliver: Deliver) -> None:
        """Raises RequestError for a request that can never be served, EngineDead where none can."""
        self.engine.check(request)
        with self._awake:
            if self.failure is not None:
                raise EngineDead(self.failure)
            self._put(lambda: self._add(request, _Client(stream, deliver)))

    def abort(self, request_id: str) -> None:
        """The client has left. Nothing happens where the request has ended."""
        self._put(lambda: self._end(request_id, Finish.ABORT))

    def _put(self, call: Callable[[], None]) -> None:
        with self._awake:
            self._inbox.append(call)
            self._awake.notify()

    def _run(self) -> None:
        try:
            while self._take():
                for output in self.engine.step():
                    self._hand_out(output)
        except Exception as error:  # whatever it was: clients must hear of it, and no one may wait for ever
            logger.exception("the engine has failed")
            with self._awake:  # from here on `submit` refuses
                self.failure = f"the engine has failed: {error!r}"
                for call in self._inbox:
                    call()
            for client in self._clients.values():
                client.deliver(Piece(finish=Finish.ERROR, error=self.failure))
            self._clients.clear()
        finally:
            self.engine.close()

    def _take(self) -> bool:
        """Wait until there is something to do, and do what was asked for; False: it is time to end."""
        with self._awake:
            while not (self._stop or self._inbox or self.engine.has_work):
                if self.engine.is_waiting:
                    self._awake.wait(_LOADING_POLL_S if self.engine.is_loading else _IDLE_POLL_S)
                    break
                self._awake.wait()
            calls = list(self._inbox)
            self._inbox.clear()
        for call in calls:
            call()
        return not self._stop

    def _add(self, request: Request, client: _Client) -> None:
        if request.id in self._clients:
            client.deliver(Piece(finish=Finish.ERROR, error=f"there is a request {request.id} already"))
            return
        # Before the engine has it: should the engine fail now, this client hears of it too.
        self._clients[request.id] = client
        if self.failure is None:
            self.engine.add(request)

    def _end(self, request_id: str, finish: Finish) -> None:
        if self.failure is None:
            self.engine.end(request_id, finish)
        self._clients.pop(request_id, None)

    def _hand_out(self, output: Output) -> None:
        client = self._clients.get(output.request)
        if client is None:
            return
        finish, params, text = output.finish, output.params, ""
        if output.drawn is not None:
            text = client.stream.add(output.drawn.token)
            if client.stream.stopped and finish is not Finish.STOP:
                ended = self.engine.end(output.request, Finish.STOP)
                finish, params = Finish.STOP, ended.params if ended else params
        if finish is not None:
            text += client.stream.end()
            del self._clients[output.request]
        drawn = () if output.drawn is None else (output.drawn,)
        client.deliver(Piece(text, drawn, finish, output.error, params))
