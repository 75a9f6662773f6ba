"""The router of a simulated world: brings requests to both sides, and tickets from one to the other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from kvx.core import wire
from kvx.core.model import Grant, Mode, Peer, Reason, Role, Ticket
from kvx_conformance.plans import Plan, need_of
from kvx_conformance.toy_engine import Engine, Job, Steps, Work

if TYPE_CHECKING:
    from kvx_conformance.sim import World


@frozen
class GivenUp:
    """One side's engine gives a request up, so long after the request has come."""

    name: str
    after: float
    reason: Reason


@define(eq=False)
class Traffic:
    """All requests of one world."""

    _world: World
    _aborts: dict[str, GivenUp] = field(factory=dict)

    def begin(self) -> None:
        """Draw who gives up what, and schedule every first turn."""
        for plan in self._world.plans:
            self._draw_abort(plan)
            if self._world.plays(plan.transfer, str(plan)) and plan.after is None:
                self._schedule(plan, self._world.chance("request", plan.transfer).uniform(0.0, self._world.span))

    def _draw_abort(self, plan: Plan) -> None:
        rng = self._world.chance("abort", plan.transfer)
        if self._world.kind == "calm" or rng.random() > 0.45:
            return
        after = rng.choice((rng.uniform(0.0, 0.5), rng.uniform(0.0, 8.0)))
        abort = GivenUp(rng.choice(plan.names), after, rng.choice((Reason.ABORTED, Reason.PREEMPTED)))
        what = f"{abort.name} gives {plan.transfer} up ({abort.reason.value}) after {abort.after:.2f} s"
        if self._world.plays(f"abort-{plan.transfer}", what):
            self._aborts[plan.transfer] = abort

    def ended_well(self, transfer: str) -> None:
        """The consumer's engine has all of it: the next turn goes the other way."""
        for plan in self._world.plans:
            if plan.after == transfer and self._world.plays(plan.transfer, str(plan)):
                pause = self._world.chance("request", plan.transfer).uniform(0.0, 0.5)
                self._schedule(plan, self._world.clock.now + pause)

    def _schedule(self, plan: Plan, start: float) -> None:
        """Both sides hear of it some time apart; in pull the consumer only after the ticket is made."""
        rng, limits = self._world.chance("request", plan.transfer), self._world.fabric.climate.limits
        apart = rng.choice((0.0, 0.05, 0.3 * limits.lease_s))
        if plan.mode is Mode.PUSH:
            if Role.PRODUCER in plan.reaches:
                self._world.clock.at(
                    start + rng.choice((0.0, apart)), lambda: self._work(plan, Role.PRODUCER, plan.producer)
                )
            if Role.CONSUMER in plan.reaches:
                at = start + rng.choice((0.0, apart))
                self._world.clock.at(at, lambda: self._work(plan, Role.CONSUMER, plan.consumers[0]))
        else:
            self._world.clock.at(start, lambda: self._work(plan, Role.PRODUCER, plan.producer))
        abort = self._aborts.get(plan.transfer)
        if abort is not None:
            self._world.clock.at(start + abort.after, lambda: self._abort(plan, abort))

    def _work(self, plan: Plan, role: Role, name: str, ticket: Ticket | None = None) -> None:
        engine = self._world.places[name].engine
        if engine.dead:
            return
        rng, limits = self._world.chance("work", plan.transfer, role.value, name), self._world.fabric.climate.limits
        claims = rng.random() < 0.4 and (plan.mode is Mode.PUSH or role is Role.CONSUMER)
        address = (
            self._world.places[plan.producer].address(0) if plan.mode is Mode.PUSH and role is Role.CONSUMER else None
        )
        queue = rng.choice((0.0, 0.0, rng.uniform(0.0, 1.0)))
        if claims and role is Role.CONSUMER:
            queue = rng.choice((queue, rng.uniform(0.3, 0.8) * limits.patience_s))
        work = Work(
            transfer=plan.transfer,
            mode=plan.mode,
            role=role,
            content=plan.content,
            tokens=plan.tokens + (plan.twisted and role is Role.CONSUMER),
            need=need_of(plan, name, engine.layout),
            lease_s=limits.lease_s,
            address=address,
            ticket=ticket,
            claims=claims,
            steps=rng.choice(tuple(Steps)),
            pace_s=rng.choice((0.01, 0.1, 1.0)),
            queue_s=queue,
            late_s=rng.choice((0.0, 0.0, 0.0, 0.3)),
            stubborn=rng.random() < 0.2,
        )
        job = engine.accept(work)
        self._world.jobs[(plan.transfer, role, name)] = (engine, job)
        self._world.ordeal.moving(plan, role)
        if plan.mode is Mode.PULL and role is Role.PRODUCER and Role.CONSUMER in plan.reaches:
            self._await_ticket(plan, engine, job)

    def _await_ticket(self, plan: Plan, engine: Engine, job: Job) -> None:
        """The router gets the ticket once blocks are there, and takes its time to pick a consumer."""
        if engine.dead or job.failed:
            return
        if job.blocks is None:
            self._world.clock.after(0.05, lambda: self._await_ticket(plan, engine, job))
            return
        info = engine.processes[0].info
        grant = Grant(
            transfer=plan.transfer,
            owner=Peer(info.instance, 0),
            epoch=info.epoch,
            generation=0,
            mode=Mode.PULL,
            first=job.first,
            blocks=job.blocks,
            tokens=job.work.tokens,
            lease_s=job.work.lease_s,
            address=info.address,
        )
        ticket = wire.parse_ticket(wire.ticket_text(wire.make_ticket(grant, self._world.key)))
        rng = self._world.chance("router", plan.transfer)
        for name in plan.consumers:
            delay = rng.choice((0.0, 0.01, rng.uniform(0.0, 0.4) * job.work.lease_s))
            self._world.clock.after(delay, partial(self._work, plan, Role.CONSUMER, name, ticket))

    def _abort(self, plan: Plan, abort: GivenUp) -> None:
        engine = self._world.places[abort.name].engine
        if not engine.dead:
            at_once = abort.reason is Reason.PREEMPTED
            self._world.stats["aborts"] += engine.abort(plan.transfer, abort.reason, at_once=at_once)
