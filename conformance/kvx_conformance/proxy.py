"""A TCP proxy that breaks what it carries, at the event that a scenario names.

One front per listening socket of an instance. On the control plane a front reads the frames that
pass and decodes them, so a fault strikes at a message; on the data plane it counts bytes. Nothing
here sleeps for a fault: each waits for its event, and `fired` tells when it has come.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from attrs import define, field

from kvx.core import wire
from kvx.core.errors import RemoteProtocolError
from kvx_conformance.scenarios import DELAY_S, Act, Break, Plane

_HEADER = struct.Struct(">I")
_CHUNK = 64 << 10
_MOST = 1 << 20
"""Bytes that wait in one direction before its source is read no further."""
_TICK_S = 0.02


@define(eq=False)
class Front:
    """What stands before one listening socket of `owner`."""

    plane: Plane
    owner: str
    port: int
    upstream: int
    listener: socket.socket | None = None


@define(eq=False)
class Flow:
    """One direction of one connection. `came` has not been looked at, `going` has and is being sent."""

    source: socket.socket
    sink: socket.socket
    inward: bool
    """Towards the owner of the front."""
    came: bytearray = field(factory=bytearray)
    going: bytearray = field(factory=bytearray)
    ended: bool = False
    mute: bool = False
    """The receiver has been told that nothing more comes."""


@define(eq=False)
class Pipe:
    """One connection through the proxy."""

    front: Front
    flows: tuple[Flow, Flow]
    held: bool = False
    closing: bool = False


@define(eq=False)
class Armed:
    """A Break that waits for its event; `passed` counts the bytes of its sender since it was armed."""

    what: Break
    passed: int = 0


class Proxy:
    """Its thread runs until `close`. Every method may be called from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._fronts: list[Front] = []
        self._pipes: list[Pipe] = []
        self._armed: list[Armed] = []
        self._held: set[Plane] = set()
        self._until: dict[Plane, float] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------- orders

    def front(self, plane: Plane, owner: str, port: int, upstream: int) -> None:
        """Stand at loopback `port` before `upstream`; `open` begins to listen."""
        with self._lock:
            self._fronts.append(Front(plane, owner, port, upstream))

    def open(self, owner: str) -> None:
        """Its sockets listen: whoever dials the owner is let through."""
        with self._lock:
            for front in self._fronts:
                if front.owner == owner and front.listener is None:
                    front.listener = socket.create_server(("127.0.0.1", front.port), backlog=64)
                    front.listener.setblocking(False)
                    self._selector.register(front.listener, selectors.EVENT_READ, front)

    def refuse(self, owner: str) -> None:
        """Whoever dials the owner is refused, as where no process listens. Open connections stay."""
        with self._lock:
            for front in self._fronts:
                if front.owner == owner and front.listener is not None:
                    self._selector.unregister(front.listener)
                    front.listener.close()
                    front.listener = None

    def arm(self, what: Break) -> None:
        with self._lock:
            self._armed.append(Armed(what))
            self._idle.clear()

    def fired(self, timeout_s: float) -> bool:
        """Wait until every armed fault has happened; False if that took too long."""
        return self._idle.wait(timeout_s)

    def heal(self) -> None:
        """Whatever is held goes on, in its order."""
        with self._lock:
            self._held.clear()
            for pipe in self._pipes:
                pipe.held = False
            for pipe in list(self._pipes):
                self._pump(pipe)

    def close(self) -> None:
        self._closed = True
        self._thread.join(5)
        for pipe in list(self._pipes):
            self._drop(pipe)
        for front in self._fronts:
            if front.listener is not None:
                front.listener.close()
        self._selector.close()

    # ---------------------------------------------------------------- moving bytes

    def _run(self) -> None:
        while not self._closed:
            events = self._selector.select(_TICK_S)
            with self._lock:
                for key, mask in events:
                    if isinstance(key.data, Front):
                        self._accept(key.data)
                    elif key.data in self._pipes:
                        self._ready(key.data, key.fileobj, mask)
                now = time.monotonic()
                for plane in [plane for plane, until in self._until.items() if until <= now]:
                    del self._until[plane]
                    for pipe in [pipe for pipe in self._pipes if pipe.front.plane is plane]:
                        self._pump(pipe)

    def _accept(self, front: Front) -> None:
        if front.listener is None:
            return
        try:
            near, _ = front.listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(("127.0.0.1", front.upstream), timeout=5)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe = Pipe(front, (Flow(near, far, True), Flow(far, near, False)))
        self._pipes.append(pipe)
        for sock in (near, far):
            self._selector.register(sock, selectors.EVENT_READ, pipe)

    def _ready(self, pipe: Pipe, sock: object, mask: int) -> None:
        for flow in pipe.flows:
            if flow.source is sock and mask & selectors.EVENT_READ and not self._read(flow):
                self._drop(pipe)
                return
        self._pump(pipe)

    def _read(self, flow: Flow) -> bool:
        try:
            data = flow.source.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        flow.came += data
        flow.ended = flow.ended or not data
        return True

    def _stands(self, pipe: Pipe) -> bool:
        return pipe.held or pipe.front.plane in self._held or pipe.front.plane in self._until

    def _pump(self, pipe: Pipe) -> None:
        for flow in pipe.flows:
            while flow.came and not self._stands(pipe) and not pipe.closing and self._take(pipe, flow):
                pass
        for flow in pipe.flows:
            if not self._flush(flow):
                self._drop(pipe)
                return
        over = any(flow.ended and not flow.came for flow in pipe.flows) and not self._stands(pipe)
        if (over or pipe.closing) and not any(flow.going for flow in pipe.flows):
            self._drop(pipe)
            return
        self._watch(pipe)

    def _flush(self, flow: Flow) -> bool:
        if flow.mute:
            flow.going.clear()
        try:
            while flow.going:
                del flow.going[: flow.sink.send(flow.going)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _watch(self, pipe: Pipe) -> None:
        for reading, writing in (pipe.flows, reversed(pipe.flows)):
            wanted = 0
            if not reading.ended and len(reading.came) < _MOST:
                wanted |= selectors.EVENT_READ
            if writing.going:
                wanted |= selectors.EVENT_WRITE
            key = self._selector.get_map().get(reading.source)
            if key is not None and not wanted:
                self._selector.unregister(reading.source)
            elif key is None and wanted:
                self._selector.register(reading.source, wanted, pipe)
            elif key is not None and key.events != wanted:
                self._selector.modify(reading.source, wanted, pipe)

    def _drop(self, pipe: Pipe) -> None:
        self._pipes.remove(pipe)
        for flow in pipe.flows:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(flow.source)
            flow.source.close()

    # --------------------------------------------------------------------- faults

    def _take(self, pipe: Pipe, flow: Flow) -> bool:
        """Pass the next unit of this direction on, or break there; False if it is not complete yet."""
        if pipe.front.plane is Plane.DATA:
            return self._bytes(pipe, flow)
        if len(flow.came) < _HEADER.size:
            return False
        size = _HEADER.size + int(_HEADER.unpack_from(flow.came)[0])
        if len(flow.came) < size:
            return False
        unit = bytes(flow.came[:size])
        try:
            kind = type(wire.decode(unit[_HEADER.size :]).message).__name__
        except RemoteProtocolError:
            kind = "?"
        for armed in list(self._armed):
            if armed.what.on == kind and self._meant(armed, pipe, flow):
                self._fire(armed, pipe, flow, unit)
                return True
        del flow.came[:size]
        flow.going += unit
        return True

    def _bytes(self, pipe: Pipe, flow: Flow) -> bool:
        for armed in list(self._armed):
            if not isinstance(armed.what.on, int) or not self._meant(armed, pipe, flow):
                continue
            before = armed.what.on - armed.passed
            if len(flow.came) > before:
                flow.going += flow.came[:before]
                del flow.came[:before]
                self._fire(armed, pipe, flow, bytes(flow.came[:64]))
                return True
            armed.passed += len(flow.came)
        flow.going += flow.came
        flow.came.clear()
        return True

    def _meant(self, armed: Armed, pipe: Pipe, flow: Flow) -> bool:
        plane_fits = armed.what.plane is pipe.front.plane
        return plane_fits and (armed.what.sender == pipe.front.owner) is not flow.inward

    def _fire(self, armed: Armed, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        self._armed.remove(armed)
        _ACTS[armed.what.act](self, pipe, flow, unit)
        if not self._armed:
            self._idle.set()

    def _cut(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        pipe.closing = True

    def _truncate(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        flow.going += unit[: len(unit) // 2]
        pipe.closing = True

    def _half_close(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        flow.came.clear()
        self._flush(flow)
        flow.mute = True
        with contextlib.suppress(OSError):
            flow.sink.shutdown(socket.SHUT_WR)

    def _hold(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        self._held.add(pipe.front.plane)

    def _lane(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        pipe.held = True

    def _delay(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        self._until[pipe.front.plane] = time.monotonic() + DELAY_S

    def _duplicate(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        del flow.came[: len(unit)]
        flow.going += unit + unit

    def _flip(self, pipe: Pipe, flow: Flow, unit: bytes) -> None:
        flow.came[0] ^= 0x10


_ACTS: dict[Act, Callable[[Proxy, Pipe, Flow, bytes], None]] = {
    Act.CUT: Proxy._cut,
    Act.TRUNCATE: Proxy._truncate,
    Act.HALF_CLOSE: Proxy._half_close,
    Act.HOLD: Proxy._hold,
    Act.LANE: Proxy._lane,
    Act.DELAY: Proxy._delay,
    Act.DUPLICATE: Proxy._duplicate,
    Act.FLIP: Proxy._flip,
}
