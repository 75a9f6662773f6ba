"""What the router tells instances when a request is over, so that they need not wait for somebody who will not come."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from attrs import define, field

from kvx.config import Options
from kvx.core import wire
from kvx.core.errors import KvxError, RemoteProtocolError
from kvx.core.messages import Ack
from kvx.operator import ask

RELEASE_S = 5.0
"""Longest wait for an instance to take a ticket back."""
STATUS_S = 2.0
"""The same for it to tell its status, which is asked again soon."""
_log = logging.getLogger(__name__)


@define(eq=False)
class Errands:
    """Work that outlives its request; each piece is bounded and never raises."""

    options: Options
    counters: Counter[str]
    _tasks: set[asyncio.Task[None]] = field(factory=set)

    def outlive(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def release(self, ticket: str) -> None:
        """Nobody will take up this ticket: give its blocks back."""
        self.outlive(self._tell("ticket", "release", lambda: wire.parse_ticket(ticket).grant.address, ticket))

    def withdraw(self, address: str, transfer: str) -> None:
        """No decode instance has this push: the prefill instance at `address` need not wait for one."""
        self.outlive(self._tell("push", "withdraw", lambda: address, transfer))

    async def drains(self, address: str) -> bool | None:
        """Whether the instance at this control address is being drained; None: it does not say."""
        try:
            ack = await self._ask(address, "status", "", STATUS_S)
            told = json.loads(ack.body)
        except (KvxError, ValueError) as error:
            _log.debug("%s does not tell its status: %s", address, error)
            return None
        return isinstance(told, dict) and told.get("draining") is True

    async def end(self, limit_s: float) -> None:
        """Let them end, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, what: str, verb: str, address_of: Callable[[], str], argument: str) -> None:
        try:
            ack = await self._ask(address_of(), verb, argument, RELEASE_S)
        except KvxError as error:
            _log.warning("%s of a %s failed, a time limit will end it: %s", verb, what, error)
            self.counters[f"{verb}_failed"] += 1
        else:
            # "no" is as good: the other side has ended the transfer itself
            self.counters[f"{verb}_done" if ack.ok else f"{verb}_needless"] += 1

    async def _ask(self, address: str, verb: str, argument: str, limit_s: float) -> Ack:
        if not self.options.may_dial(address):
            raise RemoteProtocolError(f"its address {address} is not in option peers")
        return await asyncio.to_thread(ask, address, verb, argument, secret=self.options.secret, timeout_s=limit_s)
