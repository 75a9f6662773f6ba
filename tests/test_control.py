"""The control channel over real sockets of this machine: what peers do, and what it costs whom."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from kvx import control
from kvx.cluster import free_ports
from kvx.core import wire
from kvx.core.events import PeerLost, PeerUp, Received
from kvx.core.messages import Ack, Envelope, Renew
from kvx_conformance.ends import Ends

HELLO = Envelope(1, 7, 0, Renew(("t-1",)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


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


def held_by_child(sock: socket.socket) -> socket.socket:
    """A second descriptor, as a fork leaves it, of the connection at whose other end `sock` is."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = socket.fromfd(int(number), socket.AF_INET, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):
                if copy.getpeername() == sock.getsockname():
                    return copy
            copy.close()
    raise AssertionError("nobody has accepted the connection")


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
    for _ in range(2):
        ends.until(lambda: select.select([near.fileno(), far.fileno()], [], [], 0)[0] == [])
        assert near.deadline() is None
        assert far.deadline() is None
        near.send(a, large(wire.MAX_FRAME))  # costs the link: now both have told of a loss
        ends.until(lambda: ends.of(near, PeerLost) and ends.of(far, PeerLost))


def test_a_closed_connection_that_a_child_still_holds_wakes_nobody(ends: Ends) -> None:
    far = ends.open()
    sock = ends.dial(far)
    ends.until(lambda: ends.of(far, PeerUp))
    with held_by_child(sock):
        far.disconnect(1, "test")
        sock.close()
        ends.until(lambda: far.deadline() is None)
        ends.until(lambda: select.select([far.fileno()], [], [], 0)[0] == [])


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
        while not ends.messages(far) or far.deadline() is None:
            ends.poll()
        assert len(ends.of(far, PeerUp)) == 1
        assert select.select([far.fileno()], [], [], 0)[0] == [], "it would spin until a file is closed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
    ends.clock.now += 1
    ends.until(lambda: len(ends.of(far, PeerUp)) == 2)


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


def test_closing_links_do_not_pile_up(ends: Ends) -> None:
    far = ends.open()
    for number in range(1, control.MAX_UNPROVEN + 7):
        ends.dial(far)
        ends.until(lambda number=number: len(ends.of(far, PeerUp)) == number)  # type: ignore[misc]
        far.proven(number)
    assert far.stats["dropped"] == 0
    for event in ends.of(far, PeerUp):
        far.disconnect(event.link, "test")
    assert far.stats["dropped"] == 6
    assert not ends.of(far, PeerLost)


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
    near, far = ends.open(), ends.open(f"127.0.0.1:{free_ports(1)[0]}")
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
