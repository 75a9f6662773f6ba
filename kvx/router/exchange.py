"""One request in two legs: the prefill instance's for the cache, the decode instance's for the answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from attrs import frozen

from kvx.core.errors import KvxError
from kvx.core.model import Mode
from kvx.driver import Dialect
from kvx.router.policy import Choice
from kvx.router.upstream import Answer, Failure, Reply, Unreachable, Upstream

LINGER_S = 5.0
"""How long a prefill leg may still run when its request has been answered: its own answer is on its way then."""


class Refused(KvxError):
    """The prefill instance has refused the request: its answer is the client's."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.text())
        self.answer = answer


class Host(Protocol):
    """What an exchange needs beyond its own legs."""

    def trouble(self, url: str, error: Failure) -> None:
        """The instance at `url` has failed a leg."""

    def release(self, ticket: str) -> None:
        """Nobody will take up this ticket: give its blocks back."""

    def withdraw(self, address: str, transfer: str) -> None:
        """No decode instance has this push: the prefill instance at `address` need not wait for one."""

    def outlive(self, work: Coroutine[Any, Any, None]) -> None:
        """Finish this when the exchange is over; it is bounded and never raises."""


@frozen
class Exchange:
    """A request to `path`, and the headers that go with both legs."""

    host: Host
    upstream: Upstream
    dialect: Dialect
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @asynccontextmanager
    async def answered(self, choice: Choice) -> AsyncGenerator[Reply, None]:
        """The decode instance's answer, whatever its status. Leaving early, or by an exception, ends both legs.

        Raises Refused and Failure; after Unreachable another choice may be tried.
        """
        legs = self._pull if choice.mode is Mode.PULL else self._push
        async with legs(choice) as reply:
            yield reply

    @asynccontextmanager
    async def _pull(self, choice: Choice) -> AsyncGenerator[Reply, None]:
        answer = await self._prefill(choice, "")
        if answer.status != 200:
            raise Refused(answer)
        told = answer.json()
        ticket = self.dialect.ticket(told)
        reply: Reply | None = None
        taken = False
        try:
            try:
                leg = self.dialect.decode_leg(self.body, Mode.PULL, "", prefill_answer=told)
            except KvxError as error:
                raise Failure(502, "bad_answer", str(error)) from error
            reply = await self._decode(choice, leg)
            yield reply
            taken = reply.status == 200
        finally:
            if reply is not None:
                reply.close()
            if ticket is not None and not taken:
                self.host.release(ticket)

    @asynccontextmanager
    async def _push(self, choice: Choice) -> AsyncGenerator[Reply, None]:
        transfer = secrets.token_hex(16)
        leg = self.dialect.decode_leg(self.body, Mode.PUSH, transfer, prefill_address=choice.prefill.address)
        prefill = asyncio.create_task(self._prefill(choice, transfer))
        decode = asyncio.create_task(self._decode(choice, leg))
        linger_s = 0.0
        taken = False
        try:
            reply = await _answer_of(decode, prefill)
            taken = reply.status == 200
            yield reply
            linger_s = LINGER_S if taken else 0.0
        finally:
            self.host.outlive(_end(decode, prefill, linger_s))
            if not taken and choice.prefill.address is not None and self.dialect.can_withdraw:
                # The prefill leg may have ended well, and its connection's end then aborts nothing.
                self.host.withdraw(choice.prefill.address, transfer)

    async def _prefill(self, choice: Choice, transfer: str) -> Answer:
        address = choice.prefill.address
        leg = self.dialect.prefill_leg(self.body, choice.mode, transfer, prefill_address=address)
        limit_s = self.upstream.limits.prefill_s
        url = choice.prefill.url
        try:
            return await self.upstream.ask(url, self.path, leg, self.headers, limit_s=limit_s)
        except Failure as error:
            self.host.trouble(url, error)
            raise

    async def _decode(self, choice: Choice, leg: Mapping[str, Any]) -> Reply:
        idle_s = self.upstream.limits.idle_s
        url = choice.decode.url
        try:
            return await self.upstream.open(url, self.path, leg, self.headers, idle_s=idle_s)
        except Failure as error:
            self.host.trouble(url, error)
            raise


async def _answer_of(decode: asyncio.Task[Reply], prefill: asyncio.Task[Answer]) -> Reply:
    """What the decode instance says decides: it may have recomputed what the prefill instance could not give."""
    await asyncio.wait((decode, prefill), return_when=asyncio.FIRST_COMPLETED)
    # A prefill instance that never saw the request lets the other one wait for nothing.
    if prefill.done() and isinstance(error := prefill.exception(), Unreachable):
        raise error
    try:
        reply = await decode
    except Failure as error:
        raise _with_reason(error, prefill) from error
    if reply.status < 500 or not _reason(prefill):
        return reply
    answer = await reply.whole()
    raise _with_reason(Failure(answer.status, "instance_error", answer.text()), prefill)


def _with_reason(error: Failure, prefill: asyncio.Task[Answer]) -> Failure:
    reason = _reason(prefill)
    return Failure(error.status, error.kind, f"{error}; before that, {reason}") if reason else error


def _reason(prefill: asyncio.Task[Answer]) -> str:
    """Why the prefill leg has failed; empty where it has not."""
    if not prefill.done():
        return ""
    if error := prefill.exception():
        return str(error)
    return "" if prefill.result().status == 200 else prefill.result().text()


async def _end(decode: asyncio.Task[Reply], prefill: asyncio.Task[Answer], linger_s: float) -> None:
    """Close both legs' connections, the prefill leg's after a while."""
    decode.cancel()
    (reply,) = await asyncio.gather(decode, return_exceptions=True)
    if isinstance(reply, Reply):
        reply.close()
    await asyncio.wait((prefill,), timeout=linger_s)
    prefill.cancel()
    await asyncio.gather(prefill, return_exceptions=True)
