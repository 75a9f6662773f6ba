"""What part of a transfer is not hidden behind the prefill, without an engine.

A second process computes a synthetic prefill, a matrix product per layer, and writes each layer's blocks; this
one is the decode side, whose blocks have to hold the same bytes in the end. The modes take turns:

- `pull`: a baseline. This process's calling thread plans, posts and waits, on bare transports without kvx's protocol.
- `pull-thread`: kvx's pull. The ticket comes with the end of the prefill, a thread of kvx does the rest.
- `push`: the blocks are granted before the prefill and written after it.
- `push-layerwise`: each layer's blocks leave while the next layers are computed.
"""

from __future__ import annotations

import base64
import os
import secrets
import select
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from attrs import define, frozen

from kvx.bench.cache import BLOCK_TOKENS, Cache, describe, new_cache, pattern
from kvx.bench.child import ANSWER_S, Child
from kvx.config import Options
from kvx.core.errors import TransportError
from kvx.core.events import OpDone
from kvx.core.layout import plan_leg
from kvx.core.model import BlockTable, InstanceInfo, Layout, Mode, Op, Outcome, Part, Peer, Stamp
from kvx.engine import Claim, EngineInstance, Expose, Stage
from kvx.instance import open_instance, read_ticket
from kvx.plugins import make_transport
from kvx.report import summary
from kvx.transport import Transport

MODES = ("pull", "pull-thread", "push", "push-layerwise")
PREFILL = Peer("bench-prefill", 0)
DECODE = Peer("bench-decode", 0)
STAMP = Stamp("bench-pull", 1, 1)
WATCH_S = 0.0001
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Of the prefill: the transfer has another core, as it has beside a GPU."""


@frozen
class Shape:
    """`nbytes` in `pieces` equal pieces, the same number in each layer; no two are neighbours where there are several.

    Raises ValueError where the pieces would not be equal.
    """

    layers: int
    nbytes: int
    pieces: int

    def __attrs_post_init__(self) -> None:
        if min(self.layers, self.nbytes, self.pieces) < 1 or self.pieces % self.layers or self.nbytes % self.pieces:
            raise ValueError(
                f"{self.nbytes} bytes of {self.layers} layers cannot be cut into {self.pieces} equal pieces"
            )

    @property
    def blocks(self) -> int:
        return self.pieces // self.layers

    @property
    def block_bytes(self) -> int:
        return self.nbytes // self.pieces

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    def cache(self) -> Cache:
        return new_cache(self.layers, 2 * self.blocks, self.block_bytes)

    def ids(self, seed: int) -> list[int]:
        """Every second block of the pool, shuffled."""
        return [2 * int(block) for block in np.random.default_rng(seed).permutation(self.blocks)]


def info(peer: Peer, layout: Layout) -> InstanceInfo:
    """For bare transports."""
    return InstanceInfo(peer.instance, peer.rank, 1, "127.0.0.1:1", layout)


def options_of(peer: Peer, transport: str) -> Options:
    return Options.load({"listen": "127.0.0.1:0", "instance": peer.instance, "transports": [transport]}, env={})


@frozen
class Sample:
    """Milliseconds: of the prefill; from the first hand-over, and from the prefill's end, until the bytes are ready
    at the decode side; of the whole; of the decode side's calling thread."""

    prefill_ms: float
    transfer_ms: float
    exposed_ms: float
    total_ms: float
    caller_ms: float
    verified: bool


@define
class _Decode:
    """The decode side: an instance, a bare transport, and the process that prefills."""

    shape: Shape
    cache: Cache
    ids: list[int]
    layout: Layout
    options: Options
    instance: EngineInstance
    bare: Transport
    child: Child
    samples: int = 0

    def sample(self, mode: str) -> Sample:
        self.samples += 1
        name = f"{mode} {self.samples}"
        begun = time.thread_time_ns()
        if mode.startswith("push"):
            blocks, place = self._part.blocks, (30.0, str(self.child.hello["address"]))
            self.instance.put([Expose(name, Mode.PUSH, blocks, (0,), self.shape.tokens, *place)])
        caller = time.thread_time_ns() - begun
        told = self.child.ask({"mode": mode, "transfer": name, "sample": self.samples})
        begun = time.thread_time_ns()
        if mode == "pull":
            self._read()
        else:
            if mode == "pull-thread":
                ticket = read_ticket(self.options, told["ticket"])
                name = ticket.grant.transfer
                stage = Stage(name, Mode.PULL, self._part, True, self.shape.tokens, ticket)
                self.instance.put([Claim(name, Mode.PULL, ticket=ticket), stage])
            caller += time.thread_time_ns() - begun
            self._until_outcome(name)
        ready = time.monotonic_ns()
        if mode == "pull":
            caller += time.thread_time_ns() - begun
        start, handed, end = told["start"], told["handed"], told["end"]
        return Sample(
            prefill_ms=(end - start) / 1e6,
            transfer_ms=(ready - handed) / 1e6,
            exposed_ms=(ready - end) / 1e6,
            total_ms=(ready - start) / 1e6,
            caller_ms=caller / 1e6,
            verified=self._verified(),
        )

    @property
    def _part(self) -> Part:
        return Part(None, (0,), BlockTable.of(self.ids))

    def _read(self) -> None:
        theirs = Part(None, (0,), BlockTable.of(self.shape.ids(1)))
        remote, local = plan_leg(self.layout, self.layout).move(theirs, self._part)
        self.bare.post(self.samples, PREFILL, Op.READ, local, remote, STAMP)
        descriptor, pause = self.bare.fileno(), self.bare.idle_poll_s
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            select.select([] if descriptor is None else [descriptor], [], [], 1.0 if pause is None else pause)
            for completion in self.bare.poll():
                if not isinstance(completion, OpDone):
                    raise TransportError(f"the read has failed: {completion}")
                return
        raise TransportError(f"the read has not ended in {ANSWER_S:g} s")

    def _until_outcome(self, name: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            for news in self.instance.news():
                if isinstance(news, Outcome) and news.transfer == name:
                    if not news.ok:
                        raise TransportError(f"the transfer has failed: {news.reason} {news.detail}")
                    return
            time.sleep(WATCH_S)
        raise TransportError(f"the transfer has not ended in {ANSWER_S:g} s")

    def _verified(self) -> bool:
        shape = self.shape
        return all(
            np.array_equal(self.cache[layer, self.ids], pattern(layer, shape.blocks, shape.block_bytes, self.samples))
            for layer in range(shape.layers)
        )


def run(
    transport: str = "tcp",
    layers: int = 32,
    nbytes: int = 64 << 20,
    pieces: int = 1024,
    prefill_ms: float = 100.0,
    modes: Sequence[str] = MODES,
    repeat: int = 25,
) -> dict[str, Any]:
    """`repeat` handoffs in each mode, in turns.

    Returns `results: [{mode, prefill_ms, transfer_ms, exposed_ms, total_ms, caller_ms, verified, samples}]`,
    `ratios: [{name, median, limit, met}]` of paired samples, and `load`, the machine's load average before. Raises
    ValueError for a mode or number that cannot be, PluginError, ConfigError, TransportError for a handoff that fails.
    """
    if unknown := set(modes) - set(MODES):
        raise ValueError(f"no such mode: {', '.join(sorted(unknown))} (there are {', '.join(MODES)})")
    if repeat < 1 or prefill_ms <= 0:
        raise ValueError("repeat is at least 1, prefill_ms more than 0")
    shape = Shape(layers, nbytes, pieces)
    load = os.getloadavg()[0]
    taken: dict[str, list[Sample]] = {mode: [] for mode in modes}
    with _decode(transport, shape, prefill_ms) as decode:
        for turn in range(repeat + 1):
            for mode in taken:
                sample = decode.sample(mode)
                if turn or not sample.verified:  # the first turn dials and touches memory
                    taken[mode].append(sample)
    results = [_row(mode, samples) for mode, samples in taken.items()]
    size = {"transport": transport, "bytes": shape.nbytes, "pieces": shape.pieces, "layers": shape.layers, "load": load}
    return {**size, "results": results, "ratios": _ratios(taken)}


def _row(mode: str, samples: Sequence[Sample]) -> dict[str, Any]:
    names = ("prefill_ms", "transfer_ms", "exposed_ms", "total_ms", "caller_ms")
    times: dict[str, Any] = {name: summary([getattr(sample, name) for sample in samples]) for name in names}
    exposed = [round(sample.exposed_ms, 3) for sample in samples]
    return {"mode": mode, **times, "verified": all(sample.verified for sample in samples), "samples": exposed}


def _ratios(taken: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Of the exposed times of two modes in one turn. The first one's limit holds where the prefill is longer than the
    transfer."""
    rows = []
    for mode, other, limit in (
        ("push-layerwise", "push", 0.2),
        ("push", "pull-thread", 1.0),
        ("pull-thread", "pull", 0),
    ):
        if mode in taken and other in taken:
            pairs = zip(taken[mode], taken[other], strict=True)
            median = float(np.median([one.exposed_ms / two.exposed_ms for one, two in pairs]))
            row = {"name": f"exposed, {mode} over {other}", "median": median}
            rows.append({**row, "limit": limit, "met": median <= limit} if limit else row)
    return rows


@contextmanager
def _decode(transport: str, shape: Shape, prefill_ms: float) -> Generator[_Decode]:
    cache, secret = shape.cache(), secrets.token_bytes(32)
    layout, region = describe(cache)
    options = options_of(DECODE, transport)
    setup = {"transport": transport, "shape": [shape.layers, shape.nbytes, shape.pieces], "prefill_ms": prefill_ms}
    with ExitStack() as stack:
        instance = open_instance(options, layout, [region], epoch=2)
        stack.callback(instance.close)
        bare = make_transport(transport, {"peer": str(DECODE), "secret": secret})
        stack.callback(bare.close)
        bare.register([region])
        told = {"secret": base64.b64encode(secret).decode(), "metadata": base64.b64encode(bare.metadata()).decode()}
        child = stack.enter_context(Child("kvx.bench.prefill", setup | told, ONE_THREAD))
        bare.connect(info(PREFILL, layout), base64.b64decode(child.hello["metadata"]))
        yield _Decode(shape, cache, shape.ids(2), layout, options, instance, bare, child)


def lines(fields: Mapping[str, Any]) -> list[str]:
    """What `run` returned, for a person."""
    rows = [
        f"{row['mode']:<15} exposed {row['exposed_ms']['median']:8.2f} ms of {row['transfer_ms']['median']:8.2f}, "
        f"total {row['total_ms']['median']:8.2f}, prefill {row['prefill_ms']['median']:8.2f}"
        f"{'' if row['verified'] else ' WRONG BYTES'}"
        for row in fields["results"]
    ]
    return rows + [f"{row['name']}: {row['median']:.2f}" for row in fields["ratios"]]
