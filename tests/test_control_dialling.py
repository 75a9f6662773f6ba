"""The control channel over real sockets of this machine: how links are opened, and how that fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvx import sockets
from kvx.cluster import free_ports
from kvx.core.errors import ConfigError
from kvx.core.events import PeerLost, PeerUp
from kvx.core.messages import Envelope, Renew
from kvx.sockets import Place
from kvx_conformance.ends import Ends

HELLO = Envelope(1, 7, 0, Renew(("t-1",)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


# --------------------------------------------------------------------------------- dialling


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
    address = f"127.0.0.1:{free_ports(1)[0]}"
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
    assert sock.recv(1) == b""
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
    resolver(monkeypatch, lambda: [at(free_ports(1)[0]), at(int(far.address.rsplit(":", 1)[1]))])
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
    resolver(monkeypatch, lambda: [at(free_ports(1)[0]), at(free_ports(1)[0])])
    near.connect("somewhere:1")
    assert ends.lost(near).refused
    resolver(monkeypatch, lambda: [at(int(silent.rsplit(":", 1)[1])), at(free_ports(1)[0])])
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
        return [at(free_ports(1)[0])]

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
