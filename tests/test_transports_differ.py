"""Two instances without a common transport: the one transfer fails with a reason, both go on."""

from __future__ import annotations

import secrets
import time

import numpy as np

from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Outcome, Part, Reason, Region
from kvx.engine import EngineInstance, Expose, Stage
from kvx.instance import make_ticket, open_instance, read_ticket

LAYOUT = Layout("toy", "u8", "test", (CacheGroup(0, "full", 32, (LayerSpec("l", 0, 0, 64, 64),), 1, 1),), 8)


def start(transport: str) -> tuple[Options, EngineInstance, int, np.ndarray]:
    (port,) = free_ports(1)
    options = Options.load({"listen": f"127.0.0.1:{port}", "transports": [transport]}, {})
    memory, epoch = np.zeros(512, dtype=np.uint8), secrets.randbits(63)
    region = Region(0, memory.ctypes.data, memory.nbytes)
    return options, open_instance(options, LAYOUT, [region], epoch=epoch), epoch, memory


def outcome(instance: EngineInstance) -> Outcome:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for news in instance.news():
            if isinstance(news, Outcome):
                return news
        time.sleep(0.005)
    raise AssertionError(instance.snapshot())


def test_no_common_transport_fails_the_one_transfer() -> None:
    options, producer, epoch, _keep = start("tcp")
    other, reader, _, _keep_too = start("kvx_conformance.faults:dropping")
    try:
        for transfer in ("t1", "t2"):
            table = BlockTable.of([1])
            producer.put([Expose(transfer, Mode.PULL, table, (0,), 32, 30.0)])
            text = make_ticket(
                options, epoch=epoch, transfer=transfer, first=(0,), blocks=table, tokens=32, lease_s=30.0
            )
            ticket = read_ticket(other, text)
            reader.put([Stage(transfer, Mode.PULL, Part(None, (0,), BlockTable.of([2])), True, 32, ticket)])
            failed = outcome(reader)
            assert failed.reason is Reason.LAYOUT
            assert "transports" in failed.detail
    finally:
        reader.close()
        producer.close()
