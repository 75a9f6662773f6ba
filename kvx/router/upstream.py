"""HTTP to the instances. Every wait has a limit, and every failure a name."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self

import aiohttp
from attrs import frozen

from kvx.core.errors import KvxError

MAX_ANSWER = 64 << 20
"""Bytes of an answer that the router itself reads; one that is passed on has no such limit."""
PASSED_BACK = ("Content-Type", "X-Request-Id", "Retry-After")
"""Headers of an answer that the client gets."""


class Failure(KvxError):
    """Something that the router has to tell its client: HTTP status, type, and the text as message.

    `instance` is the URL of the instance that has failed, empty where none has. `retry_after`: after so many seconds it
    may be worth asking again, 0 where nobody can say.
    """

    retry_after = 0

    def __init__(self, status: int, kind: str, message: str, instance: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.instance = instance


class Unreachable(Failure):
    """No connection came about: the instance has certainly not seen the request."""

    def __init__(self, instance: str, message: str) -> None:
        super().__init__(502, "instance_unreachable", message, instance)


class Lost(Failure):
    """The connection broke before the answer was complete."""

    def __init__(self, message: str) -> None:
        super().__init__(502, "instance_lost", message)


class TooSlow(Failure):
    """A limit has passed."""

    def __init__(self, message: str) -> None:
        super().__init__(504, "instance_timeout", message)


@frozen(kw_only=True)
class Limits:
    """Seconds: to connect, for a whole prefill leg, between two pieces of an answer that is passed on."""

    connect_s: float = 5.0
    prefill_s: float = 600.0
    idle_s: float = 600.0


@frozen
class Answer:
    """An answer that was read to its end."""

    url: str
    status: int
    headers: Mapping[str, str]
    data: bytes

    def text(self) -> str:
        """Its beginning, for a message to a person."""
        return f"{self.url} answered {self.status}: {self.data[:500].decode(errors='replace')}"

    def json(self) -> dict[str, Any]:
        """The JSON object that it is. Raises Failure."""
        try:
            body = json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise Failure(502, "bad_answer", f"{self.url} answered with what is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Failure(502, "bad_answer", f"{self.url} answered with JSON that is not an object")
        return body


@frozen
class Reply:
    """An answer whose head is there."""

    instance: str
    url: str
    idle_s: float
    response: aiohttp.ClientResponse

    @property
    def status(self) -> int:
        return self.response.status

    def close(self) -> None:
        """Close its connection; before its end that tells the engine that nobody waits any more."""
        self.response.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Its bytes as they come. Raises Failure."""
        iterator = self.response.content.iter_any()
        while True:
            with _failures(self.url, self.idle_s):
                piece = await anext(iterator, None)
            if piece is None:
                return
            yield piece

    async def whole(self) -> Answer:
        """All of it, at most MAX_ANSWER bytes. Raises Failure."""
        data = bytearray()
        async for piece in self.pieces():
            data += piece
            if len(data) > MAX_ANSWER:
                raise Failure(502, "bad_answer", f"{self.url} answered with more than {MAX_ANSWER} bytes")
        return Answer(self.url, self.status, kept(self.response.headers, PASSED_BACK), bytes(data))


class Upstream:
    """The router's HTTP client, as an async context manager."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # A kept connection may be closed by its server at the very moment a request goes out on it, and then
        # nobody knows whether it was seen; a new one for each request leaves no such doubt.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def open(
        self,
        instance: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        *,
        idle_s: float,
    ) -> Reply:
        """The answer to a POST of `body`, or to a GET, as soon as its head is there. Close it. Raises Failure."""
        url = instance + path
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_s, sock_read=idle_s)
        sent = {**headers, "Accept-Encoding": "identity"}
        method = "GET" if body is None else "POST"
        try:
            with _failures(url, idle_s):
                response = await self._session.request(
                    method, url, json=body, headers=sent, timeout=timeout, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError as error:
            told = f"{instance} cannot be reached: no connection in {self.limits.connect_s:g} s"
            raise Unreachable(instance, told) from error
        except aiohttp.ClientConnectorError as error:
            # Errors of name resolution have no errno of the system; their text says enough.
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise Unreachable(instance, f"{instance} cannot be reached: {reason}") from error
        return Reply(instance, url, idle_s, response)

    async def ask(
        self,
        instance: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        *,
        limit_s: float,
    ) -> Answer:
        """The whole answer, within `limit_s` seconds. Raises Failure."""
        try:
            async with asyncio.timeout(limit_s):
                with closing(await self.open(instance, path, body, headers, idle_s=limit_s)) as reply:
                    return await reply.whole()
        except TimeoutError as error:
            raise TooSlow(f"{instance}{path} did not answer in {limit_s:g} s") from error


def kept(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


@contextmanager
def _failures(url: str, idle_s: float) -> Generator[None, None, None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except aiohttp.ServerTimeoutError as error:
        raise TooSlow(f"{url} sent nothing for {idle_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Lost(f"{url} was lost: {str(error) or type(error).__name__}") from error
