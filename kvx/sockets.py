"""What the control channel needs of the system: listening, host names without waiting, a bell."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
from collections import deque

from kvx.address import parse_address
from kvx.core.errors import ConfigError

MAX_LOOKUPS = 16
"""Host names that are looked up at one time."""

Place = tuple[int, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]
"""Address family and socket address."""


class Bell:
    """An eventfd that wakes whoever waits for it; may be rung from any thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._open = True

    def ring(self) -> None:
        with self._lock:  # a lookup may end after close, when the number belongs to another file
            if self._open:
                os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


class Lookups:
    """Host names on short-lived daemon threads, of which at most MAX_LOOKUPS run at one time.

    The resolver of the C library has time limits of its own, but none that a caller could set.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._running = 0
        self._found: deque[tuple[int, list[Place] | Exception]] = deque()

    def start(self, number: int, host: str, port: int) -> bool:
        """Begin a lookup; its answer comes from `take` under this number. False: too many already."""
        if self._running >= MAX_LOOKUPS:
            return False

        def look_up() -> None:
            try:
                self._found.append((number, find(host, port)))
            except (OSError, UnicodeError) as error:
                self._found.append((number, error))
            self._bell.ring()

        try:
            threading.Thread(target=look_up, name=f"kvx-lookup-{host}", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            return False
        self._running += 1
        return True

    def take(self) -> list[tuple[int, list[Place] | Exception]]:
        """The answers that have arrived, each once."""
        found = [self._found.popleft() for _ in range(len(self._found))]
        self._running -= len(found)
        return found


def find(host: str, port: int, *, numeric: bool = False) -> list[Place]:
    """Where a host can be reached. Blocks for as long as the resolver takes, except with `numeric`.

    Raises OSError or UnicodeError where there is no such host or, with `numeric`, where it is a name.
    """
    flags = socket.AI_NUMERICHOST if numeric else 0
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, place) for family, _, _, _, place in found))


def is_loopback(place: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    return ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback


def listen_on(listen: str, *, loopback_only: bool) -> socket.socket:
    """A non-blocking listener on HOST:PORT. Raises ConfigError that says what to change."""
    host, port = parse_address(listen)
    try:
        family, place = find(host, port)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {listen}: there is no host {host!r} ({error})") from error
    if loopback_only and not is_loopback(place):
        raise ConfigError(f"cannot listen on {listen}: without a secret only loopback is allowed; set a secret")
    try:
        return _listener(family, place)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen}: {_advice(error)}") from error


def try_to_listen(listen: str) -> None:
    """Bind HOST:PORT for a moment. Raises OSError where it cannot be listened on, ConfigError for no address."""
    host, port = parse_address(listen)
    family, place = find(host, port)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)


def _listener(family: int, place: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(256)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "the port is in use; stop the process that holds it or choose another port in option listen"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address; choose one of its own in option listen"
        case errno.EACCES:
            return "this user may not use the port; choose one above 1023 in option listen"
        case _:
            return str(error)
