"""From a request to its attempts: who is asked for it, when there is room, and what is tried again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from attrs import define, field

from kvx.core.model import Mode
from kvx.driver import RequestInfo
from kvx.router.errands import Errands
from kvx.router.exchange import Attempt, Exchange, Refused
from kvx.router.homes import Homes, Prompt, read_prompt
from kvx.router.line import Line, Overloaded
from kvx.router.policy import Busy, Decision, NoInstance, Reason, View, decide, late, late_gain
from kvx.router.pool import Lookout, Seat
from kvx.router.pools import Pools
from kvx.router.settings import Settings
from kvx.router.upstream import Failure, Lost, Reply, TooSlow, Unreachable, Upstream

_WEIGHT = 1 / 8
"""Of the newest observation in the running mean of what a late choice gains."""
_log = logging.getLogger(__name__)

PassOn = Callable[[Reply], Awaitable[bool]]
"""Gives the client an answer. True: all of it. Raises Failure while the client has seen nothing of it."""


@define(eq=False)
class Dispatcher:
    """What all requests share: the instances, the lines before them, and what was learned from earlier requests."""

    settings: Settings
    upstream: Upstream
    counters: Counter[str]
    modes: Counter[tuple[Mode, Reason]] = field(factory=Counter)
    pools: Pools = field(init=False)
    errands: Errands = field(init=False)
    entry: Line = field(init=False)
    """Requests that no instance has seen."""
    prefilled: Line = field(init=False)
    """Requests whose prompt is computed, and which wait for a decode instance."""
    _homes: Homes = field(factory=Homes)
    _late_gain: float = 0.0
    _turn: int = 0

    def __attrs_post_init__(self) -> None:
        flow = self.settings.flow
        self.pools = Pools(self.settings)
        self.errands = Errands(self.settings.options, self.counters)
        self.entry = Line(flow.queue, flow.queue_s)
        self.prefilled = Line(1 << 30, flow.queue_s)  # bounded by the room at the prefill instances

    def watch(self, headers: Mapping[str, str]) -> None:
        """Look after every instance, in tasks of their own."""
        dialect, drains = self.settings.dialect, self.errands.drains
        self.pools.open(Lookout(self.upstream, dialect, headers, drains, self.wake))

    async def close(self, limit_s: float) -> None:
        await self.errands.end(limit_s)
        await self.pools.close()

    def wake(self) -> None:
        """There may be room now."""
        self.prefilled.wake()
        self.entry.wake()

    # ------------------------------------------------------------ one request

    async def serve(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], pass_on: PassOn) -> None:
        """Raises Refused, NoInstance and Failure; then the client has got nothing.

        Another pair is tried as often as an instance cannot be reached, and once when a leg fails otherwise.
        """
        exchange = Exchange(self, self.errands, self.upstream, self.settings.dialect, path, body, headers)
        request, prompt = _info(body), read_prompt(body)
        turn, self._turn = self._turn, self._turn + 1
        tried: frozenset[str] = frozenset()
        first: Failure | Refused | None = None
        while True:
            attempt = await self._admitted(request, prompt, turn, tried, first)
            try:
                async with exchange.answered(attempt) as reply:
                    if reply.status >= 500:
                        raise Refused(await reply.whole(), reply.instance)
                    if await pass_on(reply):
                        self._homes.keep(prompt, reply.instance)
                        self.worked(reply.instance)
                    return
            except (Failure, Refused) as error:
                if not isinstance(error, Unreachable):
                    if first is not None or not _is_worth_another(error):
                        raise
                    first = error
                self.counters["retries"] += 1
                tried |= {error.instance}
                _log.info("another attempt without %s: %s", error.instance, error)
            finally:
                attempt.leave()

    async def _admitted(
        self,
        request: RequestInfo,
        prompt: Prompt,
        turn: int,
        tried: frozenset[str],
        first: Failure | Refused | None,
    ) -> Attempt:
        def take() -> Attempt:
            waited = self.prefilled.oldest_s()
            if waited > self.settings.flow.stall_s:
                raise Busy(f"a prefilled prompt waits for a decode instance since {waited:.1f} s")
            decision = decide(self._view(request, prompt, turn, tried), self.settings.wish)
            self.modes[decision.mode, decision.reason] += 1
            pair = decision.prefill.url, decision.decode.url
            _log.info("%s from %s to %s: %s (%s)", decision.mode.value, *pair, decision.reason.value, decision.why)
            decode = self._seat(pair[1]) if decision.mode is Mode.PUSH else None
            return Attempt(decision, self._seat(pair[0]), decode, request, prompt, turn, tried)

        try:
            return await self.entry.through(take)
        except (NoInstance, Overloaded):
            if first is not None:
                raise first from None
            raise

    def _view(self, request: RequestInfo, prompt: Prompt, turn: int, tried: frozenset[str]) -> View:
        settings, pools = self.settings, self.pools
        return View(
            prefill=[one.candidate() for one in pools.prefill],
            decode=[one.candidate() for one in pools.decode],
            request=request,
            mode=settings.mode,
            modes=settings.modes,
            prompt_tokens=prompt.tokens or None,
            home=self._homes.find(prompt),
            late_gain=self._late_gain,
            waiting=len(self.prefilled),
            room=settings.flow.room,
            turn=turn,
            tried=tried,
        )

    def _seat(self, url: str) -> Seat:
        return next(one for one in self.pools.instances if one.url == url).take(self.wake)

    # ------------------------------------------------------------ what an exchange asks and tells

    async def late(self, attempt: Attempt) -> Seat:
        """A seat at the decode instance of a pull, whose prefill is over. Raises NoInstance and Overloaded."""

        def take() -> Seat:
            view = self._view(attempt.request, attempt.prompt, attempt.turn, attempt.tried)
            return self._seat(late(view).url)

        try:
            return await self.prefilled.through(take)
        finally:
            self.entry.wake()

    def prefill_ended(self, decision: Decision) -> None:
        """Learn what a choice would gain that is made only now."""
        decode = [one.candidate() for one in self.pools.decode]
        own = 1 if decision.mode is Mode.PUSH else 0
        gain = late_gain(decode, decision.decode.url, own)
        self._late_gain += (gain - self._late_gain) * _WEIGHT

    def failed(self, url: str, error: Failure) -> None:
        _log.warning("%s", error)
        if (instance := self.pools.find(url)) is not None:
            instance.failed(str(error), down=isinstance(error, Unreachable | Lost))

    def worked(self, url: str) -> None:
        if (instance := self.pools.find(url)) is not None:
            instance.worked()


def _is_worth_another(error: Failure | Refused) -> bool:
    """A leg that has failed at its instance; not one that has used up its time, nor a request that is refused."""
    if isinstance(error, Refused):
        return error.answer.status >= 500
    return bool(error.instance) and not isinstance(error, TooSlow)


def _info(body: Mapping[str, Any]) -> RequestInfo:
    model, prompt, limit = body.get("model"), body.get("prompt"), body.get("max_tokens")
    return RequestInfo(
        model if isinstance(model, str) else "",
        len(prompt) if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) else None,
        limit if isinstance(limit, int) else None,
    )
