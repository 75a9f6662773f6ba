"""What must hold in a simulated world once it has come to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from kvx.core.model import FenceScope, Mode, Role
from kvx_conformance.fabric import Process
from kvx_conformance.plans import Plan
from kvx_conformance.toy_engine import Engine, Job

if TYPE_CHECKING:
    from kvx_conformance.sim import World


@define(eq=False)
class Verdict:
    """Complains to the fabric of everything that is not as it has to be."""

    _world: World
    _quarantined: list[tuple[Engine, set[str]]] = field(factory=list)

    def at_rest(self) -> None:
        """After everything that was to happen: nothing is open except quarantine with a reason."""
        for engine in self._world.engines:
            if not engine.dead:
                self._check_engine(engine)
        for plan in self._world.plans:
            self._check_plan(plan)

    def healed(self) -> None:
        """After everybody who could not answer was started anew: no quarantine is left (R1)."""
        for engine, transfers in self._quarantined:
            kept = transfers & set(engine.pool.owner.values())
            for process in engine.processes:
                opened = process.endpoint.snapshot()["open"]
                kept |= transfers & set(opened if isinstance(opened, dict) else ())
            if kept and not engine.dead:
                self._world.fabric.violation(f"{engine.name} keeps {kept} although every writer is proven dead")

    def _check_engine(self, engine: Engine) -> None:
        complain = self._world.fabric.violation
        stuck: set[str] = set()
        for process in engine.processes:
            snapshot = process.endpoint.snapshot()
            opened = snapshot["open"]
            assert isinstance(opened, dict)
            stuck |= opened.keys()
            self._world.quarantined += len(opened)
            for transfer, states in opened.items():
                if "fencing" not in states:
                    complain(f"{transfer} is still open at {process.name}: {states}")
                elif not self._excused(transfer, process):
                    complain(f"{transfer} is quarantined at {process.name} without a reason: {states}")
            counted = snapshot["counts"]
            assert isinstance(counted, dict)
            ended = sum(number for name, number in counted.items() if name != "started")
            if counted.get("started", 0) != ended and not opened:
                complain(f"{process.name} started {counted.get('started', 0)} transfers and ended {ended}: {counted}")
            if not opened and process.endpoint.deadline() is not None:
                complain(f"{process.name} still waits for {process.endpoint.deadline()}: {snapshot}")
        self._quarantined.append((engine, stuck))
        for transfer, job in engine.jobs.items():
            self._check_job(engine, transfer, job, transfer in stuck)
        held = engine.pool.size - len(engine.pool.free)
        if held and not stuck:
            complain(f"{held} blocks of {engine.name} never came back: {engine.pool.owner}")

    def _check_job(self, engine: Engine, transfer: str, job: Job, quarantined: bool) -> None:
        for rank in job.called:
            name = engine.processes[rank].name
            outcome = job.outcomes.get(rank)
            if outcome is None:
                self._world.fabric.violation(f"no Outcome of {transfer} ever came at {name}")
            elif job.took[rank] > self._world.bound(name):
                self._world.fabric.violation(f"the Outcome of {transfer} at {name} took {job.took[rank]:.1f} s")
            if rank in job.handed and rank not in job.released and not quarantined:
                self._world.fabric.violation(f"no Released of {transfer} ever came at {name}")

    def _excused(self, transfer: str, process: Process) -> bool:
        """Quarantine without end has a reason: a writer that can neither answer nor be fenced, nor is proven dead."""
        if any(op.hung and op.transfer == transfer for p in self._world.fabric.processes for op in p.ops.values()):
            return True
        if self._world.fabric.climate.capabilities.fence is not FenceScope.NONE:
            return False
        return any(not p.alive for p in self._world.fabric.processes if p.info.instance != process.info.instance)

    def _check_plan(self, plan: Plan) -> None:
        complain = self._world.fabric.violation
        sides = {key[1:]: found for key, found in self._world.jobs.items() if key[0] == plan.transfer}
        oks = {key: job.ok(len(engine.processes)) for key, (engine, job) in sides.items()}
        readers = [key for key, ok in oks.items() if ok and key[0] is Role.CONSUMER]
        producer = oks.get((Role.PRODUCER, plan.producer), False)
        if len(readers) > 1:
            complain(f"{plan.transfer} was read by {readers}")
        if plan.twisted and readers:
            complain(f"{plan.transfer} is ok although its two sides were told different prompts")
        initiator_ok = producer if plan.mode is Mode.PUSH else bool(readers)
        target_ok = bool(readers) if plan.mode is Mode.PUSH else producer
        side = Role.CONSUMER if plan.mode is Mode.PUSH else Role.PRODUCER
        targets = [engine for (role, _), (engine, _) in sides.items() if role is side]
        if initiator_ok and not target_ok and not any(engine.dead for engine in targets):
            complain(f"{plan.transfer} is ok at its initiator only: {oks}")
        names = {plan.producer, *plan.consumers}
        disturbed = any(self._world.places[name].disturbed for name in names) or names & self._world.fabric.lulls
        # Of two readers of one ticket each may win a rank of the producer, and then neither has all of it.
        split = len(plan.consumers) > 1 and not readers
        hangs = self._world.fabric.climate.op_hangs_forever
        if not disturbed and not hangs and not split and producer != bool(readers):
            complain(f"the sides of {plan.transfer} do not agree: {oks}, {self._reasons(plan)}")
        begun = bool(sides) or (plan.after is None and self._world.plays(plan.transfer, str(plan)))
        if self._world.kind == "calm" and plan.whole and begun and not (producer and readers):
            complain(f"{plan.transfer} failed in a calm world: {self._reasons(plan)}")
        if self._world.kind == "calm" and len(plan.reaches) == 1:
            self._check_lone(plan)

    def _check_lone(self, plan: Plan) -> None:
        """A request that reached one side only costs that side what the rules say, and no more (R5)."""
        limits = self._world.fabric.climate.limits
        (role,) = plan.reaches
        for engine, job in [found for key, found in self._world.jobs.items() if key[:2] == (plan.transfer, role)]:
            wait = limits.patience_s if (plan.mode, role) == (Mode.PUSH, Role.PRODUCER) else limits.lease_s
            bound = (job.work.queue_s + wait + limits.grace_s) * 1.01 + 1.0
            for rank, took in job.took.items():
                if took > bound:
                    name = engine.processes[rank].name
                    self._world.fabric.violation(f"{plan.transfer} cost {name} {took:.1f} s, not {bound:.1f} s")

    def _reasons(self, plan: Plan) -> list[str]:
        return [
            f"{name}#{rank} {outcome.reason.value if outcome.reason else 'ok'}: {outcome.detail}"
            for (transfer, _, name), (_, job) in self._world.jobs.items()
            if transfer == plan.transfer
            for rank, outcome in sorted(job.outcomes.items())
        ]
