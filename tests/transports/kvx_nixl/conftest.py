"""Ranks on NIXL in one process, each with an agent and a worker of its own; polled only when a test says so."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvx import plugins, report
from kvx.core.events import OpDone, OpFailed
from kvx.core.model import Descriptors, InstanceInfo, Layout, Op, Peer, Region, Stamp
from kvx.transport import Completion
from kvx_nixl.transport import NixlTransport

LIMIT_S = 30.0
CANARY = 4096
NAMES = ("nixl-ucx", "nixl-libfabric")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name != "test_pure.py":
            item.add_marker(pytest.mark.nixl)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def private_network() -> Iterator[ModuleType]:
    """A network namespace with loopback and one more device, for this process and its children."""
    here = _load("backends_here")
    try:
        back = here.enter_private_network()
    except OSError as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    yield here
    here.leave_private_network(back)


@pytest.fixture(scope="session")
def libraries(private_network: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What LIBFABRIC has to find."""
    found: list[Path] = private_network.libraries(tmp_path_factory.mktemp("nixl"))
    return found


@pytest.fixture(scope="session")
def sections(private_network: ModuleType, libraries: list[Path]) -> dict[str, dict[str, Any]]:
    """Each transport's section of the configuration."""
    ucx, libfabric = (private_network.OPTIONS[name] for name in NAMES)
    return dict(zip(NAMES, (ucx, {**libfabric, "preload": [str(path) for path in libraries]}), strict=True))


@pytest.fixture
def command(
    name: str, private_network: ModuleType, libraries: list[Path], request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """`command(evidence, *arguments)` runs kvx on this transport; its JSON, kept as evidence. It has to succeed."""
    folder = request.config.getoption("--evidence") or tmp_path
    path = os.pathsep.join(dict.fromkeys(str(library.parent) for library in libraries))

    def run(evidence: str, *arguments: str) -> dict[str, Any]:
        options = [
            word
            for key, value in private_network.OPTIONS[name].items()
            for word in ("--option", f"{key}={json.dumps(value)}")
        ]
        out = Path(folder) / f"{evidence}.json"
        words = [sys.executable, "-m", "kvx", *arguments, "--transport", name, *options, "--json", str(out)]
        # The loader finds the libraries, as on a host that has them: no path of this machine gets into a report.
        env = {**os.environ, "LD_LIBRARY_PATH": path}
        done = subprocess.run(words, capture_output=True, text=True, timeout=1500, env=env, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer

    return run


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """One test for each backend."""
    return str(request.param)


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`keep(file, case, **facts)` prints what a case has shown; with --evidence it stands in one file with others."""
    folder = request.config.getoption("--evidence")

    def keep(file: str, case: str, **facts: Any) -> None:
        print(case, facts)
        if not folder:
            return
        path = Path(folder) / f"{file}.json"
        known = json.loads(path.read_text())["cases"] if path.exists() else {}
        facts["date"] = dt.datetime.now(tz=dt.UTC).date().isoformat()
        fields = {"name": file, "nixl": importlib.metadata.version("nixl"), "cases": {**known, case: facts}}
        report.write(str(path), report.document("evidence", fields))

    return keep


class Rank:
    """A transport with one region, canaries on both sides of it, and what `poll` has told."""

    def __init__(self, transport: str, peer: str, nbytes: int, epoch: int, options: dict[str, Any]) -> None:
        self.peer = Peer(peer, 0)
        self.epoch = epoch
        self._whole = np.full(nbytes + 2 * CANARY, 0xA5, dtype=np.uint8)
        self.memory = self._whole[CANARY : CANARY + nbytes]
        self.memory[:] = 0
        made = plugins.make_transport(transport, {"peer": str(self.peer), **options})
        assert isinstance(made, NixlTransport)
        self.transport = made
        self.transport.register([Region(0, self.memory.ctypes.data, nbytes)])
        self.told: list[Completion] = []

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(self.peer.instance, 0, self.epoch, "127.0.0.1:1", Layout("m", "d", "v", (), 0))

    def know(self, other: Rank) -> None:
        self.transport.connect(other.info, other.transport.metadata())

    def post(self, op_id: int, to: Rank, op: Op, local: Descriptors, remote: Descriptors) -> None:
        self.transport.post(op_id, to.peer, op, local, remote, Stamp("t", to.epoch, 1))

    def poll(self) -> None:
        self.told += self.transport.poll()

    @property
    def ended(self) -> dict[int, OpDone | OpFailed]:
        ended = [one for one in self.told if isinstance(one, OpDone | OpFailed)]
        assert len({one.op_id for one in ended}) == len(ended), "an operation has ended twice"
        return {one.op_id: one for one in ended}

    def done(self, op_id: int) -> bool:
        ended = self.ended.get(op_id)
        assert not isinstance(ended, OpFailed), ended
        return ended is not None

    def failed(self, op_id: int) -> OpFailed:
        one = self.ended[op_id]
        assert isinstance(one, OpFailed), one
        return one

    @property
    def canaries(self) -> bool:
        edges = np.concatenate((self._whole[:CANARY], self._whole[-CANARY:]))
        return bool((edges == 0xA5).all())


def _pump(*ranks: Rank, until: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < end, f"not in time; told: {[rank.told for rank in ranks]}"
        select.select([rank.transport for rank in ranks], [], [], 0.1)
        for rank in ranks:
            rank.poll()


@pytest.fixture
def pump() -> Callable[..., None]:
    """Poll these ranks until a condition holds; bounded."""
    return _pump


@pytest.fixture
def make(name: str, sections: dict[str, dict[str, Any]]) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(peer: str, nbytes: int = 1 << 20, epoch: int = 1, **options: Any) -> Rank:
        ranks.append(Rank(name, peer, nbytes, epoch, {**sections[name], **options}))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.transport.close()
        assert rank.canaries, f"bytes around the memory of {rank.peer} were touched"


@pytest.fixture
def pair(make: Callable[..., Rank]) -> Callable[..., tuple[Rank, Rank]]:
    """An initiator and a target of one size that know each other."""

    def pair(nbytes: int = 1 << 20, **options: Any) -> tuple[Rank, Rank]:
        initiator, target = make("a", nbytes, **options), make("b", nbytes, **options)
        initiator.know(target)
        target.know(initiator)
        return initiator, target

    return pair
