"""vLLM as a process and as an HTTP dialect; imports nothing of vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from kvx.config import Options
from kvx.core.errors import KvxError, RemoteProtocolError
from kvx.core.model import Mode
from kvx.driver import Dialect, Launch, Probe, Server, SmallModel
from kvx_vllm.versions import TESTED, installed_version

_CPU_ENV = {
    # One worker per machine core range would fight with other servers of the same machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
_UPSTREAM = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmDialect:
    """OpenAI's completions with vLLM's `kv_transfer_params`."""

    def prefill_leg(self, body: Mapping[str, Any], mode: Mode, transfer: str) -> dict[str, Any]:
        leg = {key: value for key, value in body.items() if key not in ("stream_options", "max_completion_tokens")}
        leg |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            leg["max_completion_tokens"] = 1
        if "min_tokens" in body:
            leg["min_tokens"] = 1
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, **_UPSTREAM}
        if mode is Mode.PUSH:
            params["kvx"] = {"mode": "push", "transfer": transfer}
        return {**leg, "kv_transfer_params": params}

    def decode_leg(
        self,
        body: Mapping[str, Any],
        mode: Mode,
        transfer: str,
        *,
        prefill_answer: Mapping[str, Any] | None = None,
        prefill_address: str | None = None,
    ) -> dict[str, Any]:
        if mode is Mode.PULL:
            params = (prefill_answer or {}).get("kv_transfer_params")
            if not isinstance(params, Mapping):
                raise KvxError("the prefill instance's answer has no kv_transfer_params: does it run KvxConnector?")
            return {**body, "kv_transfer_params": dict(params)}
        if prefill_address is None:
            raise KvxError("push needs the control address of the prefill instance")
        kvx = {"mode": "push", "transfer": transfer, "from": prefill_address}
        return {**body, "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "kvx": kvx}}

    def ticket(self, prefill_answer: Mapping[str, Any]) -> str | None:
        kvx = _kvx(prefill_answer)
        ticket = kvx.get("ticket")
        return ticket if isinstance(ticket, str) else None

    def probe_request(self, model: str) -> dict[str, Any]:
        return {"model": model, "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kvx": {"probe": True}}}

    def read_probe(self, answer: Mapping[str, Any]) -> Probe:
        kvx = _kvx(answer)
        try:
            probe = Probe(
                instance=kvx["instance"],
                epoch=kvx["epoch"],
                addresses=tuple(kvx["addresses"]),
                dp_rank=kvx["dp_rank"],
                dp_size=kvx["dp_size"],
                fingerprint=kvx["fingerprint"],
            )
        except (KeyError, TypeError) as error:
            raise RemoteProtocolError(f"no probe in the instance's answer: {error}") from error
        texts = (probe.instance, probe.fingerprint, *probe.addresses)
        numbers = (probe.epoch, probe.dp_rank, probe.dp_size)
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise RemoteProtocolError("the probe in the instance's answer has values of wrong types")
        return probe


def _kvx(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    params = answer.get("kv_transfer_params")
    kvx = params.get("kvx") if isinstance(params, Mapping) else None
    return kvx if isinstance(kvx, Mapping) else {}


class VllmDriver:
    """Starts vLLM's OpenAI server on a CPU."""

    @property
    def dialect(self) -> Dialect:
        return VllmDialect()

    @property
    def tested(self) -> str:
        return TESTED

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
