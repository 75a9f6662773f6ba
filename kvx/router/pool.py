"""The instances behind the router: who is up, who drains, and where their control channels listen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from attrs import define, field, frozen

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
FAILURES = 3
"""So many failed legs in a row, and an instance rests although it answers when it is looked at."""
REST_S = 10.0
"""How long after its last failure it serves only where nobody else can, unless it works there."""


@frozen
class Lookout:
    """What a look at any instance needs. `drains` asks at a control address; None: there was no answer."""

    upstream: Upstream
    dialect: Dialect
    headers: Mapping[str, str]
    drains: Callable[[str], Awaitable[bool | None]]
    changed: Callable[[], None]


@define(eq=False)
class Seat:
    """One open leg at an instance, from `Instance.take` until `leave`, which may be called twice."""

    instance: Instance
    freed: Callable[[], None]
    _left: bool = False

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.instance.open -= 1
            self.freed()


@define(eq=False)
class Instance:
    """One instance, watched by a task of its own (`watch`).

    Where `probing` is set, a request of one token asks for its control address, without which it cannot serve; else
    `/health` is asked, and such a request asks for what it may or may not say: its control address and free blocks.
    """

    url: str
    address: str | None = None
    """HOST:PORT of its control channel, from the operator or from its probe."""
    probing: bool = False
    up: bool = False
    draining: bool = False
    """It finishes what it has and gets nothing new: an operator has said so to its control channel."""
    note: str = "not asked yet"
    probe: Probe | None = None
    requests: int = 0
    open: int = 0
    resting: bool = False
    _failures: int = 0
    _failed_at: float = 0.0
    _doubt: asyncio.Event = field(factory=asyncio.Event)

    def candidate(self) -> Candidate:
        free = self.probe.free_blocks if self.probe else None
        note = "it is being drained" if self.draining else self.note
        return Candidate(self.url, self.serves, self.address, note, self.open, free, self.resting)

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.up and not self.draining

    def is_set_up_as(self, other: Instance) -> bool:
        """Whether the operator has said the same of both. An address that a probe has told is not compared."""
        same = self.url == other.url and self.probing == other.probing
        return same and (self.probing or self.address == other.address)

    def take(self, freed: Callable[[], None]) -> Seat:
        """One leg more; `freed` is called when it is over."""
        self.requests += 1
        self.open += 1
        return Seat(self, freed)

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: getattr(self, name) for name in ("url", "up", "draining", "note", "address")}
        if self.probe is not None:
            told |= {"instance": self.probe.instance, "epoch": self.probe.epoch}
        free = self.candidate().free
        return told | {"requests": self.requests, "open": self.open, "resting": self.resting, "free": free}

    def failed(self, note: str, *, down: bool) -> None:
        """A leg met trouble here: look at once. While it is `down` no request is sent to it."""
        self.note = note
        self._failures += 1
        self._failed_at = time.monotonic()
        if down:
            self.up = False
        if self._failures >= FAILURES:
            self.resting = True
        self._doubt.set()

    def worked(self) -> None:
        """A leg has ended well here."""
        self._failures = 0
        self.resting = False

    async def watch(self, lookout: Lookout) -> None:
        """Look again and again, until cancelled; `changed` is called after each look."""
        while True:
            self._doubt.clear()
            try:
                await self._look(lookout)
                self.up = True
                if self.resting and self._rest_left() <= 0:
                    self.worked()
            except TooSlow as error:  # busy is not gone, as long as it has answered before
                self.note = str(error)
            except KvxError as error:
                self.up, self.note, self.draining = False, str(error), False  # who comes back is a new process
            lookout.changed()
            try:
                async with asyncio.timeout(self._pause()):
                    await self._doubt.wait()
            except TimeoutError:
                continue

    def _rest_left(self) -> float:
        return self._failed_at + REST_S - time.monotonic()

    def _pause(self) -> float:
        if not self.up:
            return RETRY_S
        return min(LOOK_S, max(0.0, self._rest_left())) if self.resting else LOOK_S

    async def _look(self, lookout: Lookout) -> None:
        if self.probing:
            self._learn(await self._ask(lookout))
        else:
            answer = await lookout.upstream.ask(self.url, "/health", None, lookout.headers, limit_s=LOOK_LIMIT_S)
            if answer.status != 200:
                raise Failure(502, "instance_unhealthy", f"/health says {answer.status}")
            self.note = ""
            if self.address is None:
                self.up = True  # the probe may wait in the engine's queue
                try:
                    self.probe = await self._ask(lookout)
                except KvxError:  # it serves all the same
                    self.probe = None
        if (control := self._control(lookout.dialect)) and (told := await lookout.drains(control)) is not None:
            self.draining = told

    def _control(self, dialect: Dialect) -> str | None:
        """Where kvx itself listens; an address that the operator gave may be one of the engine's own."""
        if self.probe is not None:
            return next(iter(self.probe.addresses), None)
        return self.address if dialect.can_withdraw else None

    async def _ask(self, lookout: Lookout) -> Probe:
        upstream, dialect, headers = lookout.upstream, lookout.dialect, lookout.headers
        models = await upstream.ask(self.url, "/v1/models", None, headers, limit_s=LOOK_LIMIT_S)
        body = dialect.probe_request(_first_model(models.json()))
        answer = await upstream.ask(self.url, "/v1/completions", body, headers, limit_s=LOOK_LIMIT_S)
        if answer.status != 200:
            raise Failure(502, "instance_unhealthy", f"the probe was answered with status {answer.status}")
        return dialect.read_probe(answer.json())

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
