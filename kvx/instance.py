"""The composition root: everything that one rank of an engine needs, made from its options."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from kvx import plugins
from kvx.address import format_address, parse_address
from kvx.config import Options
from kvx.control import ControlChannel
from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.errors import ConfigError, LayoutMismatch, PluginError, RemoteProtocolError, TransportError
from kvx.core.legs import Limits
from kvx.core.model import (
    BlockTable,
    Capabilities,
    Grant,
    InstanceInfo,
    Layout,
    Mode,
    Outcome,
    Peer,
    Region,
    Ticket,
)
from kvx.engine import EngineInstance
from kvx.memory import Memory
from kvx.runtime import Runtime
from kvx.tracing import EventLog
from kvx.transport import Access, FenceScope, Transport

_log = logging.getLogger(__name__)


class Instance:
    """What an adapter holds: the runtime and who it is. See `kvx.engine.EngineInstance`."""

    def __init__(self, info: InstanceInfo, runtime: Runtime) -> None:
        self.info = info
        self._runtime = runtime
        self.put = runtime.put
        self.news = runtime.news
        self.snapshot = runtime.snapshot
        self.close = runtime.close


def open_instance(options: Options, layout: Layout, regions: Sequence[Region], *, epoch: int) -> EngineInstance:
    """Start kvx for rank `layout.rank` of the instance that `options` describe.

    `epoch` is the value that all processes of this start share. Raises ConfigError where the
    options cannot work here (a port in use, memory of an unknown kind), PluginError for a
    transport that is missing or broken, TransportError for memory that cannot be registered.
    """
    loaded = plugins.load()
    rank = layout.rank
    own = options.at_rank(rank)
    control = ControlChannel(own.listen, handshake_s=options.handshake_s, clock=_clock, loopback_only=_closed(options))
    transports: dict[str, Transport] = {}
    try:
        left_out = _open_transports(transports, options, loaded, regions, rank)
        info = _describe(options, layout, control, epoch, tuple(transports))
        metadata = {name: transport.metadata() for name, transport in transports.items()}
        event_log = EventLog(options.event_log, str(info.peer)) if options.event_log else None
    except BaseException:
        control.close()
        for transport in transports.values():
            transport.close()
        raise

    def observe(outcome: Outcome) -> None:
        loaded.transfer_finished(outcome)
        if event_log is not None:
            event_log.write(outcome)

    def choose(remote: InstanceInfo) -> str:
        name = loaded.choose_transport(info, remote)
        if name is None:
            raise LayoutMismatch("transports", info.transports, remote.transports)
        return name

    def capabilities(remote: InstanceInfo | None) -> Capabilities:
        if remote is None:
            return next(iter(transports.values())).capabilities
        choose(remote)
        return weakest([transports[name].capabilities for name in transports if name in remote.transports])

    endpoint = Endpoint(
        info,
        capabilities=capabilities,
        entropy=os.urandom,
        key=options.secret,
        limits=_limits(options),
        metadata=metadata,
        integrity=options.integrity == "crc",
    )
    runtime = Runtime(
        endpoint,
        control,
        transports,
        Memory(regions),
        choose=choose,
        left_out=left_out,
        observe=observe,
        clock=_clock,
    )
    return Instance(info, runtime)


def _open_transports(
    into: dict[str, Transport], options: Options, loaded: plugins.Plugins, regions: Sequence[Region], rank: int
) -> dict[str, str]:
    """Make the transports that work here, and tell why others do not. Raises what the last one raises if none does."""
    left_out = {}
    for name in options.transports:
        try:
            into[name] = loaded.make_transport(name, options.transport_section(name, rank))
            into[name].register(regions)
        except (PluginError, TransportError) as error:
            failed = into.pop(name, None)
            if failed is not None:
                failed.close()
            if not into and name == options.transports[-1]:
                raise
            left_out[name] = str(error)
            _log.warning("transport %r is left out: %s", name, error)
    return left_out


def weakest(capabilities: Sequence[Capabilities]) -> Capabilities:
    """What holds whichever of these transports moves the bytes: each side chooses for its own operations, and may
    fall back, without a word to the other."""
    return Capabilities(
        ops=frozenset.intersection(*(one.ops for one in capabilities)),
        access=Access.GRANT if all(one.access is Access.GRANT for one in capabilities) else Access.REGION,
        fence=FenceScope.PEER if all(one.fence is FenceScope.PEER for one in capabilities) else FenceScope.NONE,
        cancel=all(one.cancel for one in capabilities),
        memory=frozenset.intersection(*(one.memory for one in capabilities)),
        max_descriptors=min(one.max_descriptors for one in capabilities),
        max_in_flight=min(one.max_in_flight for one in capabilities),
    )


def make_ticket(
    options: Options,
    *,
    epoch: int,
    transfer: str,
    first: tuple[int, ...],
    blocks: BlockTable,
    tokens: int,
    lease_s: float,
) -> str:
    """The ticket of a pull transfer as text: a pure function, so an engine's scheduler can make it.

    It is good for one reader, while the Expose of the same transfer is alive on every rank.
    """
    grant = Grant(
        transfer=transfer,
        owner=Peer(options.instance, 0),
        epoch=epoch,
        generation=0,
        mode=Mode.PULL,
        first=first,
        blocks=blocks,
        tokens=tokens,
        lease_s=lease_s,
        address=options.advertise,
    )
    return wire.ticket_text(wire.make_ticket(grant, options.secret))


def read_ticket(options: Options, text: str) -> Ticket:
    """A ticket from a request. Raises RemoteProtocolError: not a ticket, or made with another secret."""
    ticket = wire.parse_ticket(text)
    if not wire.ticket_holds(ticket, options.secret):
        raise RemoteProtocolError("the ticket is forged, or made with another secret")
    return ticket


def _describe(
    options: Options, layout: Layout, control: ControlChannel, epoch: int, transports: tuple[str, ...]
) -> InstanceInfo:
    host, port = parse_address(options.advertise)
    if port == 0:
        if layout.ranks > 1:
            raise ConfigError("option listen: port 0 works for an instance of one rank only; name a port")
        port = parse_address(control.address)[1]
    addresses = tuple(format_address(host, port + rank) for rank in range(layout.ranks))
    return InstanceInfo(
        instance=options.instance,
        rank=layout.rank,
        epoch=epoch,
        address=addresses[layout.rank],
        layout=layout,
        transports=transports,
        addresses=addresses,
    )


def _closed(options: Options) -> bool:
    return not options.secret and not options.insecure


def _limits(options: Options) -> Limits:
    return Limits(
        patience_s=options.patience_s,
        part_gap_s=options.part_gap_s,
        op_timeout_s=options.op_timeout_s,
        drain_limit_s=options.drain_limit_s,
        grace_s=options.grace_s,
        quarantine_s=options.quarantine_s,
        transfer_max_s=options.transfer_max_s,
        keepalive_s=options.keepalive_s,
        lost_s=options.lost_s,
        ack_wait_s=options.ack_wait_s,
        handshake_s=options.handshake_s,
        lease_s=options.lease_s,
    )


def _clock() -> float:
    """Seconds of the one clock: monotonic, not stopped by a step of the wall clock."""
    return time.monotonic()
