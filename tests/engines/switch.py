"""kvx_tcp with switches that a test turns while the servers run: files beside the one named by option `switch`.

`drop`: operations report success and move nothing. `hold`: posts wait, after the first of each
transfer. `mute`: bytes move, completions wait. What was posted, and what ended when, is written to `trace`.
With option `region` the target can neither forbid nor fence, as over RDMA.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, Op, Peer, Stamp
from kvx.transport import Access, Capabilities, Completion, FenceScope, Transport
from kvx_conformance.faults import Wrapper


class Switch(Wrapper):
    own_options = ("switch", "region")

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._muted: list[Completion] = []
        self._seen: set[str] = set()
        self._posted: dict[int, str] = {}

    @property
    def capabilities(self) -> Capabilities:
        inner = super().capabilities
        return evolve(inner, access=Access.REGION, fence=FenceScope.NONE) if self.options.get("region") else inner

    def forbid(self, transfer: str) -> None:
        if not self.options.get("region"):
            super().forbid(transfer)

    def fence(self, peer: Peer, generation: int) -> None:
        if not self.options.get("region"):
            super().fence(peer, generation)

    @property
    def idle_poll_s(self) -> float | None:
        return 0.005

    def _path(self, name: str) -> Path:
        return Path(f"{self.options['switch']}.{name}")

    def _is(self, name: str) -> bool:
        return self._path(name).exists()

    def _trace(self, what: str, op_id: int, nbytes: int) -> None:
        line = {"at": time.monotonic(), "what": what, "transfer": self._posted.get(op_id), "bytes": nbytes}
        with self._path("trace").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def post(self, op_id: int, peer: Peer, op: Op, local: Descriptors, remote: Descriptors, stamp: Stamp) -> None:
        self._posted[op_id] = stamp.transfer
        self._trace("post", op_id, local.nbytes)
        first = stamp.transfer not in self._seen
        self._seen.add(stamp.transfer)
        start = super().post
        if self._is("drop"):
            self._muted.append(OpDone(op_id, local.nbytes))
        elif self._is("hold") and not first:
            self._held.append((op_id, lambda: start(op_id, peer, op, local, remote, stamp)))
        else:
            start(op_id, peer, op, local, remote, stamp)

    def cancel(self, op_id: int) -> None:
        for held in self._held:
            if held[0] == op_id:
                self._held.remove(held)
                self._muted.append(OpFailed(op_id, detail="cancelled before it was posted"))
                return
        super().cancel(op_id)

    def poll(self) -> list[Completion]:
        while self._held and not self._is("hold"):
            self._held.popleft()[1]()
        ended = super().poll()
        for completion in ended:
            if isinstance(completion, OpDone | OpFailed):
                self._trace(type(completion).__name__, completion.op_id, getattr(completion, "nbytes", 0))
                self._posted.pop(completion.op_id, None)
        self._muted += ended
        if self._is("mute"):
            return []
        ended, self._muted = self._muted, []
        return ended


def switch(options: Mapping[str, Any]) -> Transport:
    return Switch(options)
