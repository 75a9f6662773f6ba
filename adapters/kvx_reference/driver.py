"""The reference engine as a process; imports nothing of it."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Sequence
from importlib import util
from typing import TYPE_CHECKING

from kvx import __version__
from kvx.config import Options
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.driver import Dialect, Launch, Server, SmallModel

if TYPE_CHECKING:
    from kvx.bench.cache import Cache
    from kvx.bench.callbacks import Steps

_MODULE = "kvx_reference.engine"
_CONNECTOR = "kvx_reference.adapter:open_connector"
_ENV = {"PYTHONUNBUFFERED": "1"}


class ReferenceDriver:
    """Starts the engine's own HTTP server. Its version is kvx's."""

    @property
    def dialect(self) -> Dialect:
        return CompletionsDialect()

    @property
    def tested(self) -> str:
        return __version__

    @property
    def modes(self) -> frozenset[Mode]:
        return frozenset(Mode)

    @property
    def has_roles(self) -> bool:
        return False

    def installed(self) -> str | None:
        """None where the packages of the extra `reference` are missing."""
        return None if util.find_spec("aiohttp") is None else __version__

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError where kvx's options cannot work, before a process is started."""
        command = [sys.executable, "-m", _MODULE, "--model", server.model, "--host", server.host]
        command += ["--port", str(server.port)]
        if server.options is not None:
            Options.load(server.options, env={})
            command += ["--connector", _CONNECTOR, "--connector-options", json.dumps(dict(server.options))]
        return Launch((*command, *server.arguments), dict(_ENV), "/health")

    def free_blocks(self, url: str) -> int:
        """For cases of the conformance suite that look for blocks which never come back."""
        with urllib.request.urlopen(f"{url}/stats", timeout=10) as answer:  # noqa: S310 - the server that was launched
            return int(json.load(answer)["blocks"]["free"])

    def raw_kv(self, url: str, tokens: Sequence[int]) -> bytes:
        """For cases of the conformance suite that compare the cache itself, block by block."""
        body = json.dumps({"prompt": list(tokens)}).encode()
        with urllib.request.urlopen(f"{url}/cache", body, timeout=10) as answer:  # noqa: S310 - as above
            return bytes(answer.read())

    def other_cut(self) -> tuple[str, ...]:
        """For cases of the conformance suite in which two servers are cut differently: blocks of twice the tokens."""
        return ("--block-size", "32", "--blocks", "256")

    def small_model(self, folder: str) -> SmallModel:
        make = (sys.executable, "-m", _MODULE, "--random", "0", "--save", folder)
        return SmallModel(make, ("--block-size", "16", "--blocks", "512"), 16, range(3, 2048))

    def steps(self, cache: Cache) -> Steps:
        """For `kvx bench callbacks`."""
        from kvx_reference.steps import ReferenceSteps

        return ReferenceSteps(cache)
