"""vLLM as a process; imports nothing of vLLM."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvx.config import Options
from kvx.core.model import Mode
from kvx.dialect import CompletionsDialect
from kvx.driver import Dialect, Launch, Server, SmallModel
from kvx_vllm.versions import TESTED, installed_version

if TYPE_CHECKING:
    from kvx.bench.cache import Cache
    from kvx.bench.callbacks import Steps

_CPU_ENV = {
    # One worker per machine core range would fight with other servers of the same machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


class VllmDriver:
    """Starts vLLM's OpenAI server on a CPU."""

    @property
    def dialect(self) -> Dialect:
        return CompletionsDialect()

    @property
    def tested(self) -> str:
        return TESTED

    @property
    def modes(self) -> frozenset[Mode]:
        return frozenset(Mode)

    @property
    def has_roles(self) -> bool:
        return False

    def installed(self) -> str | None:
        return installed_version()

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError where kvx's options cannot work, before a process is started."""
        # The distribution for CPUs has no working `vllm` command, the module works in all.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", server.model]
        command += ["--host", server.host, "--port", str(server.port)]
        if server.options is not None:
            Options.load(server.options, env={})
            config = {
                "kv_connector": "KvxConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": dict(server.options),
            }
            command += ["--kv-transfer-config", json.dumps(config)]
        return Launch((*command, *server.arguments), dict(_CPU_ENV), "/health")

    def small_model(self, folder: str) -> SmallModel:
        arguments = (
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"),
            *("--block-size", "32", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20)),
        )
        return SmallModel((sys.executable, "-m", "kvx_vllm.tiny_model", folder), arguments, 32, range(3, 2000))

    def steps(self, cache: Cache) -> Steps:
        """For `kvx bench callbacks`."""
        from kvx_vllm.steps import VllmSteps

        return VllmSteps(cache)
