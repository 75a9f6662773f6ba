"""A snapshot is taken by other threads too, while the runtime's goes on."""

from __future__ import annotations

from typing import Any

from kvx_conformance.pair import Net
from kvx_conformance.scenes import expose


def test_a_snapshot_survives_what_another_thread_begins_meanwhile() -> None:
    net = Net()
    node = net.node("d")
    node.net.node("p")
    node.put(expose(1, transfer="first"))
    opened: dict[str, Any] = node.endpoint._transfers.open

    class Switching:
        """Stands for a thread switch: while it is looked at, another transfer begins."""

        id = "second"

        @property
        def legs(self) -> list[Any]:
            opened[f"begun {len(opened)}"] = opened["first"]
            return []

    opened["second"] = Switching()
    seen = node.endpoint.snapshot()["open"]
    assert isinstance(seen, dict)
    assert list(seen) == ["first", "second"]
    assert len(opened) > 2
