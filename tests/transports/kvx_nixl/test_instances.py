"""Whole instances on NIXL: the conformance suite, prefill here and decode there, and instances that differ."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core.model import BlockTable, CacheGroup, LayerSpec, Layout, Mode, Outcome, Part, Region
from kvx.engine import EngineInstance, Expose, Stage
from kvx.instance import open_instance

pytestmark = pytest.mark.timeout(1200)
PROFILES = {"core": (), "resilience": ("--strict",)}
LAYOUT = Layout("toy", "u8", "test", (CacheGroup(0, "full", 32, (LayerSpec("l", 0, 0, 64, 64),), 1, 1),), 8)


@pytest.mark.parametrize("profile", ["core", pytest.param("resilience", marks=pytest.mark.slow)])
def test_the_suite_holds(name: str, command: Any, profile: str) -> None:
    """Within twice the usual time: these machines have two cores, and a transport that polls wants both."""
    evidence = f"conformance-{name}" + ("" if profile == "core" else f"-{profile}")
    words = ("conformance", "run", "--jobs", "2", "--pace", "2", "--profile", profile, *PROFILES[profile])
    verdicts = command(evidence, *words)["verdicts"]
    assert verdicts["pass"] > 180
    assert verdicts["fail"] == verdicts["error"] == verdicts["not_exercised"] == 0, verdicts


def test_tokens_are_those_of_a_single_instance(name: str, command: Any) -> None:
    answer = command(f"demo_{name}", "demo", "--mode", "both", "--requests", "4")
    assert [one["mode"] for one in answer["modes"]] == ["push", "pull"]
    for one in answer["modes"]:
        assert one["tokens_equal"] == one["transfers_ok"] == 4
        assert one["control_tokens_equal"] < 4


class Side:
    def __init__(self, transports: list[str], sections: dict[str, dict[str, Any]]) -> None:
        (port,) = free_ports(1)
        given = {name: section for name, section in sections.items() if name in transports}
        self.options = Options.load({"listen": f"127.0.0.1:{port}", "transports": transports, **given}, {})
        self.memory = np.zeros(512, dtype=np.uint8)
        region = Region(0, self.memory.ctypes.data, self.memory.nbytes)
        self.instance: EngineInstance = open_instance(self.options, LAYOUT, [region], epoch=secrets.randbits(63))

    def outcome(self) -> Outcome:
        until = time.monotonic() + 40
        while time.monotonic() < until:
            for news in self.instance.news():
                if isinstance(news, Outcome):
                    return news
            time.sleep(0.005)
        raise AssertionError(self.instance.snapshot())


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    made: list[Side] = []
    yield made
    for side in made:
        side.instance.close()


def push(producer: Side, consumer: Side, transfer: str) -> None:
    producer.memory[64:128] = len(transfer)
    producer.instance.put([Stage(transfer, Mode.PUSH, Part(None, (0,), BlockTable.of([1])), True, 32)])
    address = producer.options.advertise
    consumer.instance.put([Expose(transfer, Mode.PUSH, BlockTable.of([2]), (0,), 32, 30.0, address)])
    assert producer.outcome().ok and consumer.outcome().ok
    assert (consumer.memory[128:192] == len(transfer)).all()


@pytest.mark.parametrize("other", [["tcp"], ["tcp", "both"]])
def test_instances_that_differ_use_what_both_have(
    name: str, sections: Any, sides: list[Side], other: list[str]
) -> None:
    theirs = [name if one == "both" else one for one in other]
    sides += [Side([name, "tcp"], sections), Side(theirs, sections)]
    push(sides[0], sides[1], "a")
    push(sides[1], sides[0], "ab")


def test_tcp_takes_the_place_of_a_backend_that_does_not_load(
    name: str, sections: Any, sides: list[Side], caplog: pytest.LogCaptureFixture
) -> None:
    broken = {name: {**sections[name], "preload": ["/nowhere/libnothing.so"]}}
    sides += [Side([name, "tcp"], broken), Side([name, "tcp"], sections)]
    push(sides[0], sides[1], "a")
    push(sides[1], sides[0], "ab")
    assert f"transport '{name}' is left out: NIXL cannot be used here" in caplog.text


def test_tcp_takes_the_place_of_a_peer_that_nixl_cannot_reach(
    name: str, sections: Any, sides: list[Side], caplog: pytest.LogCaptureFixture
) -> None:
    """The consumer advertises a port of the bell at which nobody listens."""
    (nobody,) = free_ports(1)
    wrong = {name: {**sections[name], "advertise_port": nobody}}
    sides += [Side([name, "tcp"], sections), Side([name, "tcp"], wrong)]
    push(sides[0], sides[1], "a")
    assert sides[0].instance.snapshot()["fallbacks"] == 1
    assert f"transport '{name}' does not serve" in caplog.text
    push(sides[1], sides[0], "ab")
    assert sides[1].instance.snapshot()["fallbacks"] == 0
