"""The instances behind the router: who is up, and where a prefill instance's control channel listens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from kvx.core.errors import KvxError, RemoteProtocolError
from kvx.driver import Dialect, Probe
from kvx.router.policy import Candidate
from kvx.router.upstream import Failure, TooSlow, Upstream

LOOK_S = 10.0
"""Pause between two looks at an instance that is up: it may restart unnoticed, with another address."""
RETRY_S = 1.0
"""The same while it is not."""
LOOK_LIMIT_S = 30.0
"""Longest wait for its answer; a probe waits in the engine's queue like any request."""


@define(eq=False)
class Instance:
    """One instance, watched by a task of its own (`watch`).

    Where `probing` is set, a request of one token asks for its control address; else `/health` is asked.
    """

    url: str
    address: str | None = None
    """HOST:PORT of its control channel, from the operator or from its probe."""
    probing: bool = False
    up: bool = False
    note: str = "not asked yet"
    probe: Probe | None = None
    requests: int = 0
    open: int = 0
    _doubt: asyncio.Event = field(factory=asyncio.Event)

    def candidate(self) -> Candidate:
        return Candidate(self.url, self.up, self.address, self.note)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: getattr(self, name) for name in ("url", "up", "note", "address")}
        if self.probe is not None:
            told |= {"instance": self.probe.instance, "epoch": self.probe.epoch}
        return told | {"requests": self.requests, "open": self.open}

    def doubt(self, note: str, *, down: bool) -> None:
        """A request met trouble here: look at once. While it is `down` no request is sent to it."""
        self.note = note
        if down:
            self.up = False
        self._doubt.set()

    async def watch(self, upstream: Upstream, dialect: Dialect, headers: Mapping[str, str]) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._doubt.clear()
            try:
                await self._look(upstream, dialect, headers)
                self.up = True
            except TooSlow as error:  # busy is not gone, as long as it has answered before
                self.note = str(error)
            except KvxError as error:
                self.up, self.note = False, str(error)
            try:
                async with asyncio.timeout(LOOK_S if self.up else RETRY_S):
                    await self._doubt.wait()
            except TimeoutError:
                continue

    async def _look(self, upstream: Upstream, dialect: Dialect, headers: Mapping[str, str]) -> None:
        if not self.probing:
            answer = await upstream.ask(self.url, "/health", None, headers, limit_s=LOOK_LIMIT_S)
            if answer.status != 200:
                raise Failure(502, "instance_unhealthy", f"/health says {answer.status}")
            self.note = ""
            return
        models = await upstream.ask(self.url, "/v1/models", None, headers, limit_s=LOOK_LIMIT_S)
        body = dialect.probe_request(_first_model(models.json()))
        answer = await upstream.ask(self.url, "/v1/completions", body, headers, limit_s=LOOK_LIMIT_S)
        if answer.status != 200:
            raise Failure(502, "instance_unhealthy", f"the probe was answered with status {answer.status}")
        self._learn(dialect.read_probe(answer.json()))

    def _learn(self, probe: Probe) -> None:
        if not probe.addresses:
            raise RemoteProtocolError("the probe names no control address")
        self.probe = probe
        if probe.dp_size > 1:
            # Each data-parallel rank is an instance of its own, and one URL cannot say which of them serves.
            self.address, self.note = None, f"push needs one URL for each of its {probe.dp_size} data-parallel ranks"
        else:
            self.address, self.note = probe.addresses[0], ""


def _first_model(answer: Mapping[str, Any]) -> str:
    try:
        name = answer["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise RemoteProtocolError("/v1/models names no model")
    return name
