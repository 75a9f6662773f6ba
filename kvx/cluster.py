"""Local servers for demos, benches and tests: started, watched, and stopped with all their children.

Each server leads a process group of its own, so that what it spawns ends with it. A warden, a
small process that waits at the other end of a pipe, ends the groups if this process dies
without a word; unlike PR_SET_PDEATHSIG it also reaches grandchildren, and does not fire when
merely the thread that started a server ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from attrs import define, field

from kvx.core.errors import KvxError
from kvx.driver import Launch

READY_S = 240.0
"""Default limit for a server to become ready: an engine's cold start on a loaded machine."""
TERM_S = 15.0
"""How long a group may take to end after SIGTERM before it gets SIGKILL."""
KILL_S = 5.0
_POLL_S = 0.05
_PORTS = range(10_000, 20_000)
"""Below those that the kernel gives by itself, to who listens on port 0 and to who dials: there a port that was free
is somebody else's a moment later."""
_TRIES = 10_000
_MOST_CLAIMS = 256
_claims: deque[int] = deque()
_LOG_TAIL = 4000

_WARDEN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    sign, group = line[0], int(line[1:])
    groups.add(group) if sign == "+" else groups.discard(group)
def send(number):
    for group in list(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            groups.discard(group)
send(signal.SIGTERM)
send(signal.SIGCONT)
end = time.monotonic() + float(sys.argv[1])
while groups and time.monotonic() < end:
    time.sleep(0.1)
    send(0)
send(signal.SIGKILL)
"""


class ClusterError(KvxError):
    """A server died, did not become ready, or could not be stopped; the text ends with the end of its log."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different TCP ports that nobody listens on right now.

    Whoever else asks this function, in whatever process, is given others, until this process ends or has been given
    many more. Raises ClusterError where so many are not free.
    """
    found: list[int] = []
    for _ in range(_TRIES):
        if len(found) == count:
            return found
        port = secrets.choice(_PORTS)
        if (claim := _claimed(port)) is None:
            continue
        if not _is_free(host, port):
            os.close(claim)
            continue
        found.append(port)
        _claims.append(claim)
        if len(_claims) > _MOST_CLAIMS:
            os.close(_claims.popleft())
    raise ClusterError(f"no {count} ports of {_PORTS.start} to {_PORTS.stop} are free")


def _claimed(port: int) -> int | None:
    """A descriptor that is this process's claim to a port; None: somebody has one. An abstract socket lives where
    ports do, in a network namespace, and ends with its process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        try:
            claim.bind(f"\0kvx-port-{port}")
        except OSError:
            return None
        return claim.detach()


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def group_members(group: int) -> list[int]:
    """Processes of a process group that still run; zombies are not counted."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if fields[0] not in "ZX" and int(fields[2]) == group:
            members.append(int(entry.name))
    return members


def wait_stopped(*pids: int) -> None:
    """Wait until no thread of these processes runs any more, after SIGSTOP; at most `KILL_S` seconds.

    The signal itself reaches one thread, and the others when that one gets a core.
    """
    until = time.monotonic() + KILL_S
    while not all(map(_stands_still, pids)) and time.monotonic() < until:
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    for stat in Path("/proc", str(pid), "task").glob("*/stat"):
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended while we looked
            continue
        if state not in "TtZX":
            return False
    return True


@define
class Child:
    """One server of a cluster: its HTTP address, its log, and the leader of its process group."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    ready_url: str = ""
    ready_s: float | None = None
    """Seconds from start to the first answer of `ready_url`; None until then."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def log_end(self) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_TAIL))
            return file.read().decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the server and everything it has spawned; SIGSTOP is in force when this returns."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGSTOP:
            wait_stopped(*group_members(self.pid))

    def is_ready(self) -> bool:
        """Whether its URL answers 200 at this moment."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.ready_url, timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class Cluster:
    """Local servers, as a context manager: nothing of them is left when the block ends.

    `logs` is the folder of their logs (default: a new one, which is kept and named on stderr).
    In the main thread SIGTERM ends the block like Ctrl-C, as SystemExit(143).
    """

    def __init__(self, logs: Path | None = None) -> None:
        self.logs = Path(tempfile.mkdtemp(prefix="kvx-cluster-")) if logs is None else logs
        self.logs.mkdir(parents=True, exist_ok=True)
        self.children: list[Child] = []
        self._warden: _Warden | None = None
        self._previous: Any = None

    def __enter__(self) -> Self:
        sys.stderr.write(f"kvx: logs are in {self.logs}\n")
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, _exit_on_term)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            if self._previous is not None:
                signal.signal(signal.SIGTERM, self._previous)
                self._previous = None

    def start(self, name: str, launch: Launch, url: str) -> Child:
        """Start a server without waiting for it. `url` is where it will serve HTTP, such as `http://127.0.0.1:8000`."""
        self._warden = self._warden or _Warden()
        log = self.logs / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: S603 - the caller's own command
                launch.command,
                env={**os.environ, **launch.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._warden.watch(process.pid)
        child = Child(name, url, log, process, url + launch.ready_path)
        self.children.append(child)
        return child

    def wait_ready(
        self, *children: Child, timeout_s: float = READY_S, progress: Callable[[list[str], float], None] | None = None
    ) -> None:
        """Wait until these children (default: all) answer their probe; a death of any child ends the wait.

        `progress` hears, some times a second, who is still waited for and since how many seconds.
        """
        started = time.monotonic()
        waiting = [child for child in children or self.children if child.ready_s is None]
        while waiting:
            self.check()
            for child in [child for child in waiting if child.is_ready()]:
                child.ready_s = time.monotonic() - started
                waiting.remove(child)
            if progress is not None:
                progress([child.name for child in waiting], time.monotonic() - started)
            if waiting and time.monotonic() - started > timeout_s:
                names = ", ".join(child.name for child in waiting)
                raise ClusterError(f"not ready after {timeout_s:g} s: {names}; {_story(waiting[0])}")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise ClusterError if a child has died."""
        for child in self.children:
            if not child.running:
                raise ClusterError(f"{child.name} died with exit status {child.process.returncode}; {_story(child)}")

    def stop(self, *children: Child, grace_s: float = TERM_S) -> None:
        """End these children (default: all) and their groups: SIGTERM, then SIGKILL after `grace_s` seconds.

        Raises ClusterError where a process outlives SIGKILL. Without arguments the warden ends too.
        """
        ending = list(children or self.children)
        for child in ending:
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a stopped group would keep SIGTERM pending
        left = _wait_for_groups(ending, grace_s)
        for child in left:
            child.signal(signal.SIGKILL)
        left = _wait_for_groups(left, KILL_S)
        for child in ending:
            self.children.remove(child)
            if self._warden is not None and child not in left:
                self._warden.forget(child.pid)
        if not children and self._warden is not None:
            self._warden.end()
            self._warden = None
        if left:
            raise ClusterError(f"still running after SIGKILL: {', '.join(child.name for child in left)}")


class _Warden:
    """The process that ends the groups it watches when our end of its pipe closes."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._orders = os.fdopen(writer, "w")
        try:
            # In a session of its own: a terminal's Ctrl-C must not reach it before the servers are gone.
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                (sys.executable, "-I", "-S", "-c", _WARDEN, str(TERM_S)),
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(reader)

    def watch(self, group: int) -> None:
        self._order(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._order(f"-{group}\n")

    def end(self) -> None:
        self._orders.close()
        self._process.wait(TERM_S + 2 * KILL_S)

    def _order(self, line: str) -> None:
        self._orders.write(line)
        self._orders.flush()


def _story(child: Child) -> str:
    return f"log {child.log} ends:\n{child.log_end()}"


def _wait_for_groups(children: Sequence[Child], limit_s: float) -> list[Child]:
    """The children whose groups still have members after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    left = list(children)
    while left:
        for child in left:
            child.process.poll()
        left = [child for child in left if child.running or group_members(child.pid)]
        if time.monotonic() > end:
            break
        if left:
            time.sleep(_POLL_S)
    return left


def _exit_on_term(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
