"""R7: parts were handed over, the transfer failed, the last part never comes: Abort brings Released."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvx.core.endpoint import Endpoint
from kvx.core.events import Abort, Claim, Report, Stage
from kvx.core.legs import Limits
from kvx.core.model import (
    BlockTable,
    CacheGroup,
    Capabilities,
    InstanceInfo,
    LayerSpec,
    Layout,
    Mode,
    News,
    Op,
    Outcome,
    Part,
    Reason,
    Released,
)
from kvx.transport import Access, FenceScope

LAYOUT = Layout("m", "float32", "v", (CacheGroup(0, "full", 4, (LayerSpec("l", 0, 0, 64, 64),), 1, 1),), 8)
TCP = Capabilities(frozenset(Op), Access.GRANT, FenceScope.PEER, cancel=True)


def test_abort_of_a_failed_producer_that_still_owed_parts_releases_them() -> None:
    info = InstanceInfo("p", 0, 7, "127.0.0.1:1", LAYOUT)
    counter = itertools.count()
    endpoint = Endpoint(
        info,
        capabilities=lambda _: TCP,
        entropy=lambda n: next(counter).to_bytes(n),
        limits=Limits(patience_s=5.0),
    )

    def news(actions: Sequence[object]) -> list[News]:
        return [action.news for action in actions if isinstance(action, Report)]

    assert news(endpoint.handle(Claim("t", Mode.PUSH), 0.0)) == []
    part = Part(("l",), (0,), BlockTable.of([3]))
    assert news(endpoint.handle(Stage("t", Mode.PUSH, part, last=False, tokens=8), 0.0)) == []
    (outcome,) = news(endpoint.expire(200.0))
    assert isinstance(outcome, Outcome)
    assert outcome.reason is Reason.PATIENCE
    assert news(endpoint.handle(Abort("t"), 201.0)) == [Released("t")]
    assert news(endpoint.handle(Abort("t"), 202.0)) == []
