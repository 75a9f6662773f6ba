"""One request in two legs: the prefill instance's for the cache, the decode instance's for the answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from attrs import frozen

from kvx.core.errors import KvxError
from kvx.core.model import Mode
from kvx.driver import Dialect, RequestInfo
from kvx.router.errands import Errands
from kvx.router.homes import Prompt
from kvx.router.policy import Decision
from kvx.router.pool import Seat
from kvx.router.upstream import Answer, Failure, Reply, Unreachable, Upstream

LINGER_S = 5.0
"""How long a prefill leg may still run when its request has been answered: its own answer is on its way then."""
OVERLOADED = 503
"""Says that an instance has too much to do, not that it is broken."""


class Refused(KvxError):
    """An instance has refused the request: its answer is the client's."""

    def __init__(self, answer: Answer, instance: str) -> None:
        super().__init__(answer.text())
        self.answer = answer
        self.instance = instance


@frozen
class Attempt:
    """One try of a request: what was decided for it from what, and its seats. A pull gets its second one later."""

    decision: Decision
    prefill: Seat
    decode: Seat | None
    request: RequestInfo
    prompt: Prompt
    turn: int
    tried: frozenset[str]

    def leave(self) -> None:
        self.prefill.leave()
        if self.decode is not None:
            self.decode.leave()


class Host(Protocol):
    """What an exchange needs beyond its own legs."""

    def failed(self, url: str, error: Failure) -> None:
        """The instance at `url` has failed a leg."""

    def worked(self, url: str) -> None:
        """The instance at `url` has served a leg."""

    def prefill_ended(self, decision: Decision) -> None:
        """The prefill leg has ended well."""

    async def late(self, attempt: Attempt) -> Seat:
        """A seat for the decode leg of a pull. Raises NoInstance and Failure."""
        ...


@frozen
class Exchange:
    """A request to `path`, and the headers that go with both legs."""

    host: Host
    errands: Errands
    upstream: Upstream
    dialect: Dialect
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @asynccontextmanager
    async def answered(self, attempt: Attempt) -> AsyncGenerator[Reply, None]:
        """The decode instance's answer, whatever its status. Leaving early, or by an exception, ends both legs.

        Raises Refused, NoInstance and Failure, whose `instance` is the one to do without in another attempt.
        """
        legs = self._pull if attempt.decision.mode is Mode.PULL else self._push
        async with legs(attempt) as reply:
            yield reply

    @asynccontextmanager
    async def _pull(self, attempt: Attempt) -> AsyncGenerator[Reply, None]:
        try:
            answer = await self._prefill(attempt.decision, "")
        finally:
            attempt.prefill.leave()
        url = attempt.decision.prefill.url
        if answer.status != 200:
            raise Refused(answer, url)
        told = answer.json()
        ticket = self.dialect.ticket(told)
        seat: Seat | None = None
        reply: Reply | None = None
        taken = False
        try:
            try:
                leg = self.dialect.decode_leg(self.body, Mode.PULL, "", prefill_answer=told)
            except KvxError as error:
                raise Failure(502, "bad_answer", str(error), url) from error
            seat = await self.host.late(attempt)
            reply = await self._decode(seat.instance.url, leg)
            self._judge(reply)
            yield reply
            taken = reply.status == 200
        finally:
            if reply is not None:
                reply.close()
            if seat is not None:
                seat.leave()
            if ticket is not None and not taken:
                self.errands.release(ticket)

    @asynccontextmanager
    async def _push(self, attempt: Attempt) -> AsyncGenerator[Reply, None]:
        transfer = secrets.token_hex(16)
        address, url = attempt.decision.prefill.address, attempt.decision.prefill.url
        leg = self.dialect.decode_leg(self.body, Mode.PUSH, transfer, prefill_address=address)
        prefill = asyncio.create_task(self._prefill(attempt.decision, transfer))
        prefill.add_done_callback(lambda _: attempt.prefill.leave())
        decode = asyncio.create_task(self._decode(attempt.decision.decode.url, leg))
        linger_s = 0.0
        taken = False
        try:
            reply = await _answer_of(decode, prefill, url)
            if not _reason(prefill):
                self._judge(reply)
            taken = reply.status == 200
            yield reply
            linger_s = LINGER_S if taken else 0.0
        finally:
            self.errands.outlive(_end(decode, prefill, linger_s))
            if not taken and address is not None and self.dialect.can_withdraw:
                # The prefill leg may have ended well, and its connection's end then aborts nothing.
                self.errands.withdraw(address, transfer)

    async def _prefill(self, decision: Decision, transfer: str) -> Answer:
        address, url = decision.prefill.address, decision.prefill.url
        leg = self.dialect.prefill_leg(self.body, decision.mode, transfer, prefill_address=address)
        limit_s = self.upstream.limits.prefill_s
        try:
            answer = await self.upstream.ask(url, self.path, leg, self.headers, limit_s=limit_s)
        except Failure as error:
            error.instance = url
            self.host.failed(url, error)
            raise
        if answer.status < 500:
            self.host.worked(url)
        elif answer.status != OVERLOADED:
            self.host.failed(url, Failure(answer.status, "instance_error", answer.text(), url))
        if answer.status == 200:
            self.host.prefill_ended(decision)
        return answer

    async def _decode(self, url: str, leg: Mapping[str, Any]) -> Reply:
        idle_s = self.upstream.limits.idle_s
        try:
            return await self.upstream.open(url, self.path, leg, self.headers, idle_s=idle_s)
        except Failure as error:
            error.instance = url
            self.host.failed(url, error)
            raise

    def _judge(self, reply: Reply) -> None:
        if reply.status >= 500 and reply.status != OVERLOADED:
            told = f"{reply.url} answered {reply.status}"
            self.host.failed(reply.instance, Failure(reply.status, "instance_error", told, reply.instance))


async def _answer_of(decode: asyncio.Task[Reply], prefill: asyncio.Task[Answer], url: str) -> Reply:
    """What the decode instance says decides: it may have recomputed what the prefill instance could not give."""
    await asyncio.wait((decode, prefill), return_when=asyncio.FIRST_COMPLETED)
    # A prefill instance that never saw the request lets the other one wait for nothing.
    if prefill.done() and isinstance(error := prefill.exception(), Unreachable):
        raise error
    try:
        reply = await decode
    except Failure as error:
        raise _with_reason(error, prefill, url) from error
    if reply.status < 500 or not _reason(prefill):
        return reply
    answer = await reply.whole()
    raise _with_reason(Failure(answer.status, "instance_error", answer.text(), reply.instance), prefill, url)


def _with_reason(error: Failure, prefill: asyncio.Task[Answer], url: str) -> Failure:
    """Where the prefill leg failed first, another attempt has to do without that instance, at `url`."""
    reason = _reason(prefill)
    return Failure(error.status, error.kind, f"{error}; before that, {reason}", url) if reason else error


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
