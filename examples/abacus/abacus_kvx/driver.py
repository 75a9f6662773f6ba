"""The engine as a process, and how one request becomes two. Imports nothing of the engine."""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib import util

from kvx.config import Options
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.driver import Dialect, Launch, Server, SmallModel


class AbacusDriver:
    """See `kvx.driver.EngineDriver`."""

    @property
    def dialect(self) -> Dialect:
        return CompletionsDialect()

    @property
    def tested(self) -> str:
        return "0.1.*"

    @property
    def modes(self) -> frozenset[Mode]:
        return frozenset(Mode)

    @property
    def has_roles(self) -> bool:
        return False

    def installed(self) -> str | None:
        return "0.1.0" if util.find_spec("abacus") else None

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError for options of kvx that cannot work, before a process is started."""
        command = [sys.executable, "-m", "abacus", "--model", server.model, "--host", server.host]
        command += ["--port", str(server.port)]
        if server.options is not None:
            Options.load(server.options, env={})
            command += ["--mover", "abacus_kvx.adapter:join", "--mover-options", json.dumps(dict(server.options))]
        return Launch((*command, *server.arguments), {}, "/health")

    def free_blocks(self, url: str) -> int:
        """For cases of the conformance suite that look for blocks which never come back."""
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:  # noqa: S310 - the server that was launched
            return int(json.load(answer)["free_blocks"])

    def small_model(self, folder: str) -> SmallModel:
        make = (sys.executable, "-m", "abacus", "--model", folder, "--make", "1")
        return SmallModel(make, ("--blocks", "128"), 8, range(4096))
