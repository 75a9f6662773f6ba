"""Instances that are broken on purpose: what the protocol cases are tested with.

Each is the real one, but for its endpoint, which is bent at its public door: what goes in, or what comes out.
The functions here have the signature of `kvx.instance.open_instance`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from attrs import evolve

from kvx import instance
from kvx.config import Options
from kvx.core.endpoint import Endpoint
from kvx.core.events import Abort, Action, Event, Fence, Fenced, Forbid, Forbidden, Post, Received, Report, Send
from kvx.core.messages import Ack, Done, Hello, Renew, Stopped
from kvx.core.model import Layout, Outcome, Region, Released, Ticket
from kvx.engine import EngineInstance
from kvx_conformance.suite.broken import Broken
from kvx_conformance.suite.subject import Subject

Opener = Callable[..., EngineInstance]


class Bent(Endpoint):
    """An endpoint whose actions pass through `bend_one`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.marked: set[str] = set()
        """Transfers that it treats in another way from now on."""

    def handle(self, event: Event, now: float) -> list[Action]:
        return self.bend(super().handle(event, now), now)

    def expire(self, now: float) -> list[Action]:
        return self.bend(super().expire(now), now)

    def bend(self, actions: list[Action], now: float) -> list[Action]:
        return [bent for action in actions for bent in self.bend_one(action, now)]

    def bend_one(self, action: Action, now: float) -> list[Action]:
        """What is done in place of this action."""
        return [action]


def _failed(action: Action) -> Outcome | None:
    news = action.news if isinstance(action, Report) else None
    return news if isinstance(news, Outcome) and not news.ok else None


class _LeaksOnFailure(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        if (failed := _failed(action)) is not None:
            self.marked.add(failed.transfer)
        news = action.news if isinstance(action, Report) else None
        leaks = isinstance(news, Released) and news.transfer in self.marked
        return [] if leaks else [action]


class _SwallowsErrors(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        failed = _failed(action)
        return [action if failed is None else Report(evolve(failed, ok=True, reason=None))]


class _ReportsTwice(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        told = isinstance(action, Report) and isinstance(action.news, Outcome)
        return [action, action] if told else [action]


class _HidesFailures(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        return [] if _failed(action) else [action]


class _Spins(Bent):
    def deadline(self) -> float | None:
        return 0.0


class _BelievesAnyEpoch(Bent):
    def handle(self, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received) and not isinstance(event.envelope.message, Hello):
            sender = self.peers.sender(event.link)
            if sender is not None:
                envelope = evolve(event.envelope, from_epoch=sender.info.epoch, to_epoch=self.info.epoch)
                event = evolve(event, envelope=envelope)
        return super().handle(event, now)


def _said(action: Action, kind: type[Ack | Done | Renew | Stopped]) -> bool:
    return isinstance(action, Send) and isinstance(action.envelope.message, kind)


class _AcksStrangers(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        message = action.envelope.message if isinstance(action, Send) else None
        if isinstance(action, Send) and isinstance(message, Ack) and not message.ok and not message.body:
            return [evolve(action, envelope=evolve(action.envelope, message=Ack(message.transfer, True)))]
        return [action]


class _IgnoresMacs(Bent):
    def ticket_holds(self, ticket: Ticket) -> bool:
        return (ticket.grant.owner.instance, ticket.grant.epoch) == (self.info.instance, self.info.epoch)


class _DoneIsEnough(Bent):
    """Tells its engine that all is well as soon as it has said Done, and never what comes of it."""

    def bend_one(self, action: Action, now: float) -> list[Action]:
        if isinstance(action, Send) and isinstance(action.envelope.message, Done):
            transfer = action.envelope.message.transfer
            first = transfer not in self.marked
            self.marked.add(transfer)
            return [action, Report(Outcome(transfer, True)), Report(Released(transfer))] if first else [action]
        news = action.news if isinstance(action, Report) else None
        return [] if isinstance(news, Outcome | Released) and news.transfer in self.marked else [action]


class _NeverSaysStopped(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        return [] if _said(action, Stopped) else [action]


class _NoKeepalive(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        silent = isinstance(action, Send) and action.envelope.message == Renew(echo=True)
        return [] if silent else [action]


class _NeverRenews(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        message = action.envelope.message if isinstance(action, Send) else None
        return [] if isinstance(message, Renew) and message.transfers else [action]


class _FreesWithoutForbid(Bent):
    """Says to itself that its transport forbids what it was never asked to."""

    def bend_one(self, action: Action, now: float) -> list[Action]:
        return self.handle(Forbidden(action.transfer), now) if isinstance(action, Forbid) else [action]


class _ReleasesEarly(Bent):
    """Gives blocks back the moment that its engine aborts, whoever may still write to them."""

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        if isinstance(event, Abort) and event.transfer not in self.marked and not self._told(actions, event.transfer):
            self.marked.add(event.transfer)
            actions = [*actions, Report(Released(event.transfer))]
        return actions

    def bend_one(self, action: Action, now: float) -> list[Action]:
        news = action.news if isinstance(action, Report) else None
        return [] if isinstance(news, Released) and news.transfer in self.marked else [action]

    @staticmethod
    def _told(actions: list[Action], transfer: str) -> bool:
        return Report(Released(transfer)) in actions


class _FreesTheFailed(Bent):
    """Gives blocks back with the word that their transfer has failed, whoever may still write to them."""

    def bend_one(self, action: Action, now: float) -> list[Action]:
        if (failed := _failed(action)) is not None:
            self.marked.add(failed.transfer)
            return [action, Report(Released(failed.transfer))]
        news = action.news if isinstance(action, Report) else None
        return [] if isinstance(news, Released) and news.transfer in self.marked else [action]


class _ForgetsGenerations(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        return [evolve(action, stamp=evolve(action.stamp, generation=0)) if isinstance(action, Post) else action]


class _FencesNobody(Bent):
    def bend_one(self, action: Action, now: float) -> list[Action]:
        if not isinstance(action, Fence):
            return [action]
        return self.handle(Fenced(action.peer, action.generation), now)


def _opener(endpoint: type[Endpoint]) -> Opener:
    def open_instance(options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> EngineInstance:
        with mock.patch.object(instance, "Endpoint", endpoint):
            return instance.open_instance(options, layout, regions, epoch=epoch)

    return open_instance


def reuses_epoch(options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> EngineInstance:
    """The epoch that its first start might have had, whatever it is given."""
    return instance.open_instance(options, layout, regions, epoch=4711)


def hangs_on_close(options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> EngineInstance:
    """`close` waits for something that never happens."""
    opened = instance.open_instance(options, layout, regions, epoch=epoch)
    assert isinstance(opened, instance.Instance)
    opened.close = _never
    return opened


def _never() -> None:
    threading.Event().wait()


leaks_on_failure = _opener(_LeaksOnFailure)
swallows_errors = _opener(_SwallowsErrors)
reports_twice = _opener(_ReportsTwice)
hides_failures = _opener(_HidesFailures)
spins = _opener(_Spins)
believes_any_epoch = _opener(_BelievesAnyEpoch)
acks_strangers = _opener(_AcksStrangers)
ignores_macs = _opener(_IgnoresMacs)
done_is_enough = _opener(_DoneIsEnough)
never_says_stopped = _opener(_NeverSaysStopped)
no_keepalive = _opener(_NoKeepalive)
never_renews = _opener(_NeverRenews)
frees_without_forbid = _opener(_FreesWithoutForbid)
releases_early = _opener(_ReleasesEarly)
frees_the_failed = _opener(_FreesTheFailed)
forgets_generations = _opener(_ForgetsGenerations)
fences_nobody = _opener(_FencesNobody)

REGION = "kvx_conformance.faults:region_access"
"""A transport that can neither forbid nor fence."""
FENCING = "kvx_conformance.suite.correct_transports:Fencing"
"""One that can fence, and cannot forbid."""


def _broken(name: str, cause: str, *found_by: str, transport: str = "tcp") -> tuple[str, Broken]:
    return name, Broken(Subject(transport, instance=f"{__name__}:{name}"), cause, found_by)


CORRECT_INSTANCES: Mapping[str, Subject] = {"kvx": Subject("tcp"), "kvx_without_forbid": Subject(REGION)}

BROKEN_INSTANCES: Mapping[str, Broken] = dict(
    (
        _broken("reuses_epoch", "It has the same epoch after each start.", "KVX-EPO-001.as-given"),
        _broken("leaks_on_failure", "It never releases the blocks of a transfer that failed.", "KVX-LEG-004.aborted"),
        _broken("swallows_errors", "It tells its engine that a failed transfer is done.", "KVX-LEG-004.aborted"),
        _broken("reports_twice", "It tells each outcome twice.", "KVX-LEG-004.aborted", "KVX-UNK-004.one-letter"),
        _broken("hides_failures", "It never tells that a transfer has failed.", "KVX-LEG-004.aborted"),
        _broken("spins", "Its thread never waits.", "KVX-TIM-008.rests"),
        _broken("hangs_on_close", "`close` never returns.", "KVX-DRN-005.close"),
        _broken("believes_any_epoch", "It acts on messages of other starts.", "KVX-EPO-002.wrong-epochs"),
        _broken("acks_strangers", "It answers Ack(true) to every Done.", "KVX-ACK-003", "KVX-TKT-003.second-reader"),
        _broken("ignores_macs", "It does not look at the MAC of a ticket.", "KVX-TKT-001.forged"),
        _broken("done_is_enough", "It uses bytes before Ack(true).", "KVX-ACK-002.waits-for-it"),
        _broken("never_says_stopped", "It stops and does not say so.", "KVX-RVK-002.stops", "KVX-RVK-003"),
        _broken("no_keepalive", "It sends no sign of life.", "KVX-EPO-006.keepalive"),
        _broken("never_renews", "It does not renew what it holds.", "KVX-TIM-002.each-third", "KVX-TKT-004.queueing"),
        _broken("frees_without_forbid", "It frees blocks that may still be written.", "KVX-RVK-001.late-write"),
        _broken("forgets_generations", "It moves bytes under generation 0.", "KVX-DAT-003.stamp"),
        _broken(
            "fences_nobody",
            "It takes a fence for done that it never asked for.",
            "KVX-FEN-001.older-grants",
            transport=FENCING,
        ),
        _broken(
            "releases_early",
            "It gives blocks back at an abort, before Stopped.",
            "KVX-RVK-001.pinned",
            "KVX-FEN-003.outcome-first",
            transport=REGION,
        ),
        _broken(
            "frees_the_failed",
            "It gives blocks back when a transfer has failed, before its writer is proven dead.",
            "KVX-FEN-002.quarantine",
            transport=REGION,
        ),
    )
)
"""By name; `found_by` are cases that have to find each."""
