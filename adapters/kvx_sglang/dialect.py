"""How SGLang's prefill and decode servers are asked: the same request to both, with the place where they meet."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kvx.address import parse_address
from kvx.core.errors import KvxError
from kvx.core.model import Mode
from kvx.driver import Probe

_NO_PROBE = (
    "SGLang's prefill servers tell nobody where they are met: "
    "name the port of --disaggregation-bootstrap-port, as in --prefill URL=HOST:PORT"
)


class SglangDialect:
    """OpenAI's completions with SGLang's `bootstrap_*` keys.

    The address of a prefill server is that of its bootstrap server. The decode server draws the transfer's id, so a
    router cannot withdraw a push; it closes the prefill leg's connection instead, which SGLang takes as an abort.
    """

    @property
    def can_withdraw(self) -> bool:
        return False

    def prefill_leg(
        self, body: Mapping[str, Any], mode: Mode, transfer: str, *, prefill_address: str | None = None
    ) -> dict[str, Any]:
        # The prefill server computes one token whatever the body says; with another body it would take
        # other decisions than the decode server.
        leg = {key: value for key, value in body.items() if key != "stream_options"}
        return {**leg, "stream": False, **_meeting(mode, transfer, prefill_address)}

    def decode_leg(
        self,
        body: Mapping[str, Any],
        mode: Mode,
        transfer: str,
        *,
        prefill_answer: Mapping[str, Any] | None = None,
        prefill_address: str | None = None,
    ) -> dict[str, Any]:
        return {**body, **_meeting(mode, transfer, prefill_address)}

    def ticket(self, prefill_answer: Mapping[str, Any]) -> str | None:
        return None

    def probe_request(self, model: str) -> dict[str, Any]:
        raise KvxError(_NO_PROBE)

    def read_probe(self, answer: Mapping[str, Any]) -> Probe:
        raise KvxError(_NO_PROBE)


def room_of(transfer: str) -> int:
    """The room of a router's id: 63 bits, never 0, which SGLang takes for none."""
    return int.from_bytes(hashlib.sha256(transfer.encode()).digest()[:8]) >> 1 or 1


def _meeting(mode: Mode, transfer: str, address: str | None) -> dict[str, Any]:
    if mode is not Mode.PUSH:
        raise KvxError("SGLang can push only: its prefill server waits for the decode server's pages")
    if address is None:
        raise KvxError(_NO_PROBE)
    host, port = parse_address(address)
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room_of(transfer)}
