"""What only two processes can show: one that stops, and one that dies."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvx.core.events import Forbidden
from kvx.core.model import Descriptors, InstanceInfo, Layout, Op, Peer, Reason, Stamp

STAMP = Stamp("t", 7, 3)
MIB = 1 << 20
LIMIT_S = 30


def whole(nbytes, at=0):
    return Descriptors.of([(0, at, nbytes)])


class Process:
    """A rank in a process of its own."""

    def __init__(self, name, nbytes):
        program = Path(__file__).with_name("rank_program.py")
        self.peer = Peer(name, 0)
        self._process = subprocess.Popen(
            [sys.executable, str(program), name, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.metadata = base64.b64decode(self.line())
        self.info = InstanceInfo(name, 0, 1, "127.0.0.1:1", Layout("m", "d", "v", (), 0))

    def line(self):
        assert select.select([self._process.stdout], [], [], LIMIT_S)[0], "the process says nothing"
        return self._process.stdout.readline().decode().strip()

    def tell(self, **line):
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    def stop(self):
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.wait()

    def close(self):
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def process():
    processes = []

    def process(name, nbytes):
        processes.append(Process(name, nbytes))
        return processes[-1]

    yield process
    for one in processes:
        one.close()


def test_forbidden_while_the_writer_is_stopped(make, pump, process):
    b, writer = make("b", 64 * MIB), process("w", 64 * MIB)
    b.transport.permit("t", writer.peer, Op.WRITE, whole(64 * MIB), STAMP)
    metadata = base64.b64encode(b.transport.metadata()).decode()
    writer.tell(do="post", id=1, op="write", transfer="t", to="b", metadata=metadata)
    pump(b, until=b.memory.any)
    writer.stop()
    assert not b.memory.all(), "the writer was too fast: the test shows nothing"
    b.transport.forbid("t")
    b.poll()
    assert b.answers == [Forbidden("t")]
    b.memory[:] = 9
    b.poll_dry()
    writer.go_on()
    pump(b, until=lambda: select.select([writer._process.stdout], [], [], 0)[0])
    assert writer.line() == "1 False"
    assert (b.memory == 9).all()


def test_a_stopped_target_costs_nothing_and_holds_nobody_up(make, pump, process):
    a, b, target = make("a", 64 * MIB), make("b", 64 * MIB), process("s", 64 * MIB)
    a.know(b)
    a.transport.connect(target.info, target.metadata)
    target.tell(do="permit", op="write", transfer="t")
    b.transport.permit("t", None, Op.WRITE, whole(64 * MIB), STAMP)
    a.transport.post(1, target.peer, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    pump(a, until=lambda: 1 in a.ended)
    target.stop()
    a.transport.post(2, target.peer, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    a.post(3, b, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    pump(a, b, until=lambda: 3 in a.ended)
    assert a.done(3)
    a.poll_until_stalled()
    a.transport.cancel(2)
    a.poll_dry()
    assert 2 not in a.ended
    target.go_on()
    pump(a, until=lambda: 2 in a.ended)
    assert a.failed(2).reason is Reason.ABORTED


@pytest.mark.parametrize("op", list(Op))
def test_a_target_that_is_killed(make, pump, process, op):
    a, target = make("a", 64 * MIB), process("k", 64 * MIB)
    a.memory[:] = 1
    a.transport.connect(target.info, target.metadata)
    target.tell(do="permit", op=op.value, transfer="t")
    a.transport.post(1, target.peer, op, whole(1), whole(1), STAMP)
    pump(a, until=lambda: 1 in a.ended)
    a.transport.post(2, target.peer, op, whole(64 * MIB), whole(64 * MIB), STAMP)
    a.poll()
    target.kill()
    pump(a, until=lambda: 2 in a.ended)
    assert a.failed(2).reason is Reason.TRANSPORT
    a.transport.post(3, target.peer, op, whole(1), whole(1), STAMP)
    pump(a, until=lambda: 3 in a.ended)
    assert "refused" in a.failed(3).detail


def test_a_killed_writer_leaves_nothing_open(make, pump, process):
    b, writer = make("b", 64 * MIB), process("w", 64 * MIB)
    b.transport.permit("t", writer.peer, Op.WRITE, whole(64 * MIB), STAMP)
    metadata = base64.b64encode(b.transport.metadata()).decode()
    writer.tell(do="post", id=1, op="write", transfer="t", to="b", metadata=metadata)
    pump(b, until=b.memory.any)
    writer.kill()
    pump(b, until=lambda: not b.transport._connections)
    assert not b.transport._target.groups
    b.poll_until_stalled()
    assert b.told == []


def test_a_target_that_is_silent_for_too_long_leaves_a_write_in_doubt(make, pump, process):
    a, target = make("a", 64 * MIB, silence_s=1, handshake_s=0.3), process("s", 64 * MIB)
    a.transport.connect(target.info, target.metadata)
    target.tell(do="permit", op="write", transfer="t")
    a.transport.post(1, target.peer, Op.WRITE, whole(1), whole(1), STAMP)
    pump(a, until=lambda: 1 in a.ended)
    target.stop()
    a.transport.post(2, target.peer, Op.WRITE, whole(64 * MIB), whole(64 * MIB), STAMP)
    remote = a.transport._initiator.remotes[target.peer]
    pump(a, until=lambda: remote.pause_s > 0.1)
    assert 2 not in a.ended, "a stopped process may still take what its socket holds"
    target.go_on()
    pump(a, until=lambda: 2 in a.ended)
    assert a.failed(2).reason is Reason.TRANSPORT


def test_dead_hosts_are_looked_for(pair):
    a, b = pair(warm=True, silence_s=8)
    for rank in (a, b):
        assert rank.transport._connections
        for connection in rank.transport._connections.values():
            option = connection.sock.getsockopt
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
            idle, every, times = (
                option(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * times <= 8
