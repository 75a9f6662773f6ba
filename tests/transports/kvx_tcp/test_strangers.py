"""Whoever does not prove himself, or does not speak the protocol, gets nowhere and holds nothing up."""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvx.core.errors import ConfigError, RemoteProtocolError, TransportError
from kvx.core.model import Descriptors, Op, Reason, Stamp
from kvx_tcp.frames import HEADER_BYTES, Frame, Hello, Kind, Status, decode_open, encode_open, message, prove
from kvx_tcp.transport import TcpTransport

STAMP = Stamp("t", 7, 3)
MIB = 1 << 20


def whole(nbytes, at=0):
    return Descriptors.of([(0, at, nbytes)])


class Stranger:
    """A raw connection to a rank's data port."""

    def __init__(self, rank):
        self.rank = rank
        self.metadata = msgspec.msgpack.decode(rank.transport.metadata())
        self.sock = socket.create_connection((self.metadata["host"], self.metadata["port"]))
        self.sock.settimeout(0)

    def answer(self, pump, count):
        """The next `count` bytes, b"" once the rank has hung up."""
        got = []

        def heard():
            try:
                got.append(self.sock.recv(count, socket.MSG_PEEK))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                got.append(b"")
            return len(got[-1]) in (0, count)

        pump(self.rank, until=heard)
        return self.sock.recv(count) if got[-1] else b""

    def some(self, pump, most):
        """What has arrived, at least a byte: a kernel short of memory may never hold more at once."""
        got = []

        def heard():
            with contextlib.suppress(BlockingIOError):
                got.append(self.sock.recv(most))
            return bool(got)

        pump(self.rank, until=heard)
        return got[0]

    def hello(self, name="s#0"):
        hello = Hello(name, str(self.rank.peer), b"i" * 16, self.metadata["incarnation"], b"g" * 16, b"n" * 16)
        self.sock.send(hello.encode())
        return hello

    def enter(self, pump, name="s#0", secret=b"", answer=HEADER_BYTES + 32):
        hello = self.hello(name)
        challenge = self.answer(pump, HEADER_BYTES + 16)[HEADER_BYTES:]
        self.sock.send(message(Kind.PROOF, prove(secret, b"dialler", hello, challenge)))
        return self.answer(pump, answer)


@pytest.fixture
def stranger(make):
    strangers = []

    def stranger(rank):
        strangers.append(Stranger(rank))
        return strangers[-1]

    yield stranger
    for one in strangers:
        one.sock.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64,
        bytes(64),
        Frame(Kind.PUT, 0, 1, 0, 4096).encode() + bytes(4096),
        Frame(Kind.HELLO, 0, 0, 0, 1 << 40).encode(),
        message(Kind.HELLO, b"\xc1"),
        message(Kind.PROOF, bytes(32)),
        message(Kind.OPEN, bytes(100)),
    ],
)
def test_noise_on_the_data_port_is_hung_up_on(make, pump, stranger, noise):
    b = make("b")
    one = stranger(b)
    one.sock.send(noise)
    assert one.answer(pump, 1) == b""
    assert not b.memory.any()


def test_a_stranger_without_the_secret(make, pump, stranger):
    b = make("b", secret=b"right")
    b.transport.permit("t", None, Op.WRITE, whole(MIB), STAMP)
    one = stranger(b)
    assert Frame.decode(one.enter(pump, secret=b"wrong", answer=HEADER_BYTES)).kind is Kind.REFUSE
    assert one.answer(pump, 1) == b""
    assert not b.memory.any()


def test_two_ranks_with_different_secrets(make, pump):
    a, b = make("a", secret=b"one"), make("b", secret=b"two")
    a.know(b)
    b.transport.permit("t", None, Op.READ, whole(8), STAMP)
    a.post(1, b, Op.READ, whole(8), whole(8), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.TRANSPORT
    assert "does not accept" in a.failed(1).detail


def test_an_acceptor_that_cannot_prove_itself_gets_no_byte(make, pump):
    a, b = make("a", secret=b"right"), make("b")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        metadata = msgspec.msgpack.decode(b.transport.metadata())
        a.know(b, msgspec.msgpack.encode({**metadata, "port": listener.getsockname()[1], "streams": 1}))
        a.post(1, b, Op.WRITE, whole(MIB), whole(MIB), STAMP)
        a.poll_dry()
        sock = listener.accept()[0]
        with sock:
            sock.send(message(Kind.CHALLENGE, bytes(16)) + message(Kind.WELCOME, bytes(32)))
            pump(a, until=lambda: 1 in a.ended)
            received = b""
            while data := sock.recv(65536):
                received += data
    assert "does not prove" in a.failed(1).detail
    assert len(received) < 1000


def test_a_proven_peer_is_welcome_and_then_held_to_the_protocol(make, pump, stranger):
    b = make("b", secret=b"right")
    one = stranger(b)
    assert one.enter(pump, secret=b"right")[3] == Kind.WELCOME
    one.sock.send(encode_open(1, Op.WRITE, STAMP, whole(8)))
    assert Frame.decode(one.answer(pump, HEADER_BYTES)).kind is Kind.ACK
    one.sock.send(Frame(Kind.DATA, 0, 1, 0, 8).encode())
    assert one.answer(pump, 1) == b""


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.PUT, 0, 1, 1, 8),
        Frame(Kind.PUT, 0, 1, 2**64 - 8, 8),
        Frame(Kind.GET, 0, 1, 0, 8),
        Frame(Kind.PUT, 0, 1, 0, 0),
        Frame(Kind.PUT, 0, 1, 0, 2**40),
    ],
)
def test_a_proven_peer_cannot_leave_its_operation(make, pump, stranger, frame):
    b = make("b")
    b.transport.permit("t", None, Op.WRITE, whole(8, 8), STAMP)
    one = stranger(b)
    one.enter(pump)
    one.sock.send(encode_open(1, Op.WRITE, STAMP, whole(8, 8)))
    assert Frame.decode(one.answer(pump, HEADER_BYTES)).status == 0
    one.sock.send(frame.encode() + b"x" * 8)
    assert one.answer(pump, 1) == b""
    assert not b.memory.any()


def test_one_peer_cannot_abandon_the_connections_of_another(pair, pump, stranger):
    a, b = pair(8 * MIB, warm=True)
    group = next(iter(b.transport._target.groups))
    one = stranger(b)
    one.enter(pump, "s#0")
    one.sock.send(message(Kind.ABANDON, group))
    assert one.answer(pump, 1) == b""
    b.transport.permit("t", a.peer, Op.READ, whole(8 * MIB), STAMP)
    a.post(1, b, Op.READ, whole(8 * MIB), whole(8 * MIB), STAMP)
    pump(a, b, until=lambda: 1 in a.ended)
    assert a.done(1)


def test_too_many_open_operations_are_refused(make, pump, stranger):
    b = make("b")
    b.transport.permit("t", None, Op.READ, whole(8), STAMP)
    one = stranger(b)
    one.enter(pump)
    statuses = []
    for at in range(300):
        one.sock.send(encode_open(at, Op.READ, STAMP, whole(8)))
        statuses.append(Frame.decode(one.answer(pump, HEADER_BYTES)).status)
    assert statuses == [0] * 256 + [4] * 44


def test_a_peer_that_asks_and_never_listens_is_not_listened_to_for_ever(make, pump, stranger):
    b = make("b", 4 * MIB)
    b.transport.permit("t", None, Op.READ, whole(4 * MIB), STAMP)
    one = stranger(b)
    one.enter(pump)
    one.sock.send(encode_open(1, Op.READ, STAMP, whole(4 * MIB)))
    question, sent = Frame(Kind.GET, 0, 1, 0, 4 * MIB).encode(), 0
    for _ in range(2000):
        try:
            while True:
                sent += one.sock.send(question * 1000)
        except BlockingIOError:
            b.poll()
    b.poll_dry()
    (connection,) = b.transport._connections.values()
    assert len(connection._queue) <= 300


@pytest.mark.parametrize("closing", [False, True])
def test_what_was_asked_for_and_is_forbidden_before_it_is_sent(make, pump, stranger, closing):
    b = make("b", 16 * MIB)
    b.memory[:] = 2
    b.transport.permit("t", None, Op.READ, whole(16 * MIB), STAMP)
    one = stranger(b)
    one.enter(pump)
    question = Frame(Kind.GET, 0, 1, 0, 16 * MIB)
    one.sock.send(encode_open(1, Op.READ, STAMP, whole(16 * MIB)) + 2 * question.encode())
    b.poll_until_stalled()
    if closing:
        one.sock.send(Frame(Kind.CLOSE, 0, 1).encode())
        b.poll_until_stalled()
    b.transport.forbid("t")
    b.memory[:] = 9
    assert Frame.decode(one.answer(pump, HEADER_BYTES)).kind is Kind.ACK
    assert Frame.decode(one.answer(pump, HEADER_BYTES)) == question._replace(kind=Kind.DATA)
    received = 0
    while received < 16 * MIB:
        data = one.some(pump, 16 * MIB - received)
        assert 9 not in data, "memory was read after it was forbidden"
        received += len(data)
    refused = question._replace(kind=Kind.ACK, status=Status.FORBIDDEN)
    assert [Frame.decode(one.answer(pump, HEADER_BYTES)) for _ in range(2)] == [refused, refused]


class Impostor:
    """A target that knows the secret and answers what a test says."""

    def __init__(self, initiator, target):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        metadata = msgspec.msgpack.decode(target.transport.metadata())
        port = self.listener.getsockname()[1]
        initiator.know(target, msgspec.msgpack.encode({**metadata, "port": port, "streams": 1}))

    def welcome(self, initiator):
        """Accept the connection that a posted operation opens."""
        initiator.poll_dry()
        self.sock = self.listener.accept()[0]
        self.sock.settimeout(10)
        initiator.poll_dry()
        header = Frame.decode(self.sock.recv(HEADER_BYTES, socket.MSG_WAITALL))
        hello = Hello.decode(self.sock.recv(header.length, socket.MSG_WAITALL))
        self.sock.send(message(Kind.CHALLENGE, b"c" * 16))
        initiator.poll_until_stalled()
        assert self.sock.recv(HEADER_BYTES + 32, socket.MSG_WAITALL)[3] == Kind.PROOF
        self.sock.send(message(Kind.WELCOME, prove(b"", b"acceptor", hello, b"c" * 16)))
        initiator.poll_until_stalled()

    def close(self):
        self.sock.close()
        self.listener.close()


@pytest.fixture
def impostor():
    impostors = []

    def impostor(initiator, target):
        impostors.append(Impostor(initiator, target))
        return impostors[-1]

    yield impostor
    for one in impostors:
        one.close()


OPENED = Frame(Kind.ACK, 0, 1)


@pytest.mark.parametrize(
    ("op", "answers"),
    [
        (Op.READ, [OPENED, Frame(Kind.ACK, 0, 1, 0, 4096)]),
        (Op.READ, [OPENED, Frame(Kind.DATA, 0, 1, 0, 4095)]),
        (Op.READ, [OPENED, Frame(Kind.DATA, 0, 1, 1, 4096)]),
        (Op.READ, [OPENED, Frame(Kind.DATA, 0, 2, 0, 4096)]),
        (Op.READ, [Frame(Kind.DATA, 0, 1, 0, 4096)]),
        (Op.READ, [OPENED, OPENED]),
        (Op.WRITE, [OPENED, Frame(Kind.DATA, 0, 1, 0, 4096)]),
        (Op.WRITE, [OPENED, Frame(Kind.ACK, 0, 1, 0, 1)]),
        (Op.WRITE, [OPENED, Frame(Kind.PUT, 0, 1, 0, 4096)]),
        (Op.WRITE, [Frame(Kind.WELCOME)]),
    ],
)
def test_an_answer_that_fits_no_question_ends_the_connection(make, impostor, op, answers):
    a, b = make("a"), make("b")
    one = impostor(a, b)
    a.post(1, b, op, whole(4096), whole(4096), STAMP)
    one.welcome(a)
    assert 1 not in a.ended
    one.sock.send(b"".join(answer.encode() for answer in answers) + b"x" * 4096)
    a.poll_until_stalled()
    assert not a.done(1)
    assert not a.memory.any()
    with contextlib.suppress(ConnectionResetError):
        while one.sock.recv(65536):
            continue
    # A READ is over; what a WRITE has sent is in doubt, and asked about on a new connection.
    assert (1 in a.ended) is (op is Op.READ)


def test_bytes_that_were_asked_for_and_then_refused_are_no_success(make, impostor):
    a, b = make("a"), make("b")
    one = impostor(a, b)
    a.post(1, b, Op.READ, whole(4096), whole(4096), STAMP)
    one.welcome(a)
    data = Frame(Kind.DATA, 0, 1, 0, 4096)
    one.sock.send(OPENED.encode() + data.encode() + b"x" * 4096)
    a.poll_until_stalled()
    assert 1 not in a.ended
    one.sock.send(data._replace(kind=Kind.ACK, status=Status.FORBIDDEN).encode())
    a.poll_until_stalled()
    assert a.failed(1).reason is Reason.ABORTED


def test_strangers_are_bounded_in_number_and_the_oldest_goes(make, pump, stranger):
    b = make("b")
    many = []
    for _ in range(80):
        many.append(stranger(b))
        b.poll_dry()
    pump(b, until=lambda: len(b.transport._connections) == 64)
    b.poll_dry()
    assert many[0].answer(pump, 1) == b""
    many[-1].hello()
    assert many[-1].answer(pump, HEADER_BYTES)


def test_strangers_are_bounded_in_time(make, pump, stranger):
    b = make("b", handshake_s=0.2)
    one = stranger(b)
    assert one.answer(pump, 1) == b""


def test_an_acceptor_that_says_nothing_fails_the_operation(make, pump):
    a, b = make("a", handshake_s=0.2), make("b")
    a.know(b)
    a.post(1, b, Op.READ, whole(8), whole(8), STAMP)
    pump(a, until=lambda: 1 in a.ended)
    assert "handshake" in a.failed(1).detail


def test_another_rank_at_the_address_is_not_taken_for_the_peer(make, pump):
    a, b, c = make("a"), make("b"), make("c")
    c.transport.permit("t", None, Op.WRITE, whole(8), STAMP)
    a.know(b, c.transport.metadata())
    a.post(1, b, Op.WRITE, whole(8), whole(8), STAMP)
    pump(a, c, until=lambda: 1 in a.ended)
    assert a.failed(1).reason is Reason.TRANSPORT


@pytest.mark.parametrize(
    "options",
    [
        {"listen_host": "0.0.0.0"},
        {"listen_host": "0.0.0.0", "secret": b"x"},
        {"listen_host": "192.0.2.77", "secret": b"x"},
    ],
)
def test_where_it_does_not_listen(options):
    transport = TcpTransport(options)
    with pytest.raises(TransportError):
        transport.register([])
    transport.close()


def test_without_a_secret_it_dials_loopback_only(make):
    a, b = make("a"), make("b")
    metadata = msgspec.msgpack.decode(b.transport.metadata())
    with pytest.raises(TransportError, match="loopback"):
        a.know(b, msgspec.msgpack.encode({**metadata, "host": "192.0.2.1"}))


@pytest.mark.parametrize(
    "change",
    [{"host": "name.example"}, {"port": 0}, {"version": 2}, {"incarnation": b"x"}, {"streams": 0}, {"host": 5}],
)
def test_metadata_that_cannot_be_used(make, change):
    a, b = make("a"), make("b")
    metadata = msgspec.msgpack.decode(b.transport.metadata())
    with pytest.raises(TransportError):
        a.know(b, msgspec.msgpack.encode({**metadata, **change}))


@pytest.mark.parametrize(
    "options", [{"stream": 1}, {"streams": 0}, {"streams": "2"}, {"port": 70000}, {"secret": "text"}, {"insecure": 1}]
)
def test_options_that_cannot_be_used(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        TcpTransport(options)


@settings(deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header(data):
    try:
        frame = Frame.decode(data)
    except RemoteProtocolError:
        return
    assert Frame.decode(frame.encode()) == frame


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_structure(data):
    for decode in (decode_open, Hello.decode):
        try:
            decode(data)
        except RemoteProtocolError:
            continue


pieces = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 2**40))


@settings(deadline=None)
@given(st.text(max_size=128), st.integers(0, 2**63 - 1), st.sampled_from(Op), st.lists(pieces, max_size=20))
def test_open_comes_back_as_it_was(transfer, number, op, table):
    stamp = Stamp(transfer, number, number // 2)
    body = encode_open(9, op, stamp, Descriptors.of(table))[HEADER_BYTES:]
    got_op, got_stamp, got = decode_open(body)
    assert (got_op, got_stamp, got.pieces()) == (op, stamp, table)
    if table:
        damaged = bytearray(body)
        damaged[-8:] = np.array([-1], dtype="<i8").tobytes()
        with pytest.raises(RemoteProtocolError):
            decode_open(damaged)


def test_without_descriptors_it_waits_and_then_goes_on(make, pump, stranger):
    b = make("b", handshake_s=5)
    one = stranger(b)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        one.hello()
        b.poll_until_stalled()
        assert not b.transport._connections
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    assert one.answer(pump, HEADER_BYTES)
