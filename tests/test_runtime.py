"""Rule R12: the engine's thread only puts events in and takes news out, whatever the I/O is doing."""

from __future__ import annotations

import os
import threading

from kvx.core.endpoint import Endpoint
from kvx.core.events import Claim, PeerLost, PeerUp, Received
from kvx.core.messages import Envelope
from kvx.core.model import Access, Capabilities, FenceScope, InstanceInfo, Mode, Op
from kvx.memory import Memory
from kvx.runtime import Runtime
from kvx_conformance.pair import layout


class StuckControl:
    """A control channel whose `connect` does not return until it is let go."""

    def __init__(self) -> None:
        self.stats: dict[str, int] = {}
        self.dialled_by: list[int] = []
        self.dialling = threading.Event()
        self.go = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._bell

    def deadline(self) -> float | None:
        return None

    def connect(self, address: str) -> None:
        self.dialled_by.append(threading.get_ident())
        self.dialling.set()
        self.go.wait(20)

    def poll(self) -> list[PeerUp | PeerLost | Received]:
        return []

    def send(self, link: int, envelope: Envelope) -> None: ...

    def disconnect(self, link: int, detail: str) -> None: ...

    def proven(self, link: int) -> None: ...

    def close(self) -> None:
        os.close(self._bell)


def test_r12_the_engines_thread_does_no_io_and_waits_for_none() -> None:
    own = layout()
    info = InstanceInfo("d", 0, 7, "d:1", own, (), ("d:1",))
    capabilities = Capabilities(frozenset(Op), Access.GRANT, FenceScope.PEER, cancel=True)
    endpoint = Endpoint(info, capabilities=lambda _: capabilities, entropy=os.urandom)
    control = StuckControl()
    runtime = Runtime(endpoint, control, {}, Memory([]), choose=lambda _: "none")  # type: ignore[arg-type]
    engine = threading.get_ident()
    try:
        runtime.put([Claim("first", Mode.PUSH, address="p:1")])
        assert control.dialling.wait(20)
        for number in range(100):
            runtime.put([Claim(f"more-{number}", Mode.PUSH, address=f"q:{number}")])
            assert runtime.news() == []
        assert len(control.dialled_by) == 1  # the runtime's thread is still in its first call
        control.go.set()
    finally:
        control.go.set()
        runtime.close()
    assert engine not in control.dialled_by
