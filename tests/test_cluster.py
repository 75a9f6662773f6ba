from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvx.cluster
from kvx.cluster import Child, Cluster, ClusterError, free_ports, group_members
from kvx.driver import Launch

SERVER = """
import http.server, subprocess, sys, signal
port, child, stubborn = int(sys.argv[1]), sys.argv[2] == "child", sys.argv[3] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child:
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(port: int, *, child: bool = False, stubborn: bool = False) -> Launch:
    marks = ("child" if child else "-", "stubborn" if stubborn else "-")
    return Launch((sys.executable, "-c", SERVER, str(port), *marks), {}, "/health")


def until(condition: object, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def test_a_server_is_ready_when_it_answers_and_gone_with_its_children(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    with Cluster(tmp_path) as cluster:
        one = cluster.start("one", server(port, child=True), f"http://127.0.0.1:{port}")
        cluster.wait_ready()
        assert one.ready_s is not None
        assert until(lambda: len(group_members(one.pid)) == 2)
        group = one.pid
        cluster.stop(one, grace_s=0.5)  # the grandchild ignores SIGTERM
        assert group_members(group) == []
        assert cluster.children == []


def test_a_server_that_ignores_sigterm_is_killed_in_bounded_time(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    with Cluster(tmp_path) as cluster:
        one = cluster.start("one", server(port, stubborn=True), f"http://127.0.0.1:{port}")
        cluster.wait_ready()
        cluster.stop(one, grace_s=0.2)
    assert one.process.returncode == -signal.SIGKILL


def test_a_stopped_server_can_be_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Cluster(tmp_path) as cluster:
        one = cluster.start("one", server(port), f"http://127.0.0.1:{port}")
        cluster.wait_ready()
        one.signal(signal.SIGSTOP)
    assert one.process.returncode == -signal.SIGTERM


BUSY = """
import hashlib, sys, threading
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"p", b"s", 100)  # without the interpreter's lock
for _ in range(16):
    threading.Thread(target=work).start()
print("ready", flush=True)
"""


def nanoseconds_on_a_core(pid: int) -> int:
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def states(pid: int) -> list[str]:
    return [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]


def test_no_thread_of_a_stopped_server_runs_on(tmp_path: Path) -> None:
    process = subprocess.Popen((sys.executable, "-c", BUSY), stdout=subprocess.PIPE, process_group=0)
    child = Child("busy", "", tmp_path / "log", process)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(20):
            child.signal(signal.SIGSTOP)
            assert set(states(process.pid)) == {"T"}
            before = nanoseconds_on_a_core(process.pid)
            child.signal(signal.SIGCONT)
            assert until(lambda before=before: nanoseconds_on_a_core(process.pid) > before)  # type: ignore[misc]
    finally:
        child.signal(signal.SIGKILL)
        process.communicate(timeout=20)


def test_a_dead_child_ends_the_wait_and_its_log_is_shown(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        launch = Launch(
            (sys.executable, "-c", "print('port 7 is taken'); raise SystemExit(2)"),
            {},
            "/health",
        )
        cluster.start("bad", launch, "http://127.0.0.1:1")
        with pytest.raises(ClusterError, match=r"(?s)bad died with exit status 2.*port 7 is taken"):
            cluster.wait_ready(timeout_s=60)


def test_a_silent_child_ends_the_wait_at_its_limit(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Cluster(tmp_path) as cluster:
        launch = Launch((sys.executable, "-c", "import time; time.sleep(600)"), {}, "/health")
        cluster.start("mute", launch, f"http://127.0.0.1:{port}")
        with pytest.raises(ClusterError, match=r"not ready after 0\.3 s: mute"):
            cluster.wait_ready(timeout_s=0.3)


def test_environment_is_added_to_ours(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        code = "import os; print(os.environ['KVX_TEST'], 'PATH' in os.environ)"
        one = cluster.start(
            "one",
            Launch((sys.executable, "-c", code), {"KVX_TEST": "42"}, "/"),
            "http://127.0.0.1:1",
        )
        one.process.wait(20)
        assert one.log_end() == "42 True\n"


RANGE = range(9_000, 9_500)
TAKES = f"""
from kvx import cluster
cluster._PORTS = {RANGE}
print(*cluster.free_ports(80))
"""


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[int]]:
    """Only of this test."""
    own: deque[int] = deque()
    monkeypatch.setattr(kvx.cluster, "_claims", own)
    yield own
    for claim in own:
        os.close(claim)


def test_ports_differ_and_the_kernel_gives_none_of_them_to_others(claims: deque[int]) -> None:
    given = {port for _ in range(20) for port in free_ports(2)}
    assert len(given) == len(claims) == 40
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(given) < max(lowest, 20_000)


@pytest.mark.usefixtures("claims")
def test_no_other_process_is_given_the_same_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvx.cluster, "_PORTS", RANGE)
    ours = set(free_ports(80))
    done = subprocess.run((sys.executable, "-c", TAKES), capture_output=True, text=True, timeout=50, check=True)
    theirs = set(map(int, done.stdout.split()))
    assert len(ours) == len(theirs) == 80
    assert not ours & theirs


@pytest.mark.usefixtures("claims")
def test_a_port_that_somebody_holds_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr(kvx.cluster, "_PORTS", range(port, port + 1))
        with pytest.raises(ClusterError, match=f"no 1 ports of {port} to {port + 1} are free"):
            free_ports(1)
    assert free_ports(1) == [port]  # the claim to what was not free is given up


def test_old_claims_are_given_up(claims: deque[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvx.cluster, "_MOST_CLAIMS", 3)
    free_ports(10)
    assert len(claims) == 3


HOST = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from kvx.cluster import Cluster
    from kvx.driver import Launch
    with Cluster(Path(sys.argv[1])) as cluster:
        child = cluster.start("one", Launch((sys.executable, "-c", "import time; time.sleep(600)"), {}, "/"), "http://h")
        print(child.pid, flush=True)
        time.sleep(600)
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_host_ends(tmp_path: Path, number: signal.Signals) -> None:
    host = subprocess.Popen(
        (sys.executable, "-c", HOST, str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert host.stdout is not None
    group = int(host.stdout.readline())
    assert group_members(group) == [group]
    host.send_signal(number)
    host.communicate(timeout=30)
    assert until(lambda: group_members(group) == [])
    assert host.returncode == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -9}[number]


def test_sigterm_handler_is_put_back_and_threads_do_without(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Cluster(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with Cluster(tmp_path):
                pass
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(20)
    assert failures == []


def test_group_members_leaves_out_zombies() -> None:
    process = subprocess.Popen((sys.executable, "-c", ""), process_group=0)
    try:
        assert until(lambda: group_members(process.pid) == [])
        os.kill(process.pid, 0)  # it is still there, unreaped
    finally:
        process.wait(20)
