"""`python -m kvx_conformance.suite.broken_server BEND MODULE ...`: an engine's server whose adapter is broken.

Runs MODULE as `python -m MODULE ...` would, but what its adapter tells kvx, or hears from it, passes through one of
`BENDS`. So the engine, kvx and the rest of the adapter are the shipped ones.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from attrs import evolve

from kvx import instance
from kvx.config import Options
from kvx.core.errors import ConfigError, KvxError
from kvx.core.events import Abort, Claim, EngineEvent, Expose, Stage
from kvx.core.model import BlockTable, InstanceInfo, Layout, Mode, News, Outcome, Packing, Reason, Region, Released
from kvx.engine import EngineInstance

_REAL = instance.open_instance


class Bent:
    """An `EngineInstance` whose events and news pass through the methods that a bend overrides."""

    def __init__(self, options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> None:
        self.layout, self.regions = self.described(layout), regions
        self.made: list[News] = []
        """News that kvx has not told."""
        self.inner: EngineInstance = _REAL(options, self.layout, regions, epoch=epoch)

    @property
    def info(self) -> InstanceInfo:
        return self.inner.info

    def put(self, events: Sequence[EngineEvent]) -> None:
        self.inner.put([bent for event in events for bent in self.told(event)])

    def news(self) -> list[News]:
        made, self.made = self.made, []
        return made + [bent for one in self.inner.news() for bent in self.heard(one)]

    def snapshot(self) -> dict[str, object]:
        return self.inner.snapshot()

    def close(self) -> None:
        self.inner.close()

    def described(self, layout: Layout) -> Layout:
        return layout

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        """What kvx is told in place of this."""
        return [event]

    def heard(self, news: News) -> list[News]:
        """What the engine hears in place of this."""
        return [news]


class _CallsFailuresGood(Bent):
    def heard(self, news: News) -> list[News]:
        return [evolve(news, ok=True, reason=None) if isinstance(news, Outcome) else news]


class _ForgetsFailures(Bent):
    def heard(self, news: News) -> list[News]:
        return [] if isinstance(news, Outcome) and not news.ok else [news]


class _KeepsReleased(Bent):
    def heard(self, news: News) -> list[News]:
        return [] if isinstance(news, Released) else [news]


class _FreesOnAbort(Bent):
    """Gives blocks back as soon as it aborts, before kvx has released them."""

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        self.made += [Released(event.transfer)] if isinstance(event, Abort) else []
        return [event]


class _KeepsAborted(Bent):
    """Does not listen any more to what becomes of a transfer that its engine has aborted."""

    def __init__(self, options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> None:
        super().__init__(options, layout, regions, epoch=epoch)
        self._aborted: set[str] = set()

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        if isinstance(event, Abort):
            self._aborted.add(event.transfer)
        return [event]

    def heard(self, news: News) -> list[News]:
        return [] if isinstance(news, Released) and news.transfer in self._aborted else [news]


class _NeverEndsAPush(Bent):
    def told(self, event: EngineEvent) -> list[EngineEvent]:
        last = isinstance(event, Stage) and event.mode is Mode.PUSH and event.last
        return [] if last else [event]


class _TurnsBlocksRound(Bent):
    """A consumer hands over the right blocks in the wrong order."""

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        if isinstance(event, Expose) and event.mode is Mode.PUSH:
            return [evolve(event, blocks=_turned(event.blocks))]
        if isinstance(event, Stage) and event.mode is Mode.PULL:
            return [evolve(event, part=evolve(event.part, blocks=_turned(event.part.blocks)))]
        return [event]


def _turned(table: BlockTable) -> BlockTable:
    return BlockTable.of(*(blocks[::-1] for blocks in table.groups))


class _MistakesItsLayout(Bent):
    """Says that heads come before tokens in a block: right as long as blocks are moved whole."""

    def described(self, layout: Layout) -> Layout:
        groups = tuple(evolve(group, packing=Packing.HEADS_TOKENS) for group in layout.groups)
        return evolve(layout, groups=groups)


class _RoundsTheCache(Bent):
    """Changes the lowest bit of one number in each block that has come: too little for another token."""

    def __init__(self, options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> None:
        super().__init__(options, layout, regions, epoch=epoch)
        self._coming: dict[str, BlockTable] = {}

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        if isinstance(event, Expose) and event.mode is Mode.PUSH:
            self._coming[event.transfer] = event.blocks
        if isinstance(event, Stage) and event.mode is Mode.PULL:
            self._coming[event.transfer] = event.part.blocks
        return [event]

    def heard(self, news: News) -> list[News]:
        if isinstance(news, Outcome) and news.ok and (table := self._coming.pop(news.transfer, None)) is not None:
            layer = self.layout.groups[0].layers[0]
            base = self.regions[layer.region].base + layer.offset
            for block in table.groups[0]:
                ctypes.c_uint8.from_address(base + block * layer.stride).value ^= 1
        return [news]


class _DiesOfFailures(Bent):
    """Lets a failed transfer end the thread of its engine."""

    def heard(self, news: News) -> list[News]:
        if isinstance(news, Outcome) and not news.ok:
            raise KvxError(f"transfer {news.transfer} failed: {news.detail}")
        return [news]


class _StumblesOverItsPredecessor(Bent):
    """Keeps a file beside the secret while it lives, by its address, and does not start where there is one."""

    def __init__(self, options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> None:
        self._mine = Path(options.secret_file).with_name(options.listen.replace(":", "-") + ".lock")
        try:
            self._mine.touch(exist_ok=False)
        except FileExistsError as error:
            raise ConfigError(f"{self._mine.name} is there: somebody lives at {options.listen}") from error
        super().__init__(options, layout, regions, epoch=epoch)

    def close(self) -> None:
        super().close()
        self._mine.unlink()


class _TakesTwoAtOnce(Bent):
    """Withdraws each transfer that it would have beside two others."""

    def __init__(self, options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> None:
        super().__init__(options, layout, regions, epoch=epoch)
        self._open: set[str] = set()

    def told(self, event: EngineEvent) -> list[EngineEvent]:
        if not isinstance(event, Claim):
            return [event]
        if len(self._open) >= 2:
            return [event, Abort(event.transfer, Reason.NO_CAPACITY, ticket=event.ticket, address=event.address)]
        self._open.add(event.transfer)
        return [event]

    def heard(self, news: News) -> list[News]:
        if isinstance(news, Outcome):
            self._open.discard(news.transfer)
        return [news]


BENDS: Mapping[str, type[Bent]] = {
    "straight": Bent,
    "calls_failures_good": _CallsFailuresGood,
    "forgets_failures": _ForgetsFailures,
    "keeps_released": _KeepsReleased,
    "frees_on_abort": _FreesOnAbort,
    "keeps_aborted": _KeepsAborted,
    "never_ends_a_push": _NeverEndsAPush,
    "turns_blocks_round": _TurnsBlocksRound,
    "mistakes_its_layout": _MistakesItsLayout,
    "rounds_the_cache": _RoundsTheCache,
    "dies_of_failures": _DiesOfFailures,
    "stumbles_over_its_predecessor": _StumblesOverItsPredecessor,
    "takes_two_at_once": _TakesTwoAtOnce,
}
"""By the name that `kvx_conformance.suite.broken_adapters` gives each."""


def main() -> None:
    bend, module, *arguments = sys.argv[1:]
    # Before the adapter is imported, which takes it from there by name.
    with mock.patch.object(instance, "open_instance", BENDS[bend]):
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
