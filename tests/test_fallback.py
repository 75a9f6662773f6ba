"""A transport that does not load, or does not reach a peer: the next common one takes its place, and says so."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvx import cli
from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core.errors import PluginError, TransportError
from kvx.core.model import (
    Access,
    BlockTable,
    CacheGroup,
    Capabilities,
    FenceScope,
    LayerSpec,
    Layout,
    Mode,
    Op,
    Outcome,
    Part,
    Reason,
    Region,
)
from kvx.engine import EngineInstance, Expose, Stage
from kvx.instance import open_instance, weakest
from kvx.operator import ask

LAYOUT = Layout("toy", "u8", "test", (CacheGroup(0, "full", 32, (LayerSpec("l", 0, 0, 64, 64),), 1, 1),), 8)
MODULE = """
from attrs import evolve
from kvx.core.errors import TransportError
from kvx.core.events import OpFailed
from kvx.core.model import Access, FenceScope, Reason
from kvx_conformance.faults import Wrapper


class NoMemory(Wrapper):
    def register(self, regions):
        raise TransportError("no memory can be registered here")


class NoPeer(Wrapper):
    own_options = ("reason",)
    capabilities = property(lambda self: evolve(self.inner.capabilities, access=Access.REGION, fence=FenceScope.NONE))
    posts = 0

    def __init__(self, options):
        super().__init__(options)
        self.failed = []

    def post(self, op_id, peer, op, local, remote, stamp):
        NoPeer.posts += 1
        self.failed.append(OpFailed(op_id, Reason(self.options.get("reason", "transport")), "nothing was posted"))

    idle_poll_s = 0.01

    def poll(self):
        failed, self.failed = self.failed, []
        return failed + self.inner.poll()


class NoContact(NoPeer):
    def connect(self, info, metadata):
        raise TransportError("it has no address")
"""


@pytest.fixture(autouse=True)
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "kvx_failing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import kvx_failing

    yield kvx_failing
    del sys.modules["kvx_failing"]


class Side:
    def __init__(self, transports: Sequence[str], sections: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        (port,) = free_ports(1)
        settings = {"listen": f"127.0.0.1:{port}", "transports": list(transports), **(sections or {})}
        self.options = Options.load(settings, {})
        self.memory = np.zeros(512, dtype=np.uint8)
        region = Region(0, self.memory.ctypes.data, self.memory.nbytes)
        self.instance: EngineInstance = open_instance(self.options, LAYOUT, [region], epoch=secrets.randbits(63))

    @property
    def address(self) -> str:
        return self.options.advertise

    def transports(self) -> dict[str, dict[str, Any]]:
        """What `kvx status` says of each of them."""
        body: dict[str, Any] = json.loads(ask(self.address, "status", secret=b"", timeout_s=20).body)
        assert body["transports"] == self.instance.snapshot()["transports"]
        told: dict[str, dict[str, Any]] = body["transports"]
        return told

    def outcome(self) -> Outcome:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for news in self.instance.news():
                if isinstance(news, Outcome):
                    return news
            time.sleep(0.005)
        raise AssertionError(self.instance.snapshot())


def push(producer: Side, consumer: Side, transfer: str) -> tuple[Outcome, Outcome]:
    """One block from here to there; the outcomes of both."""
    producer.memory[64:128] = len(transfer)
    consumer.instance.put([Expose(transfer, Mode.PUSH, BlockTable.of([2]), (0,), 32, 30.0, producer.address)])
    producer.instance.put([Stage(transfer, Mode.PUSH, Part(None, (0,), BlockTable.of([1])), True, 32)])
    outcomes = producer.outcome(), consumer.outcome()
    if outcomes[1].ok:
        assert (consumer.memory[128:192] == len(transfer)).all()
    return outcomes


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made: list[Side] = []
    yield made
    for side in made:
        side.instance.close()


def test_what_does_not_load_is_left_out_with_a_line(sides: list[Side], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("kvx_failing:NoMemory", "kvx_nowhere:factory"):
        sides.append(Side([name, "tcp"]))
        assert sides[-1].instance.info.transports == ("tcp",)
        assert f"transport '{name}' is left out" in caplog.text
    ok = push(sides[0], sides[1], "t")
    assert ok[0].ok and ok[1].ok
    told = sides[0].transports()
    assert told["kvx_failing:NoMemory"] == {"left_out": "no memory can be registered here"}
    assert (told["tcp"]["bytes"], told["tcp"]["peers"]) == (64, [str(sides[1].instance.info.peer)])


def test_the_last_one_has_to_load() -> None:
    with pytest.raises(TransportError, match="no memory"):
        Side(["kvx_failing:NoMemory"])
    with pytest.raises(PluginError):
        Side(["kvx_failing:NoMemory", "kvx_nowhere:factory"])


@pytest.mark.parametrize(("name", "posts"), [("kvx_failing:NoPeer", 1), ("kvx_failing:NoContact", 0)])
def test_tcp_moves_what_the_first_choice_cannot(
    sides: list[Side], failing: Any, caplog: pytest.LogCaptureFixture, name: str, posts: int
) -> None:
    sides += [Side([name, "tcp"]), Side([name, "tcp"])]
    for transfer in ("a", "ab", "abc"):
        outcomes = push(sides[0], sides[1], transfer)
        assert outcomes[0].ok and outcomes[1].ok, outcomes
    assert failing.NoPeer.posts == posts, "the peer is not tried again before the next handshake"
    assert sides[0].instance.snapshot()["fallbacks"] == 1
    assert f"transport '{name}' does not serve" in caplog.text
    peer, why = str(sides[1].instance.info.peer), "it has no address" if posts == 0 else "nothing was posted"
    assert sides[0].transports() == {
        name: {
            "bytes": 0,
            "operations": 0,
            "failed": posts,
            "fallbacks": 1,
            "last_fallback": f"{peer}: {why}",
            "peers": [],
        },
        "tcp": {"bytes": 192, "operations": 3, "failed": 0, "fallbacks": 0, "last_fallback": "", "peers": [peer]},
    }
    # The consumer started nothing: what the producer did is not counted twice.
    assert [one["bytes"] for one in sides[1].transports().values()] == [0, 0]


def test_metrics_tell_what_each_transport_did(sides: list[Side], capsys: pytest.CaptureFixture[str]) -> None:
    sides += [Side(["kvx_nowhere:factory", "kvx_failing:NoPeer", "tcp"]), Side(["kvx_failing:NoPeer", "tcp"])]
    push(sides[0], sides[1], "t")
    assert cli.main(["status", sides[0].address, "--metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, transport, value in (
        ("bytes_total", "kvx_failing:NoPeer", 0),
        ("bytes_total", "tcp", 64),
        ("operations_total", "tcp", 1),
        ("failed_total", "kvx_failing:NoPeer", 1),
        ("fallbacks_total", "kvx_failing:NoPeer", 1),
        ("fallbacks_total", "tcp", 0),
        ("peers", "kvx_failing:NoPeer", 0),
        ("peers", "tcp", 1),
        ("left_out", "kvx_nowhere:factory", 1),
        ("left_out", "tcp", 0),
    ):
        assert f'kvx_transport_{name}{{rank="{sides[0].address}",transport="{transport}"}} {value}' in lines
    assert "# TYPE kvx_transport_fallbacks_total counter" in lines


def test_without_another_one_the_transfer_fails(sides: list[Side]) -> None:
    sides += [Side(["kvx_failing:NoPeer"]), Side(["kvx_failing:NoPeer"])]
    assert push(sides[0], sides[1], "t")[0].reason is Reason.TRANSPORT


def test_what_is_not_the_transports_fault_is_not_tried_again(sides: list[Side]) -> None:
    name = "kvx_failing:NoPeer"
    sides += [Side([name, "tcp"], {name: {"reason": "bounds"}}), Side([name, "tcp"])]
    assert push(sides[0], sides[1], "t")[0].reason is Reason.BOUNDS
    assert sides[0].instance.snapshot()["fallbacks"] == 0


def test_the_weakest_of_the_common_transports_is_what_may_be_relied_on() -> None:
    strong = Capabilities(frozenset(Op), Access.GRANT, FenceScope.PEER, True, max_descriptors=100, max_in_flight=9)
    weak = Capabilities(frozenset({Op.READ}), Access.REGION, FenceScope.NONE, False, max_descriptors=200)
    assert weakest([strong]) == strong
    both = Capabilities(
        frozenset({Op.READ}), Access.REGION, FenceScope.NONE, False, max_descriptors=100, max_in_flight=9
    )
    assert weakest([strong, weak]) == weakest([weak, strong]) == both
