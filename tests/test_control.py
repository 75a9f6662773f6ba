"""The control channel over real sockets of this machine: what peers do and what it costs whom."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from kvx import control, sockets
from kvx.control import ControlChannel, ControlEvent
from kvx.core import wire
from kvx.core.errors import ConfigError
from kvx.core.events import PeerLost, PeerUp, Received
from kvx.core.messages import Ack, Envelope, Message, Renew
from kvx.sockets import Place

T = TypeVar("T", PeerUp, PeerLost, Received)
HELLO = Envelope(1, 7, 0, Renew(("t-1",)))


class Clock:
    """Time that stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ends:
    """Channels of this process that are polled together until something has happened."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.channels: list[ControlChannel] = []
        self.seen: dict[ControlChannel, list[ControlEvent]] = {}
        self.raw: list[socket.socket] = []

    def open(self, listen: str = "127.0.0.1:0", *, loopback_only: bool = False) -> ControlChannel:
        channel = ControlChannel(listen, handshake_s=10, clock=self.clock, loopback_only=loopback_only)
        self.channels.append(channel)
        self.seen[channel] = []
        return channel

    def dial(self, channel: ControlChannel) -> socket.socket:
        """A plain socket, connected to a channel."""
        host, port = channel.address.rsplit(":", 1)
        self.raw.append(socket.create_connection((host.strip("[]"), int(port)), timeout=20))
        return self.raw[-1]

    def until(self, ready: Callable[[], object]) -> None:
        """Poll as the runtime does, waking only when a channel's descriptor says so."""
        limit = time.monotonic() + 20
        with select.epoll() as waiter:
            for channel in self.channels:
                waiter.register(channel.fileno(), select.EPOLLIN)
            while not ready():
                assert time.monotonic() < limit, self.seen
                waiter.poll(0.05)
                self.poll()

    def poll(self) -> None:
        for channel in self.channels:
            self.seen[channel] += channel.poll()

    def of(self, channel: ControlChannel, kind: type[T]) -> list[T]:
        return [event for event in self.seen[channel] if isinstance(event, kind)]

    def lost(self, channel: ControlChannel) -> PeerLost:
        self.until(lambda: self.of(channel, PeerLost))
        return self.of(channel, PeerLost)[0]

    def link(self, near: ControlChannel, far: ControlChannel) -> tuple[int, int]:
        """Both numbers of a new, proven link."""
        known = len(self.of(near, PeerUp)), len(self.of(far, PeerUp))
        near.connect(far.address)
        self.until(lambda: len(self.of(near, PeerUp)) > known[0] and len(self.of(far, PeerUp)) > known[1])
        numbers = self.of(near, PeerUp)[-1].link, self.of(far, PeerUp)[-1].link
        near.proven(numbers[0])
        far.proven(numbers[1])
        return numbers

    def messages(self, channel: ControlChannel) -> list[Message]:
        return [event.envelope.message for event in self.of(channel, Received)]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for channel in made.channels:
        channel.close()
    for sock in made.raw:
        sock.close()


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def large(size: int) -> Envelope:
    """An envelope of more than `size` bytes."""
    return Envelope(1, 7, 0, Ack("t", True, body="x" * size))


def closed_by_peer(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


# ------------------------------------------------------------------------- carrying envelopes


def test_envelopes_arrive_in_order_both_ways(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    a, b = ends.link(near, far)
    assert ends.of(near, PeerUp) == [PeerUp(a, far.address)]
    assert ends.of(far, PeerUp) == [PeerUp(b, None)]
    for number in range(300):
        near.send(a, Envelope(1, number, 0, Renew()))
        far.send(b, Envelope(1, number, 0, Renew()))
    ends.until(lambda: len(ends.of(near, Received)) == len(ends.of(far, Received)) == 300)
    assert ends.of(near, Received) == [Received(a, Envelope(1, number, 0, Renew())) for number in range(300)]
    assert ends.of(far, Received) == [Received(b, Envelope(1, number, 0, Renew())) for number in range(300)]
    assert near.stats == {
        "accepted": 0, "dialled": 1, "frames_in": 300, "frames_out": 300, "bad_frames": 0, "dropped": 0,
    }  # fmt: skip


def test_link_numbers_are_never_used_again(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    first = ends.link(near, far)
    near.disconnect(first[0], "test")
    ends.lost(far)
    second = ends.link(near, far)
    assert second[0] > first[0]
    assert second[1] > first[1]


def test_a_frame_of_megabytes_arrives_while_small_ones_pass(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    wide, _ = ends.link(near, far)
    narrow, other = ends.link(near, far)
    near.send(wide, large(1 << 20))
    near.send(narrow, HELLO)
    ends.until(lambda: len(ends.of(far, Received)) == 2)
    assert Received(other, HELLO) in ends.seen[far]
    assert large(1 << 20).message in ends.messages(far)


def test_a_frame_that_arrives_byte_by_byte_is_whole(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    for byte in framed(wire.encode(HELLO)):
        assert not ends.messages(far)
        sock.sendall(bytes([byte]))
        ends.poll()
    ends.until(lambda: ends.messages(far) == [HELLO.message])


def test_a_burst_is_taken_in_bounded_steps_and_in_order(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    sock.sendall(b"".join(framed(wire.encode(Envelope(1, number, 0, Renew()))) for number in range(1000)))
    sizes: list[int] = []
    while sum(sizes) < 1000:
        assert select.select([far.fileno()], [], [], 20)[0], "the rest of the burst wakes nobody"
        sizes.append(len(events := far.poll()))
        ends.seen[far] += events
    assert max(sizes) <= 64
    assert [event.envelope.from_epoch for event in ends.of(far, Received)] == list(range(1000))


def test_many_bursts_at_once_share_one_poll(ends: Ends) -> None:
    far = ends.open()
    burst = framed(wire.encode(HELLO)) * 200
    for _ in range(20):
        ends.dial(far).sendall(burst)
    ends.until(lambda: len(ends.of(far, PeerUp)) == 20)
    most = 0
    while len(ends.of(far, Received)) < 4000:
        assert select.select([far.fileno()], [], [], 20)[0]
        events = far.poll()
        most = max(most, len(events))
        ends.seen[far] += events
    assert most <= 600


def test_an_idle_channel_sleeps(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    a, _ = ends.link(near, far)
    near.send(a, HELLO)
    ends.until(lambda: ends.messages(far))
    ends.poll()
    assert select.select([near.fileno(), far.fileno()], [], [], 0)[0] == []
    assert near.deadline() is None
    assert far.deadline() is None


# ------------------------------------------------------------------------------- bad peers


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        framed(b""),
        framed(b"\xc1"),
        framed(b"\x95\x02\x03\x00\x00\x80"),
        framed(wire.encode(HELLO)) + framed(b"\x00"),
    ],
    ids=["http", "4 GiB", "empty", "no msgpack", "version 2", "second frame"],
)
def test_bad_bytes_close_that_link_only(ends: Ends, bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    near, far = ends.open(), ends.open()
    a, _ = ends.link(near, far)
    sock = ends.dial(far)
    sock.sendall(bad)
    assert ends.lost(far).detail.startswith("bad bytes: ")
    assert closed_by_peer(sock)
    assert far.stats["bad_frames"] == 1
    host, port = sock.getsockname()
    assert f"bad bytes from {host}:{port}" in caplog.text
    near.send(a, HELLO)
    ends.until(lambda: HELLO.message in ends.messages(far)[-1:])


def test_half_a_frame_then_close(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    sock.sendall(framed(wire.encode(HELLO))[:-3])
    sock.close()
    assert ends.lost(far).detail == "closed by the peer inside a frame"
    assert ends.messages(far) == []


def test_frames_before_the_end_are_delivered_before_it(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    sock.sendall(framed(wire.encode(HELLO)) * 150)
    sock.close()
    lost = ends.lost(far)
    assert lost.detail == "closed by the peer"
    assert ends.seen[far][1:] == [Received(lost.link, HELLO)] * 150 + [lost]


def test_a_reset_is_a_lost_peer(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert "reset" in ends.lost(far).detail


def test_a_large_frame_needs_a_proof(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    sock.sendall(framed(wire.encode(large(200 << 10))))
    ends.until(lambda: ends.messages(far))
    sock.sendall(struct.pack(">I", wire.MAX_FRAME_UNPROVEN + 1))
    assert f"frame of {wire.MAX_FRAME_UNPROVEN + 1} bytes" in ends.lost(far).detail


def test_a_proven_peer_has_a_limit_too(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    far.proven(ends.of(far, PeerUp)[0].link)
    sock.sendall(framed(wire.encode(large(wire.MAX_FRAME_UNPROVEN))))
    ends.until(lambda: ends.messages(far))
    sock.sendall(struct.pack(">I", wire.MAX_FRAME + 1))
    assert f"frame of {wire.MAX_FRAME + 1} bytes" in ends.lost(far).detail


@pytest.mark.parametrize("proven", [True, False])
def test_a_large_frame_right_behind_the_proof(ends: Ends, proven: bool) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    sock.sendall(framed(wire.encode(HELLO)) + struct.pack(">I", len(wire.encode(large(1 << 20)))))
    ends.until(lambda: ends.messages(far))
    assert not ends.of(far, PeerLost)
    if proven:
        far.proven(ends.of(far, PeerUp)[0].link)
        sock.sendall(wire.encode(large(1 << 20)))
        ends.until(lambda: len(ends.messages(far)) == 2)
    else:
        assert "frame of" in ends.lost(far).detail


def test_a_peer_that_never_reads_loses_its_link_only(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_OUTBOX", 4 << 20)
    near, far = ends.open(), ends.open()
    ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    deaf = ends.of(far, PeerUp)[0].link
    good, other = ends.link(near, far)
    sent = 0
    while not ends.of(far, PeerLost):
        assert sent < 64, "nothing bounds the outbox"
        far.send(deaf, large(1 << 20))
        far.send(other, Envelope(1, sent, 0, Renew()))
        sent += 1
        ends.poll()
    assert ends.lost(far).link == deaf
    assert "does not read" in ends.lost(far).detail
    ends.until(lambda: len(ends.of(near, Received)) == sent)
    assert far.stats["dropped"] == 1
    assert not ends.of(near, PeerLost)
    assert good


def test_200_idle_connections_keep_nobody_out(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    before, _ = ends.link(near, far)
    for _ in range(200):
        ends.dial(far)
        ends.poll()
    after, _ = ends.link(near, far)
    near.send(before, HELLO)
    near.send(after, HELLO)
    ends.until(lambda: ends.messages(far) == [HELLO.message] * 2)
    idle = [event.link for event in ends.of(far, PeerUp)][1:-1]
    dropped = [event.link for event in ends.of(far, PeerLost)]
    assert len(idle) == 200
    assert dropped == idle[: len(dropped)], "the oldest go first"
    assert len(idle) - len(dropped) <= control.MAX_UNPROVEN
    assert far.stats["dropped"] == len(dropped)
    assert not ends.of(near, PeerLost)


def test_a_full_table_of_files_delays_accepting_only(ends: Ends) -> None:
    far = ends.open()
    host, port = far.address.split(":")
    early = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    late = socket.socket()
    ends.raw.append(late)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, limits[1]))
    fillers = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        late.connect((host, int(port)))
        early.sendall(framed(wire.encode(HELLO)))
        while not ends.messages(far):
            ends.poll()
        assert len(ends.of(far, PeerUp)) == 1
        assert far.deadline() is not None
        assert select.select([far.fileno()], [], [], 0)[0] == [], "it would spin until a file is closed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
    ends.clock.now += 1
    ends.until(lambda: len(ends.of(far, PeerUp)) == 2)


# --------------------------------------------------------------------------------- dialling


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that answers no connection: the queue of its listener is full."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_nobody_listens_there(ends: Ends) -> None:
    near = ends.open()
    address = f"127.0.0.1:{free_port()}"
    near.connect(address)
    assert ends.lost(near) == PeerLost(1, address, True, "cannot connect: Connection refused")


def test_no_answer_ends_in_bounded_time(ends: Ends, silent: str) -> None:
    near = ends.open()
    near.connect(silent)
    ends.poll()
    assert near.deadline() == ends.clock.now + 10
    ends.clock.now += 9.9
    ends.poll()
    assert ends.seen[near] == []
    ends.clock.now += 0.1
    ends.poll()
    assert ends.seen[near] == [PeerLost(1, silent, False, "cannot connect: no answer in time")]
    assert near.deadline() is None


def test_who_dials_and_proves_nothing_is_dropped(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    ends.link(near, far)
    sock = ends.dial(far)
    ends.until(lambda: len(ends.of(far, PeerUp)) == 2)
    assert far.deadline() == ends.clock.now + 10
    ends.clock.now += 10
    ends.poll()
    assert ends.of(far, PeerLost) == [PeerLost(2, None, False, "no proof of who it is in 10 s")]
    assert closed_by_peer(sock)
    assert far.deadline() is None


def test_who_accepts_and_proves_nothing_is_dropped(ends: Ends) -> None:
    near = ends.open()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        near.connect(address)
        ends.until(lambda: ends.of(near, PeerUp))
        ends.clock.now += 10
        ends.poll()
    assert ends.of(near, PeerLost) == [PeerLost(1, address, False, "no proof of who it is in 10 s")]


@pytest.mark.parametrize("address", ["nonsense", "::1:5700", "a b:1", "h:99999"])
def test_a_bad_address_is_a_lost_peer(ends: Ends, address: str) -> None:
    near = ends.open()
    near.connect(address)
    lost = ends.lost(near)
    assert (lost.address, lost.refused) == (address, False)
    assert address in lost.detail


def test_ipv6(ends: Ends) -> None:
    try:
        far = ends.open("[::1]:0")
    except ConfigError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    near = ends.open()
    assert far.address.startswith("[::1]:")
    a, _ = ends.link(near, far)
    near.send(a, HELLO)
    ends.until(lambda: ends.messages(far) == [HELLO.message])


def test_a_host_name_is_looked_up(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    address = "localhost:" + far.address.rsplit(":", 1)[1]
    near.connect(address)
    ends.until(lambda: ends.of(near, PeerUp) and ends.of(far, PeerUp))
    assert ends.of(near, PeerUp)[0].address == address


def at(port: int) -> Place:
    return socket.AF_INET, ("127.0.0.1", port)


def resolver(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], list[Place]]) -> None:
    """Host names lead where `answer` says; numeric addresses stay what they are."""
    real = sockets.find

    def find(host: str, port: int, *, numeric: bool = False) -> list[Place]:
        return real(host, port, numeric=True) if numeric or host[0].isdigit() else answer()

    monkeypatch.setattr(sockets, "find", find)


def test_each_address_of_a_host_is_tried(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends.open(), ends.open()
    resolver(monkeypatch, lambda: [at(free_port()), at(int(far.address.rsplit(":", 1)[1]))])
    near.connect("somewhere:1")
    ends.until(lambda: ends.of(near, PeerUp))
    assert ends.seen[near] == [PeerUp(1, "somewhere:1")]


def test_a_silent_address_leaves_time_for_the_next(ends: Ends, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends.open(), ends.open()
    resolver(monkeypatch, lambda: [at(int(a.rsplit(":", 1)[1])) for a in (silent, far.address)])
    near.connect("somewhere:1")
    ends.until(lambda: near.deadline() == ends.clock.now + 5)
    ends.clock.now += 5
    ends.until(lambda: ends.of(near, PeerUp))
    assert not ends.of(near, PeerLost)


def test_refused_means_that_every_address_refused(ends: Ends, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near = ends.open()
    resolver(monkeypatch, lambda: [at(free_port()), at(free_port())])
    near.connect("somewhere:1")
    assert ends.lost(near).refused
    resolver(monkeypatch, lambda: [at(int(silent.rsplit(":", 1)[1])), at(free_port())])
    near.connect("elsewhere:1")
    ends.until(lambda: near.deadline() == ends.clock.now + 5)
    ends.clock.now += 5
    ends.until(lambda: len(ends.of(near, PeerLost)) == 2)
    assert not ends.of(near, PeerLost)[1].refused


def test_an_unknown_host_is_a_lost_peer(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> list[Place]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolver(monkeypatch, unknown)
    near = ends.open()
    near.connect("nowhere:1")
    lost = ends.lost(near)
    assert "cannot find the host" in lost.detail
    assert not lost.refused


def test_slow_lookups_hold_nobody_up_and_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow() -> list[Place]:
        release.wait(20)
        return [at(free_port())]

    resolver(monkeypatch, slow)
    near, far = ends.open(), ends.open()
    for _ in range(sockets.MAX_LOOKUPS + 1):
        near.connect("slow:1")
    assert ends.lost(near) == PeerLost(
        sockets.MAX_LOOKUPS + 1, "slow:1", False, "too many host names are being looked up"
    )
    ends.link(near, far)
    ends.clock.now += 10
    ends.until(lambda: len(ends.of(near, PeerLost)) == 1 + sockets.MAX_LOOKUPS)
    assert {event.detail for event in ends.of(near, PeerLost)[1:]} == {"cannot connect: no answer in time"}
    release.set()

    def refused() -> bool:
        near.connect("slow:2")  # too many until the late answers are taken
        return any(event.refused for event in ends.of(near, PeerLost))

    ends.until(refused)
    assert {event.address for event in ends.of(near, PeerLost)[1 + sockets.MAX_LOOKUPS :]} == {"slow:2"}


def test_without_a_secret_only_loopback_is_reached(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends.open(loopback_only=True), ends.open(loopback_only=True)
    ends.link(near, far)
    near.connect("192.0.2.1:5700")
    lost = ends.lost(near)
    assert "192.0.2.1 is not loopback" in lost.detail
    assert not lost.refused
    resolver(monkeypatch, lambda: [(socket.AF_INET, ("192.0.2.1", 1))])
    near.connect("disguised:1")
    ends.until(lambda: len(ends.of(near, PeerLost)) == 2)
    assert "192.0.2.1 is not loopback" in ends.of(near, PeerLost)[1].detail


# -------------------------------------------------------------------------------- listening


def test_a_port_in_use_is_named(ends: Ends) -> None:
    first = ends.open()
    with pytest.raises(ConfigError, match=rf"cannot listen on {first.address}: the port is in use; stop"):
        ends.open(first.address)


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("5700", "HOST:PORT"),
        ("192.0.2.1:0", "no such address"),
    ],
)
def test_an_address_that_cannot_be_listened_on(ends: Ends, listen: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ends.open(listen)


def test_a_host_that_does_not_exist_cannot_be_listened_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> list[Place]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolver(monkeypatch, unknown)
    with pytest.raises(ConfigError, match="there is no host 'nowhere'"):
        ends.open("nowhere:0")


def test_listening_beyond_loopback_needs_a_secret(ends: Ends) -> None:
    with pytest.raises(ConfigError, match="set a secret"):
        ends.open("0.0.0.0:0", loopback_only=True)
    assert ends.open("0.0.0.0:0").address.startswith("0.0.0.0:")


# ---------------------------------------------------------------------------------- closing


def test_disconnect_delivers_what_was_queued(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    sock.sendall(bytes(200_000))  # never taken: a close at once would reset the connection
    far.send(1, large(1 << 20))
    far.disconnect(1, "refused")
    far.send(1, HELLO)
    got = bytearray()
    reader = threading.Thread(target=lambda: got.extend(b"".join(iter(lambda: sock.recv(1 << 16), b""))))
    reader.start()
    ends.until(lambda: not reader.is_alive())
    assert bytes(got) == framed(wire.encode(large(1 << 20)))
    assert ends.seen[far] == [PeerUp(1, None)]
    sock.close()
    ends.until(lambda: far.deadline() is None)
    assert ends.seen[far] == [PeerUp(1, None)]


def test_a_closed_link_does_not_linger(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    far.disconnect(1, "refused")
    assert far.deadline() == ends.clock.now + 1
    assert closed_by_peer(sock)
    ends.clock.now += 1
    ends.poll()
    assert far.deadline() is None
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 - the first answer is a reset
        for _ in range(2):
            sock.sendall(b"x")
            select.select([sock], [], [], 20)
    assert ends.seen[far] == [PeerUp(1, None)]


def test_disconnect_takes_back_what_was_not_told_yet(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    a, _ = ends.link(near, far)
    seen = len(ends.seen[near])
    near.send(a, Envelope(1, 7, 0, Ack("t", True, body="\ud800")))
    near.disconnect(a, "test")
    ends.poll()
    assert len(ends.seen[near]) == seen


def test_an_envelope_that_cannot_be_sent_costs_the_link(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    a, _ = ends.link(near, far)
    near.send(a, large(wire.MAX_FRAME))
    assert "cannot send Ack: " in ends.lost(near).detail
    assert ends.lost(far).detail == "closed by the peer"


def test_after_close_nothing_happens_and_the_port_is_free(ends: Ends) -> None:
    near, far = ends.open(), ends.open()
    a, b = ends.link(near, far)
    far.send(b, HELLO)
    address = far.address
    far.close()
    far.close()
    far.send(b, HELLO)
    far.connect(near.address)
    far.disconnect(b, "test")
    assert far.poll() == []
    ends.channels.remove(far)
    ends.lost(near)
    assert ends.messages(near) == [HELLO.message]
    near.disconnect(a, "test")
    assert ends.open(address).address == address
