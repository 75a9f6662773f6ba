"""Program: the process that prefills in `kvx bench handoff`."""

from __future__ import annotations

import base64
import os
import select
import threading
import time
from typing import Any

import numpy as np
from attrs import define, evolve
from numpy.typing import NDArray

from kvx.bench.cache import Cache, describe, layer_name, pattern
from kvx.bench.child import ANSWER_S, Lines
from kvx.bench.handoff import DECODE, PREFILL, STAMP, Shape, info, options_of
from kvx.config import Options
from kvx.core.errors import TransportError
from kvx.core.layout import plan_leg
from kvx.core.model import BlockTable, Layout, Mode, Op, Outcome, Part, Role
from kvx.engine import Claim, EngineInstance, Expose, Stage
from kvx.instance import make_ticket, open_instance
from kvx.plugins import make_transport
from kvx.transport import Transport

LEASE_S = 30.0
SIZE = 256
"""Of the square matrices. One product takes well under a millisecond, and leaves the interpreter to other threads."""


class Model:
    """Layers that take the same number of matrix products, which together take `prefill_ms` on a quiet machine."""

    def __init__(self, layers: int, prefill_ms: float) -> None:
        self._result: NDArray[np.float32] = np.zeros((SIZE, SIZE), dtype=np.float32)
        self._weights: NDArray[np.float32] = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
        times = []
        for _ in range(50):
            start = time.perf_counter()
            self._product()
            times.append(time.perf_counter() - start)
        self._products = max(1, round(prefill_ms / 1000 / layers / float(np.min(times))))

    def layer(self) -> None:
        for _ in range(self._products):
            self._product()

    def _product(self) -> None:
        np.matmul(self._weights, self._weights, out=self._result)


@define
class _Prefill:
    shape: Shape
    cache: Cache
    ids: list[int]
    options: Options
    instance: EngineInstance
    model: Model

    def handle(self, question: dict[str, Any]) -> dict[str, Any]:
        """One prefill; answered when it is over and everything is handed over."""
        mode, transfer, sample = question["mode"], question["transfer"], question["sample"]
        shape = self.shape
        rows = [pattern(layer, shape.blocks, shape.block_bytes, sample) for layer in range(shape.layers)]
        whole = BlockTable.of(self.ids)
        if mode.startswith("push"):
            self.instance.put([Claim(transfer, Mode.PUSH)])
        handed = None
        start = time.monotonic_ns()
        for layer in range(shape.layers):
            self.model.layer()
            self.cache[layer, self.ids] = rows[layer]
            if mode == "push-layerwise":
                handed = handed or time.monotonic_ns()
                last = layer + 1 == shape.layers
                part = Part((layer_name(layer),), (0,), whole)
                self.instance.put([Stage(transfer, Mode.PUSH, part, last, shape.tokens)])
        end = time.monotonic_ns()
        if mode == "push":
            self.instance.put([Stage(transfer, Mode.PUSH, Part(None, (0,), whole), True, shape.tokens)])
        answer: dict[str, Any] = {"start": start, "end": end, "handed": handed or end}
        if mode == "pull-thread":
            self.instance.put([Expose(transfer, Mode.PULL, whole, (0,), shape.tokens, LEASE_S)])
            answer["ticket"] = make_ticket(
                self.options, epoch=1, transfer=transfer, first=(0,), blocks=whole, tokens=shape.tokens, lease_s=LEASE_S
            )
        return answer

    def settle(self, transfer: str) -> None:
        """Until kvx is done with this transfer here too."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            for news in self.instance.news():
                if isinstance(news, Outcome) and news.transfer == transfer:
                    return
            time.sleep(0.0005)
        raise TransportError(f"transfer {transfer} has not ended in {ANSWER_S:g} s")


def _serve(bare: Transport, ended: int) -> None:
    """Carry out what the other side reads, until a byte comes on `ended`."""
    descriptor = bare.fileno()
    watched = [ended] if descriptor is None else [ended, descriptor]
    while ended not in select.select(watched, [], [], bare.idle_poll_s)[0]:
        bare.poll()
    bare.close()


def _bare(setup: dict[str, Any], cache: Cache, shape: Shape, ids: list[int]) -> Transport:
    layout, region = describe(cache)
    bare = make_transport(setup["transport"], {"peer": str(PREFILL), "secret": base64.b64decode(setup["secret"])})
    bare.register([region])
    bare.permit(STAMP.transfer, DECODE, Op.READ, _ranges(layout, ids), STAMP)
    bare.connect(info(DECODE, layout), base64.b64decode(setup["metadata"]))
    return bare


def _ranges(layout: Layout, ids: list[int]) -> Any:
    return plan_leg(layout, layout).ranges(Role.PRODUCER, Part(None, (0,), BlockTable.of(ids)))


def main() -> None:
    """Serve until standard input ends."""
    lines = Lines()
    setup = lines.first()
    shape = Shape(*setup["shape"])
    cache, ids = shape.cache(), shape.ids(1)
    layout, region = describe(cache)
    options = options_of(PREFILL, setup["transport"])
    instance = open_instance(options, layout, [region], epoch=1)
    bare = _bare(setup, cache, shape, ids)
    ended, end = os.pipe()
    thread = threading.Thread(target=_serve, args=(bare, ended), daemon=True)
    options = evolve(options, advertise=instance.info.address)  # tickets name it
    prefill = _Prefill(shape, cache, ids, options, instance, Model(shape.layers, setup["prefill_ms"]))
    lines.write({"address": instance.info.address, "metadata": base64.b64encode(bare.metadata()).decode()})
    thread.start()
    try:
        while True:
            for question in lines.read():
                lines.write(prefill.handle(question))
                if question["mode"] != "pull":
                    prefill.settle(question["transfer"])
    except EOFError:
        os.write(end, b".")
        thread.join(ANSWER_S)
        instance.close()


if __name__ == "__main__":
    main()
