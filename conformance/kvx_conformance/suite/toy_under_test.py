"""A toy engine on the instance under test."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from kvx.config import Options
from kvx.core import wire
from kvx.core.errors import KvxError
from kvx.core.model import BlockTable, Grant, InstanceInfo, Mode, Offered, Outcome, Released, Role, Ticket
from kvx.engine import EngineInstance
from kvx_conformance.actor import Actor, Call, seed_of
from kvx_conformance.suite.case import Context, Finding
from kvx_conformance.suite.scripted import SHAPE, guarded, region_of

CALM: Mapping[str, float] = {
    "lease_s": 12.0,
    "patience_s": 12.0,
    "part_gap_s": 12.0,
    "op_timeout_s": 12.0,
    "drain_limit_s": 2.0,
    "grace_s": 3.0,
    "quarantine_s": 0.2,
    "transfer_max_s": 30.0,
    "keepalive_s": 2.0,
    "lost_s": 6.0,
    "ack_wait_s": 12.0,
    "handshake_s": 6.0,
}
"""Bounds that no case comes near unless it shortens one of them; seconds."""
TOKENS = 60
"""Of a prompt: three whole blocks and a part of a fourth."""
BLOCKS = 4
_BYSTANDER = 5


class Toy:
    """A toy engine on the instance under test. It polls when the encounter is served."""

    def __init__(self, context: Context, name: str, key: str, epoch: int, options: Mapping[str, Any]) -> None:
        subject = context.subject
        self.name = name
        self.actor = Actor(SHAPE, 0, seed_of(name))
        taken = self.actor.pool.take("bystander", [2], context.rng)
        assert taken is not None
        self._bystander: BlockTable = taken
        self.actor.cache.fill(_BYSTANDER, (0,), taken, None)
        self.told: dict[str, list[Outcome | Released | Offered]] = {}
        self.key = key.encode()
        settings: dict[str, Any] = {
            "instance": name,
            "listen": "127.0.0.1:0",
            "transports": [subject.transport],
            subject.transport: dict(subject.options),
            **{bound: seconds * context.pace for bound, seconds in CALM.items()},
            **options,
            **({"secret": key} if key else {}),
        }
        loaded = Options.load(settings, env={})
        opener = guarded("instance", subject.opener)
        region = region_of(self.actor.cache)
        self.kvx: EngineInstance = opener(loaded, self.actor.layout, [region], epoch=epoch)
        context.enter(closing(self))

    @classmethod
    def open(cls, context: Context, name: str, key: str, epoch: int, options: Mapping[str, Any]) -> Toy:
        """Raises KvxError where the instance refuses to begin; any other exception of it is a Finding."""
        try:
            return cls(context, name, key, epoch, options)
        except KvxError:
            raise
        except Exception as error:
            raise Finding(f"`open_instance` raised {type(error).__name__}: {error}") from error

    @property
    def info(self) -> InstanceInfo:
        return self.kvx.info

    def close(self) -> None:
        guarded(self.name, self.kvx.close)

    def call(
        self,
        do: str,
        transfer: str,
        mode: Mode,
        *,
        address: str | None = None,
        ticket: Ticket | None = None,
        **more: Any,
    ) -> None:
        """What an engine says, see `actor.Call`; the producer of a transfer is `producer`, by default this toy."""
        facts: dict[str, Any] = {"producer": self.name, "tokens": TOKENS, **more}
        call = Call(self.name, do, transfer, mode, **facts)
        lease_s = CALM["lease_s"] if call.lease_s is None else call.lease_s
        if len(self.actor.pool.free) < BLOCKS and transfer not in self.actor.jobs and do in ("expose", "stage"):
            raise Finding(f"no blocks are left: those of {', '.join(self.kept())} were never released")
        event = self.actor.call(call, address=address, ticket=ticket, lease_s=lease_s)
        guarded(self.name, self.kvx.put, [event])

    def serve(self) -> None:
        for news in guarded(self.name, self.kvx.news):
            transfer = news.grant.transfer if isinstance(news, Offered) else news.transfer
            self.told.setdefault(transfer, []).append(news)
            self.actor.hear(news)

    def outcomes(self, transfer: str) -> list[Outcome]:
        return [news for news in self.told.get(transfer, ()) if isinstance(news, Outcome)]

    def released(self, transfer: str) -> bool:
        return any(isinstance(news, Released) for news in self.told.get(transfer, ()))

    def ticket(self, transfer: str, lease_s: float | None = None) -> Ticket:
        """The ticket for what was exposed, as `kvx.instance.make_ticket` makes it."""
        first, blocks = self.actor.table(transfer)
        grant = Grant(
            transfer=transfer,
            owner=self.info.peer,
            epoch=self.info.epoch,
            generation=0,
            mode=Mode.PULL,
            first=(first,),
            blocks=blocks,
            tokens=TOKENS,
            lease_s=CALM["lease_s"] if lease_s is None else lease_s,
            address=self.info.address,
        )
        return wire.make_ticket(grant, self.key)

    def flaws(self) -> list[str]:
        """What must never be, at any time."""
        found = self.actor.flaws()
        found += [f"a bystander's {flaw}" for flaw in self._changed(_BYSTANDER, 0, self._bystander, 32)]
        for transfer, job in self.actor.jobs.items():
            if job.role is Role.PRODUCER and job.blocks and job.finished and not job.given_back:
                changed = self._changed(job.content, job.first, BlockTable.of(job.blocks), job.tokens)
                found += [f"{transfer}: a producer's blocks were written: {flaw}" for flaw in changed]
        return found

    def _changed(self, content: int, first: int, blocks: BlockTable, tokens: int) -> list[str]:
        return self.actor.cache.flaws(content, (first,), blocks, tokens)

    def kept(self) -> list[str]:
        """Transfers whose blocks have not come back."""
        return [transfer for transfer, job in self.actor.jobs.items() if job.blocks and not job.given_back]
