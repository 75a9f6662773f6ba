"""A prefill/decode cluster of any size on this machine: engines and routers that start and stop together."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from attrs import define, field, frozen

from kvx import plugins
from kvx.address import parse_address
from kvx.cluster import Child, Cluster, ClusterError, free_ports
from kvx.core.errors import ConfigError, PluginError
from kvx.core.model import Mode, Role
from kvx.driver import EngineDriver, Launch, Server, SmallModel

START_S = 600.0
"""Longest start of all servers at once: three of vLLM took 220 s on two cores that others used as well."""
MAKE_S = 300.0
"""Longest time to write a small model."""
_WATCH_S = 0.5
_SAY_S = 10.0
_OWN = ("LISTEN", "ADVERTISE", "INSTANCE", "SECRET", "SECRET_FILE", "TRANSPORTS", "EVENT_LOG")
"""Options that differ between the instances of one machine, so that one variable cannot hold them."""

Say = Callable[[str], None]
"""Tells a person one line."""


@frozen
class Node:
    """A running engine server: its process, HOST:PORT of its control channel, and what a router is told of it."""

    child: Child
    control: str
    address: str = ""

    @property
    def url(self) -> str:
        return self.child.url


@define
class Site:
    """Where servers of one engine and one model are started; made by `site`."""

    cluster: Cluster
    name: str
    driver: EngineDriver
    model: str
    small: SmallModel
    arguments: tuple[str, ...]
    secret_file: Path
    say: Say
    _told: float = field(default=0.0, init=False)

    def engine(self, name: str, role: Role | None = None, *, instead_of: Node | None = None, **options: object) -> Node:
        """Start one instance, with kvx's `options` beside those that every instance needs.

        It takes the addresses of `instead_of`, which has ended, or new ones. `role` None is for
        engines whose servers have none.
        """
        meeting = None
        if instead_of is None:
            port, control_port, meeting_port = free_ports(3)
            control = f"127.0.0.1:{control_port}"
            meeting = meeting_port if role is Role.PRODUCER else None
        else:
            port, control = urlsplit(instead_of.url).port or 0, instead_of.control
            meeting = parse_address(instead_of.address)[1] if instead_of.address else None
        given = {"listen": control, "secret_file": str(self.secret_file), **options}
        server = Server(self.model, port, options=given, arguments=self.arguments, role=role, meeting_port=meeting)
        launch = self.driver.launch(server)
        return Node(self.cluster.start(name, launch, f"http://127.0.0.1:{port}"), control, launch.address)

    def single(self, name: str) -> Child:
        """Start one server without kvx, which serves requests alone."""
        (port,) = free_ports(1)
        launch = self.driver.launch(Server(self.model, port, arguments=self.arguments))
        return self.cluster.start(name, launch, f"http://127.0.0.1:{port}")

    def router(
        self, name: str, prefill: Sequence[Node], decode: Sequence[Node], mode: Mode | None, port: int | None = None
    ) -> Child:
        """Start a router in front of these; without `port` on any free one. It is ready when it knows all of them."""
        port = port or free_ports(1)[0]
        command = [sys.executable, "-m", "kvx", "router", "--port", str(port), "--engine", self.name]
        command += ["--mode", mode.value if mode else "auto"]
        for node in prefill:
            command += ["--prefill", f"{node.url}={node.address}" if node.address else node.url]
        for node in decode:
            command += ["--decode", node.url]
        ready = f"/health?prefill={len(prefill)}&decode={len(decode)}"
        launch = Launch(tuple(command), {"KVX_SECRET_FILE": str(self.secret_file)}, ready)
        return self.cluster.start(name, launch, f"http://127.0.0.1:{port}")

    def wait_ready(self, *children: Child) -> None:
        """Wait for them (default: for all), and say now and then for whom. Raises ClusterError."""
        self._told = 0.0
        started = time.monotonic()
        self.cluster.wait_ready(*children, timeout_s=START_S, progress=self._progress)
        self.say(f"ready after {time.monotonic() - started:.1f} s")

    def _progress(self, waiting: list[str], seconds: float) -> None:
        if waiting and seconds - self._told >= _SAY_S:
            self._told = seconds
            self.say(f"  {seconds:3.0f} s, still starting: {', '.join(waiting)}")


@contextmanager
def site(
    engine: str, model: str, arguments: Sequence[str], say: Say, mode: Mode | None = None
) -> Generator[Site, None, None]:
    """A place for servers, gone with all of them when the block ends. An empty `model` makes the engine's small one.

    `mode`: what requests will be served in, None: whatever the engine can. Raises PluginError or ConfigError
    where something has to be installed, unset or asked for differently, and ClusterError.
    """
    driver = plugins.load().driver(engine)
    if mode is not None and mode not in driver.modes:
        able = ", ".join(sorted(one.value for one in driver.modes))
        raise ConfigError(f"engine {engine!r} cannot {mode.value}, only {able}")
    _check(engine, driver)
    with tempfile.TemporaryDirectory(prefix="kvx-") as folder, Cluster() as cluster:
        secret_file = Path(folder) / "secret"
        secret_file.touch(0o600)
        secret_file.write_text(secrets.token_urlsafe(32))
        small = driver.small_model(str(Path(folder) / "model"))
        given = tuple(arguments)
        if not model:
            model, given = str(Path(folder) / "model"), (*small.arguments, *given)
            say("making a small random model")
            _make(small.make)
        yield Site(cluster, engine, driver, model, small, given, secret_file, say)


def run(
    engine: str,
    *,
    prefill: int,
    decode: int,
    mode: Mode | None,
    model: str = "",
    port: int | None = None,
    arguments: Sequence[str] = (),
    say: Say,
) -> None:
    """Keep a cluster until Ctrl-C. Raises as `site` does, and ClusterError when the router has died."""
    with site(engine, model, arguments, say, mode) as place:
        producers = [place.engine(f"prefill-{number}", Role.PRODUCER) for number in range(prefill)]
        consumers = [place.engine(f"decode-{number}", Role.CONSUMER) for number in range(decode)]
        router = place.router("router", producers, consumers, mode, port)
        say(f"starting {prefill} prefill and {decode} decode servers of {engine}, and a router")
        place.wait_ready()
        for node in (*producers, *consumers):
            say(f"  {node.child.name:<10} {node.url}  control {node.control}  pid {node.child.pid}")
        say(f"  router     {router.url}  mode {mode.value if mode else 'auto'}")
        say(_example(router.url, place.model, "Hello" if model else [3, 4, 5, 6, 7, 8, 9]))
        say("Ctrl-C stops all of it")
        try:
            _watch(place.cluster, router, say)
        except KeyboardInterrupt:
            say("stopping")


def _check(engine: str, driver: EngineDriver) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise PluginError("the router needs aiohttp: pip install 'kvx[router]', or in a checkout `make env`")
    if driver.installed() is None:
        raise PluginError(
            f"engine {engine!r} is not installed in this environment: in a checkout run `make env-{engine}` "
            f"and use .venvs/{engine}/bin/kvx"
        )
    for name in _OWN:
        if f"KVX_{name}" in os.environ:
            raise ConfigError(f"KVX_{name} is set, which would hold for every instance of a local cluster: unset it")


def _make(command: Sequence[str]) -> None:
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"the small model was not made in {MAKE_S:g} s") from error
    if made.returncode != 0:
        raise ClusterError(f"the small model could not be made: {made.stderr[-2000:]}")


def _example(url: str, model: str, prompt: object) -> str:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "stream": True})
    return f"\n  curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"


def _watch(cluster: Cluster, router: Child, say: Say) -> None:
    """An engine may die and the rest goes on; without a router there is nothing to keep."""
    told: set[str] = set()
    try:
        while router.running:
            _tell_ended(cluster, told, say)
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        _tell_ended(cluster, told, say)  # who died since the last look did not die of this Ctrl-C
        raise
    raise ClusterError(f"the router died; log {router.log} ends:\n{router.log_end()}")


def _tell_ended(cluster: Cluster, told: set[str], say: Say) -> None:
    for child in cluster.children:
        if not child.running and child.name not in told:
            told.add(child.name)
            say(f"{child.name} has ended with status {child.process.returncode}; its log: {child.log}")
