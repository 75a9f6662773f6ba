"""Which instances serve a request, and in which mode. Pure: what is known goes in, a choice comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from kvx.core.errors import KvxError
from kvx.core.model import Mode
from kvx.driver import RequestInfo

Wish = Callable[[RequestInfo], Mode | None]
"""The plugins' choice of a mode (hook `kvx_choose_mode`)."""


class NoInstance(KvxError):
    """Nobody can serve this request now; the text says why."""


@frozen
class Candidate:
    """One instance as far as a choice needs it. Push needs a prefill instance's control address, HOST:PORT."""

    url: str
    up: bool = True
    address: str | None = None
    note: str = ""
    """Why it is not up, or why its address is not known."""


@frozen
class Pools:
    """All instances, and the mode that the operator has set; None: it may differ between requests."""

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    mode: Mode | None = None


@frozen
class State:
    """`turn` counts requests, `tried` are the URLs that this request has found unreachable."""

    turn: int = 0
    tried: frozenset[str] = frozenset()


@frozen
class Choice:
    mode: Mode
    prefill: Candidate
    decode: Candidate


def choose(pools: Pools, request: RequestInfo, state: State, wish: Wish) -> Choice:
    """Round robin over those that are up. Raises NoInstance.

    The mode is the operator's, else a plugin's, else push, which hides more of the transfer, where
    the prefill instance has told where to connect to.
    """
    mode = pools.mode or wish(request)
    prefill = _next("prefill", pools.prefill, state, push=mode is Mode.PUSH)
    decode = _next("decode", pools.decode, state)
    if mode is None:
        mode = Mode.PULL if prefill.address is None else Mode.PUSH
    return Choice(mode, prefill, decode)


def _next(pool: str, candidates: Sequence[Candidate], state: State, *, push: bool = False) -> Candidate:
    able = [one for one in candidates if one.up and one.url not in state.tried and (one.address or not push)]
    if not able:
        told = "; ".join(f"{one.url}: {one.note or 'no answer'}" for one in candidates)
        raise NoInstance(f"no {pool} instance can serve this ({told})")
    return able[state.turn % len(able)]
