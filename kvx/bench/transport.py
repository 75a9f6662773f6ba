"""Verified copies between two processes, interleaved with what the machine can do without kvx.

Baselines: `memcpy` copies inside one process; `socket` is a plain two-process program with as
many streams and threads as kvx_tcp has. Every copy carries a new pattern and is compared.
"""

from __future__ import annotations

import base64
import secrets
import select
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from kvx.bench.baselines import plain_socket
from kvx.bench.child import ANSWER_S, Child
from kvx.bench.slab import Slab
from kvx.bench.target import INITIATOR, STAMPS, TARGET, info
from kvx.core.errors import TransportError
from kvx.core.events import OpDone
from kvx.core.model import Op
from kvx.plugins import make_transport
from kvx.report import summary
from kvx.transport import Transport

STREAMS = 2


class Lane(Protocol):
    """One way to copy. `here` is this process's memory."""

    here: Slab
    ops: frozenset[Op]

    def copy(self, op: Op) -> None:
        """The timed part."""

    def fill_there(self, sample: int) -> None: ...

    def matches_there(self, sample: int) -> bool: ...


class _Remote:
    """The half of a lane that asks its child."""

    def __init__(self, child: Child, here: Slab) -> None:
        self.child = child
        self.here = here

    def fill_there(self, sample: int) -> None:
        self.child.ask({"fill": sample})

    def matches_there(self, sample: int) -> bool:
        return bool(self.child.ask({"check": sample})["matches"])


class TransportLane(_Remote):
    def __init__(self, child: Child, here: Slab, transport: Transport) -> None:
        super().__init__(child, here)
        self.ops = transport.capabilities.ops
        self._transport = transport
        self._posted = 0
        self._local, self._remote = here.descriptors, Slab(here.nbytes, here.pieces, seed=2).descriptors

    def copy(self, op: Op) -> None:
        self._posted += 1
        transport = self._transport
        transport.post(self._posted, TARGET, op, self._local, self._remote, STAMPS[op])
        descriptor = transport.fileno()
        watched = [] if descriptor is None else [descriptor]
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            select.select(watched, [], [], 1.0 if transport.idle_poll_s is None else transport.idle_poll_s)
            for completion in transport.poll():
                if not isinstance(completion, OpDone):
                    raise TransportError(f"the copy has failed: {completion}")
                return
        raise TransportError(f"the copy has not ended in {ANSWER_S} s")


class SocketLane(_Remote):
    ops = frozenset(Op)

    def __init__(self, child: Child, here: Slab, socks: Sequence[socket.socket]) -> None:
        super().__init__(child, here)
        self._socks = socks
        self._views = here.views

    def copy(self, op: Op) -> None:
        first = self._socks[0]
        first.send(b"w" if op is Op.WRITE else b"r")
        plain_socket.move(self._socks, self._views, sending=op is Op.WRITE)
        if op is Op.WRITE:
            plain_socket.confirm(first)


class MemcpyLane:
    ops = frozenset({Op.WRITE})

    def __init__(self, here: Slab) -> None:
        self.here = here
        self._there = Slab(here.nbytes, here.pieces, seed=2)
        self._pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(here.views, self._there.views, strict=True)]

    def copy(self, op: Op) -> None:
        for source, destination in self._pairs:
            np.copyto(destination, source)

    def fill_there(self, sample: int) -> None:
        self._there.fill(sample)

    def matches_there(self, sample: int) -> bool:
        return self._there.matches(sample)


def run(
    transports: Sequence[str] = ("tcp",),
    ops: Sequence[str] = ("write", "read"),
    nbytes: int = 64 << 20,
    pieces: int = 1,
    repeat: int = 20,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, object]:
    """Copy `nbytes` bytes in `pieces` pieces, `repeat` times each way; `options` are per transport.

    Returns `results: [{name, op, bytes, pieces, gbps, verified, samples}]`, gbps in 1e9 bytes per
    second, and `ratios: [{name, to, op, median}]`: throughput over that of `socket`,
    measured in turns. Raises PluginError, ConfigError, TransportError; ValueError for a bad size.
    """
    if repeat < 1:
        raise ValueError("repeat is at least 1")
    wanted = [Op(op) for op in ops]
    with ExitStack() as stack:
        lanes: dict[str, Lane] = {"memcpy": MemcpyLane(Slab(nbytes, pieces, seed=1))}
        lanes["socket"] = stack.enter_context(_socket_lane(nbytes, pieces))
        for name in transports:
            lanes[name] = stack.enter_context(_transport_lane(name, nbytes, pieces, (options or {}).get(name, {})))
        runs = [(name, lane, op) for op in wanted for name, lane in lanes.items() if op in lane.ops]
        seconds: dict[tuple[str, Op], list[float]] = {(name, op): [] for name, _, op in runs}
        verified = dict.fromkeys(seconds, True)
        for turn in range(repeat + 1):
            for at, (name, lane, op) in enumerate(runs):
                took, same = _sample(lane, op, 1 + turn * len(runs) + at)
                verified[name, op] &= same
                if turn:  # the first turn dials and touches memory
                    seconds[name, op].append(took)
    speeds = {key: nbytes / np.array(times) / 1e9 for key, times in seconds.items()}
    results = [
        {"name": name, "op": op.value, "bytes": nbytes, "pieces": pieces, "gbps": summary(speed.tolist())}
        | {"verified": verified[name, op], "samples": speed.tolist()}
        for (name, op), speed in speeds.items()
    ]
    ratios = [
        {"name": name, "to": "socket", "op": op.value, "median": float(np.median(speed / speeds["socket", op]))}
        for (name, op), speed in speeds.items()
        if name in transports
    ]
    return {"results": results, "ratios": ratios}


def _sample(lane: Lane, op: Op, sample: int) -> tuple[float, bool]:
    if op is Op.WRITE:
        lane.here.fill(sample)
    else:
        lane.fill_there(sample)
    start = time.perf_counter()
    lane.copy(op)
    took = time.perf_counter() - start
    return took, lane.matches_there(sample) if op is Op.WRITE else lane.here.matches(sample)


@contextmanager
def _socket_lane(nbytes: int, pieces: int) -> Generator[Lane]:
    setup = {"bytes": nbytes, "pieces": pieces, "streams": STREAMS}
    with Child("kvx.bench.baselines.plain_socket", setup) as child, ExitStack() as stack:
        address = ("127.0.0.1", int(child.hello["port"]))
        socks = [stack.enter_context(socket.create_connection(address, ANSWER_S)) for _ in range(STREAMS)]
        for sock in socks:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield SocketLane(child, Slab(nbytes, pieces, seed=1), socks)


@contextmanager
def _transport_lane(name: str, nbytes: int, pieces: int, options: Mapping[str, Any]) -> Generator[Lane]:
    secret = secrets.token_bytes(32)
    here = Slab(nbytes, pieces, seed=1)
    transport = make_transport(name, {**options, "peer": str(INITIATOR), "secret": secret})
    setup = {"transport": name, "options": dict(options), "secret": base64.b64encode(secret).decode()}
    try:
        transport.register([here.region])
        with Child("kvx.bench.target", setup | {"bytes": nbytes, "pieces": pieces}) as child:
            transport.connect(info(TARGET), base64.b64decode(child.hello["metadata"]))
            child.ask({"metadata": base64.b64encode(transport.metadata()).decode()})
            yield TransportLane(child, here, transport)
    finally:
        transport.close()
