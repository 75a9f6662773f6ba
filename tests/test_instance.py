"""Two ranks in one process over real sockets: the composed product without an engine."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field

from kvx.address import parse_address
from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core import wire
from kvx.core.errors import RemoteProtocolError
from kvx.core.messages import Envelope, Hello
from kvx.core.model import (
    BlockTable,
    CacheGroup,
    LayerSpec,
    Layout,
    Mode,
    News,
    Outcome,
    Packing,
    Part,
    Reason,
    Region,
    Released,
)
from kvx.engine import Abort, Claim, EngineInstance, Expose, Stage
from kvx.instance import make_ticket, open_instance, read_ticket
from kvx.operator import ask

Evidence = Callable[[str, Mapping[str, Any]], None]
IDLE_S = 10
BLOCK_BYTES, BLOCKS, LAYERS, BLOCK_SIZE = 4096, 64, 3, 32


@define
class Rank:
    """One opened instance with its memory, patterned so that each byte of each rank differs in place."""

    options: Options
    memory: np.ndarray
    instance: EngineInstance
    epoch: int
    heard: list[News] = field(factory=list)

    def block(self, layer: int, block: int) -> np.ndarray:
        return self.memory[layer, block]

    def wait(self, *kinds: type, transfer: str, limit_s: float = 20.0) -> list[News]:
        """The news of these kinds about one transfer, once each kind is there."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.heard += self.instance.news()
            found = [
                news for news in self.heard if isinstance(news, kinds) and getattr(news, "transfer", "") == transfer
            ]
            if {type(news) for news in found} == set(kinds):
                return found
            time.sleep(0.002)
        raise AssertionError(f"no {kinds} of {transfer} in {limit_s} s, heard {self.heard}, {self.instance.snapshot()}")

    def until_open(self, transfer: str, state: str) -> None:
        """Wait until its status has this transfer in a state whose name contains `state`."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            opened: Mapping[str, list[str]] = self.instance.snapshot()["open"]  # type: ignore[assignment]
            if any(state in one for one in opened.get(transfer, ())):
                return
            time.sleep(0.002)
        raise AssertionError(f"{transfer} is not {state or 'open'}: {self.instance.snapshot()}")


def open_rank(seed: int, dtype: str = "u8", **options: object) -> Rank:
    memory = np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    region = Region(0, memory.ctypes.data, memory.nbytes)
    layers = tuple(
        LayerSpec(f"layer.{i}", 0, i * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES) for i in range(LAYERS)
    )
    group = CacheGroup(0, "full", BLOCK_SIZE, layers, 2, 2, Packing.HEADS)
    layout = Layout("toy", dtype, "test", (group,), BLOCKS)
    epoch = secrets.randbits(63)
    loaded = Options.load({"listen": f"127.0.0.1:{free_ports(1)[0]}", **options}, {})
    return Rank(loaded, memory, open_instance(loaded, layout, [region], epoch=epoch), epoch)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    ranks = open_rank(1, integrity="crc"), open_rank(2, integrity="crc")
    yield ranks
    for rank in ranks:
        rank.instance.close()


def push(p: Rank, d: Rank, transfer: str, source: list[int], target: list[int], tokens: int) -> None:
    d.instance.put([Expose(transfer, Mode.PUSH, BlockTable.of(target), (0,), tokens, 30.0, p.instance.info.address)])
    p.instance.put([Claim(transfer, Mode.PUSH)])
    for layer in range(LAYERS):
        part = Part((f"layer.{layer}",), (0,), BlockTable.of(source))
        p.instance.put([Stage(transfer, Mode.PUSH, part, layer == LAYERS - 1, tokens)])


def assert_moved(p: Rank, d: Rank, before: np.ndarray, source: list[int], target: list[int]) -> None:
    for layer in range(LAYERS):
        for a, b in zip(source, target, strict=True):
            assert (p.block(layer, a) == d.block(layer, b)).all()
    others = [block for block in range(BLOCKS) if block not in target]
    assert (before[:, others] == d.memory[:, others]).all()


def test_push_moves_exactly_the_granted_blocks(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    before, source, target = d.memory.copy(), [3, 4, 9], [10, 30, 31]
    push(p, d, "t1", source, target, 70)
    for rank in pair:
        outcome, released = rank.wait(Outcome, Released, transfer="t1")
        assert isinstance(outcome, Outcome) and outcome.ok, outcome
        assert outcome.bytes == 3 * LAYERS * BLOCK_BYTES
        assert released == Released("t1")
    assert_moved(p, d, before, source, target)


def test_pull_reads_with_the_ticket_alone(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    before, source, target = d.memory.copy(), [5, 6], [1, 60]
    p.instance.put([Expose("t2", Mode.PULL, BlockTable.of(source), (0,), 40, 30.0)])
    text = make_ticket(
        p.options, epoch=p.epoch, transfer="t2", first=(0,), blocks=BlockTable.of(source), tokens=40, lease_s=30.0
    )
    ticket = read_ticket(d.options, text)
    d.instance.put([Claim("t2", Mode.PULL, ticket)])
    d.instance.put([Stage("t2", Mode.PULL, Part(None, (0,), BlockTable.of(target)), True, 40, ticket)])
    for rank in pair:
        outcome, _ = rank.wait(Outcome, Released, transfer="t2")
        assert isinstance(outcome, Outcome) and outcome.ok, outcome
    assert_moved(p, d, before, source, target)


def test_an_abort_before_blocks_releases_the_producer(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    p.instance.put([Expose("t3", Mode.PULL, BlockTable.of([7]), (0,), 32, 30.0)])
    text = make_ticket(
        p.options, epoch=p.epoch, transfer="t3", first=(0,), blocks=BlockTable.of([7]), tokens=32, lease_s=30
    )
    d.instance.put([Abort("t3", ticket=read_ticket(d.options, text))])
    outcome, _ = p.wait(Outcome, Released, transfer="t3")
    assert isinstance(outcome, Outcome) and not outcome.ok and outcome.reason is not None
    assert outcome.reason.value == "aborted"


def test_an_address_that_nobody_listens_on_fails_the_one_request(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    address = f"127.0.0.1:{free_ports(1)[0]}"
    d.instance.put([Expose("t4", Mode.PUSH, BlockTable.of([1]), (0,), 32, 30.0, address)])
    outcome, _ = d.wait(Outcome, Released, transfer="t4")
    assert isinstance(outcome, Outcome) and not outcome.ok
    assert address in outcome.detail
    push(p, d, "t5", [1], [1], 20)
    assert all(isinstance(n, Outcome) and n.ok for n in d.wait(Outcome, transfer="t5"))


def test_one_ticket_serves_exactly_one_of_two_readers(pair: tuple[Rank, Rank], evidence: Evidence) -> None:
    p, d = pair
    other = open_rank(3, integrity="crc")
    try:
        source, target = [5, 6], [1, 60]
        p.instance.put([Expose("t6", Mode.PULL, BlockTable.of(source), (0,), 40, 30.0)])
        text = make_ticket(
            p.options, epoch=p.epoch, transfer="t6", first=(0,), blocks=BlockTable.of(source), tokens=40, lease_s=30.0
        )
        for reader in (d, other):
            ticket = read_ticket(reader.options, text)
            part = Part(None, (0,), BlockTable.of(target))
            reader.instance.put([Stage("t6", Mode.PULL, part, True, 40, ticket)])
        outcomes = [reader.wait(Outcome, Released, transfer="t6")[0] for reader in (d, other)]
        assert sorted(outcome.ok for outcome in outcomes if isinstance(outcome, Outcome)) == [False, True], outcomes
        told = [{"ok": outcome.ok, "reason": outcome.reason and outcome.reason.value} for outcome in outcomes]
        evidence("two-readers", {"readers": told})
        winner = d if outcomes[0].ok else other
        assert (winner.memory[:, target] == p.memory[:, source]).all()
    finally:
        other.instance.close()


def resting(pair: tuple[Rank, Rank]) -> list[object]:
    """How often each has woken up, once none has for a second: the last words of a transfer take a moment."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        before = [rank.instance.snapshot()["wakeups"] for rank in pair]
        time.sleep(1)
        if before == [rank.instance.snapshot()["wakeups"] for rank in pair]:
            return before
    raise AssertionError("they never come to rest")


def test_nothing_wakes_while_nothing_is_open(pair: tuple[Rank, Rank], evidence: Evidence) -> None:
    p, d = pair
    push(p, d, "t7", [1], [1], 20)
    for rank in pair:
        rank.wait(Outcome, Released, transfer="t7")
    before = resting(pair)
    time.sleep(IDLE_S)
    after = [rank.instance.snapshot()["wakeups"] for rank in pair]
    evidence("idle-wakeups", {"idle_s": IDLE_S, "wakeups_before": before, "wakeups_after": after})
    assert after == before


def test_close_tells_the_peer_and_leaves_no_thread(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    p.instance.put([Claim("t8", Mode.PUSH)])
    d.instance.put([Expose("t8", Mode.PUSH, BlockTable.of([4]), (0,), 32, 30.0, p.instance.info.address)])
    p.until_open("t8", "granted")
    p.instance.close()
    outcome = d.wait(Outcome, Released, transfer="t8")[0]
    assert isinstance(outcome, Outcome) and outcome.reason is Reason.DRAINING, outcome
    assert not [thread for thread in threading.enumerate() if thread.name == f"kvx-{p.instance.info.peer}"]


def test_instances_of_different_secrets_refuse_each_other() -> None:
    p, d = open_rank(1, secret="one secret of many bytes"), open_rank(2, secret="another secret of many bytes")
    try:
        d.instance.put([Expose("t9", Mode.PUSH, BlockTable.of([4]), (0,), 32, 30.0, p.instance.info.address)])
        outcome = d.wait(Outcome, Released, transfer="t9")[0]
        assert isinstance(outcome, Outcome) and outcome.reason is Reason.AUTH, outcome
    finally:
        p.instance.close()
        d.instance.close()


def test_an_operator_can_ask_and_release(pair: tuple[Rank, Rank]) -> None:
    p, _ = pair
    p.instance.put([Expose("t10", Mode.PULL, BlockTable.of([7]), (0,), 32, 30.0)])
    text = make_ticket(
        p.options, epoch=p.epoch, transfer="t10", first=(0,), blocks=BlockTable.of([7]), tokens=32, lease_s=30
    )
    status = ask(p.instance.info.address, "status", "", secret=b"", timeout_s=20)
    assert status.ok and "t10" in status.body
    assert ask(p.instance.info.address, "release", text, secret=b"", timeout_s=20).ok
    outcome = p.wait(Outcome, Released, transfer="t10")[0]
    assert isinstance(outcome, Outcome) and outcome.reason is Reason.ABORTED
    assert not ask(p.instance.info.address, "release", text, secret=b"", timeout_s=20).ok
    assert not ask(p.instance.info.address, "fly", "", secret=b"", timeout_s=20).ok


def test_a_runtime_that_stops_fails_what_is_open_and_what_comes(pair: tuple[Rank, Rank]) -> None:
    p, _ = pair
    p.instance.put([Expose("t11", Mode.PULL, BlockTable.of([7]), (0,), 32, 30.0)])
    p.until_open("t11", "")
    runtime = p.instance._runtime  # type: ignore[attr-defined]
    runtime._control.poll = lambda: 1 / 0
    p.instance.put([Claim("t12", Mode.PUSH)])
    outcome = p.wait(Outcome, transfer="t11")[0]
    assert isinstance(outcome, Outcome) and "ZeroDivisionError" in outcome.detail
    assert Released("t11") not in p.heard, "nothing proves that these blocks are safe"
    p.instance.put([Expose("t13", Mode.PULL, BlockTable.of([8]), (0,), 32, 30.0)])
    assert len(p.wait(Outcome, Released, transfer="t13")) == 2


def test_what_is_put_in_the_moment_in_which_a_runtime_stops_is_refused_too(pair: tuple[Rank, Rank]) -> None:
    p, _ = pair
    runtime = p.instance._runtime  # type: ignore[attr-defined]

    class StopsMeanwhile(deque[Any]):
        def append(self, batch: Any) -> None:
            runtime._control.poll = lambda: 1 / 0
            os.eventfd_write(runtime._wake, 1)
            runtime._thread.join(20)
            super().append(batch)

    runtime._inbox = StopsMeanwhile()
    p.instance.put([Expose("t20", Mode.PULL, BlockTable.of([7]), (0,), 32, 30.0)])
    outcome = p.wait(Outcome, Released, transfer="t20")[0]
    assert isinstance(outcome, Outcome) and "ZeroDivisionError" in outcome.detail


def test_a_host_that_forks_before_it_starts_is_served() -> None:
    program = (
        "import os, sys, kvx.instance, numpy as np\n"
        "if os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_instance import *\n"
        "p, d = open_rank(1), open_rank(2)\n"
        "push(p, d, 't', [3], [10], 20)\n"
        "ok = all(rank.wait(Outcome, Released, transfer='t')[0].ok for rank in (p, d))\n"
        "assert (p.memory[:, 3] == d.memory[:, 10]).all()\n"
        "p.instance.close(); d.instance.close()\n"
        "sys.exit(0 if ok else 1)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", program, here], timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_cache_of_another_dtype_is_refused_by_name_and_the_next_request_works(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    other = open_rank(4, dtype="u16")
    try:
        address = p.instance.info.address
        other.instance.put([Expose("t14", Mode.PUSH, BlockTable.of([4]), (0,), 32, 30.0, address)])
        outcome = other.wait(Outcome, Released, transfer="t14")[0]
        assert isinstance(outcome, Outcome) and outcome.reason is Reason.LAYOUT, outcome
        assert "dtype" in outcome.detail and "u16" in outcome.detail and "u8" in outcome.detail
        push(p, d, "t15", [1], [1], 20)
        assert all(isinstance(news, Outcome) and news.ok for news in d.wait(Outcome, transfer="t15"))
    finally:
        other.instance.close()


def test_a_peer_of_another_protocol_version_is_told_so(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    hello = Hello(step=1, versions=(99,), epoch=1, nonce=bytes(16))
    with socket.create_connection(parse_address(p.instance.info.address), 20) as stranger:
        data = wire.encode(Envelope(wire.VERSION, 1, 0, hello))
        stranger.sendall(len(data).to_bytes(4, "big") + data)
        length = int.from_bytes(stranger.recv(4, socket.MSG_WAITALL), "big")
        answer = wire.decode(stranger.recv(length, socket.MSG_WAITALL)).message
    assert isinstance(answer, Hello) and answer.refusal is Reason.VERSION
    assert "[1]" in answer.detail and "[99]" in answer.detail
    push(p, d, "t16", [1], [1], 20)
    assert all(isinstance(news, Outcome) and news.ok for news in d.wait(Outcome, transfer="t16"))


def test_an_acceptor_of_another_protocol_version_fails_the_request_with_version(pair: tuple[Rank, Rank]) -> None:
    _, d = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        d.instance.put([Expose("t17", Mode.PUSH, BlockTable.of([4]), (0,), 32, 30.0, address)])
        listener.settimeout(20)
        accepted, _ = listener.accept()
        with accepted:
            refusal = Hello(step=1, refusal=Reason.VERSION, detail="this instance speaks kvx protocol [99]")
            data = wire.encode(Envelope(wire.VERSION, 1, 0, refusal))
            accepted.sendall(len(data).to_bytes(4, "big") + data)
            outcome = d.wait(Outcome, Released, transfer="t17")[0]
    assert isinstance(outcome, Outcome) and outcome.reason is Reason.VERSION, outcome
    assert "[99]" in outcome.detail


def test_a_ticket_of_an_earlier_start_moves_nothing(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    before = d.memory.copy()
    p.instance.put([Expose("t18", Mode.PULL, BlockTable.of([7]), (0,), 32, 30.0)])
    text = make_ticket(
        p.options, epoch=p.epoch + 1, transfer="t18", first=(0,), blocks=BlockTable.of([7]), tokens=32, lease_s=30
    )
    ticket = read_ticket(d.options, text)
    d.instance.put([Stage("t18", Mode.PULL, Part(None, (0,), BlockTable.of([9])), True, 32, ticket)])
    outcome = d.wait(Outcome, Released, transfer="t18")[0]
    assert isinstance(outcome, Outcome) and outcome.reason is Reason.EPOCH, outcome
    assert (d.memory == before).all()


def test_a_forged_ticket_is_no_ticket(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    text = make_ticket(
        p.options, epoch=p.epoch, transfer="t19", first=(0,), blocks=BlockTable.of([7]), tokens=32, lease_s=30
    )
    ticket = wire.parse_ticket(text)
    forged = evolve(ticket, grant=evolve(ticket.grant, address="127.0.0.1:9"))
    with pytest.raises(RemoteProtocolError, match="forged"):
        read_ticket(d.options, wire.ticket_text(forged))
