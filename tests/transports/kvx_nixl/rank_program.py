"""Program for tests: an instance with one large region. It is told what to do, and tells what happens, in JSON lines.

Times are of the one clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import secrets
import select
import sys
import time
from typing import Any

import numpy as np

from kvx.config import Options
from kvx.core import wire
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Outcome, Part, Region
from kvx.engine import EngineInstance, Expose, Stage
from kvx.instance import make_ticket, open_instance

BLOCKS = 8
TOKENS = 32
PAGE = 4096
_POLL_S = 0.002


def tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def obey(kvx: EngineInstance, options: Options, epoch: int, order: dict[str, Any]) -> None:
    transfer, mode, blocks = order["transfer"], Mode(order["mode"]), BlockTable.of(range(BLOCKS))
    tokens = BLOCKS * TOKENS
    if order["do"] == "expose":
        lease_s = options.lease_s
        kvx.put([Expose(transfer, mode, blocks, (0,), tokens, lease_s, order.get("address"))])
        if mode is Mode.PULL:
            made = make_ticket(
                options, epoch=epoch, transfer=transfer, first=(0,), blocks=blocks, tokens=tokens, lease_s=lease_s
            )
            tell("ticket", text=made)
    else:
        ticket = wire.parse_ticket(order["ticket"]) if "ticket" in order else None
        kvx.put([Stage(transfer, mode, Part(None, (0,), blocks), True, tokens, ticket)])


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    options, epoch = Options.load(setup["options"], {}), secrets.randbits(63)
    block = setup["bytes"] // BLOCKS
    memory = np.full(setup["bytes"], setup["fill"], dtype=np.uint8)
    layout = Layout(
        "toy", "u8", "test", (CacheGroup(0, "full", TOKENS, (LayerSpec("l", 0, 0, block, block),), 1, 1),), BLOCKS
    )
    kvx = open_instance(options, layout, [Region(0, memory.ctypes.data, memory.nbytes)], epoch=epoch)
    tell("ready")
    moving = False
    try:
        while True:
            if select.select([sys.stdin], [], [], _POLL_S)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                obey(kvx, options, epoch, json.loads(line))
            snapshot: Any = kvx.snapshot()
            arrived = 0 if moving else int(np.count_nonzero(memory[::PAGE] != setup["fill"])) * PAGE
            if arrived:
                moving = True
                tell("moving", bytes=arrived)
            for news in kvx.news():
                if isinstance(news, Outcome):
                    reason = news.reason.value if news.reason else ""
                    tell("outcome", ok=news.ok, reason=reason, detail=news.detail, quarantined=snapshot["quarantined"])
                else:
                    tell(type(news).__name__.lower())
    finally:
        kvx.close()


if __name__ == "__main__":
    main()
