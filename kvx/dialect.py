"""The HTTP dialect that several engines share: OpenAI's completions with transfer parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvx.core.errors import KvxError, RemoteProtocolError
from kvx.core.model import Mode
from kvx.driver import Probe

_UPSTREAM = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class CompletionsDialect:
    """OpenAI's completions with `kv_transfer_params`, as vLLM and the reference engine speak it."""

    @property
    def can_withdraw(self) -> bool:
        return True

    def prefill_leg(
        self, body: Mapping[str, Any], mode: Mode, transfer: str, *, prefill_address: str | None = None
    ) -> dict[str, Any]:
        dropped = ("stream_options", "max_completion_tokens", "best_of")
        leg = {key: value for key, value in body.items() if key not in dropped}
        leg |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            leg["max_completion_tokens"] = 1
        for one in ("min_tokens", "n"):
            if one in body:
                leg[one] = 1
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
                raise KvxError("the prefill instance's answer has no kv_transfer_params: does it run with kvx?")
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
            addresses: Any = kvx["addresses"]
            texts: list[Any] = [kvx["instance"], kvx["fingerprint"]]
            numbers: list[Any] = [kvx["epoch"], kvx["dp_rank"], kvx["dp_size"]]
        except KeyError as error:
            raise RemoteProtocolError(f"no probe in the instance's answer: {error} is missing") from error
        texts += addresses if isinstance(addresses, list) else [None]
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise RemoteProtocolError("the probe in the instance's answer has values of wrong types")
        epoch, dp_rank, dp_size = numbers
        return Probe(texts[0], epoch, tuple(texts[2:]), dp_rank, dp_size, texts[1], _free(kvx.get("blocks")))


def _free(blocks: object) -> float | None:
    """The free share in `{"total": N, "free": N}`."""
    if not isinstance(blocks, Mapping):
        return None
    total, free = blocks.get("total"), blocks.get("free")
    return free / total if isinstance(total, int) and isinstance(free, int) and total > 0 else None


def _kvx(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    params = answer.get("kv_transfer_params")
    kvx = params.get("kvx") if isinstance(params, Mapping) else None
    return kvx if isinstance(kvx, Mapping) else {}
