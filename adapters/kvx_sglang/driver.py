"""SGLang as a process; imports nothing of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvx.address import format_address
from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx.core.model import Mode, Role
from kvx.driver import Dialect, Launch, Server, SmallModel
from kvx_sglang.dialect import SglangDialect
from kvx_sglang.versions import TESTED, installed_version

if TYPE_CHECKING:
    from kvx.bench.cache import Cache
    from kvx.bench.callbacks import Steps

_CPU_ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
_CPU_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    # Without the second one an idle scheduler takes a whole core.
    *("--skip-server-warmup", "--sleep-on-idle"),
)
_ROLES = {Role.PRODUCER: "prefill", Role.CONSUMER: "decode"}


class SglangDriver:
    """Starts SGLang's HTTP server on a CPU, where a server with kvx prefills or decodes."""

    @property
    def dialect(self) -> Dialect:
        return SglangDialect()

    @property
    def tested(self) -> str:
        return TESTED

    @property
    def modes(self) -> frozenset[Mode]:
        """SGLang's prefill waits for the decode server's pages, so there is nothing to pull."""
        return frozenset({Mode.PUSH})

    @property
    def has_roles(self) -> bool:
        return True

    def installed(self) -> str | None:
        return installed_version()

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError where kvx's options cannot work, before a process is started."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", server.model]
        command += ["--host", server.host, "--port", str(server.port), *_CPU_ARGUMENTS]
        env, address = dict(_CPU_ENV), ""
        if server.options is not None:
            if server.role is None:
                raise ConfigError("a server of SGLang with kvx has to be told whether it prefills or decodes")
            Options.load(server.options, env={})
            env |= variables(server.options)
            command += ["--disaggregation-mode", _ROLES[server.role], "--disaggregation-transfer-backend", "kvx"]
            if server.role is Role.PRODUCER:
                if server.meeting_port is None:
                    raise ConfigError("a prefill server of SGLang needs a port for its bootstrap server")
                command += ["--disaggregation-bootstrap-port", str(server.meeting_port)]
                address = format_address(server.host, server.meeting_port)
            else:
                # A CPU has no other place to which a retracted request's pages could go.
                command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return Launch((*command, *server.arguments), env, "/ready", address)

    def small_model(self, folder: str) -> SmallModel:
        arguments = (
            *("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192"),
            *("--max-running-requests", "8", "--chunked-prefill-size", "128"),
        )
        make = (sys.executable, "-m", "kvx_sglang.tiny_model", folder)
        # Keys and values of three layers; behind them lies what SGLang sends with each request beside its cache.
        return SmallModel(make, arguments, 16, range(4, 512), cache_regions=6)

    def steps(self, cache: Cache) -> Steps:
        """For `kvx bench callbacks`."""
        from kvx_sglang.steps import SglangSteps

        return SglangSteps(cache)


def variables(options: Mapping[str, Any]) -> dict[str, str]:
    """kvx's options as the environment carries them: SGLang has no settings of a transfer backend.

    Raises ConfigError for a value that a variable cannot hold.
    """
    told: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            section = name.upper() if ":" in name else name.replace("-", "_").upper()
            told |= {f"KVX_{section}__{key.upper()}": _text(key, part) for key, part in value.items()}
        else:
            told[f"KVX_{name.upper()}"] = _text(name, value)
    return told


def _text(name: str, value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case list() | tuple() if all(isinstance(part, str) and "," not in part for part in value):
            return ",".join(value)
        case _:
            raise ConfigError(f"option {name} is {value!r}, which an environment variable cannot hold")
