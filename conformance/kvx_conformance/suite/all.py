"""Importing this fills `case.CASES` with the whole standard suite."""

from __future__ import annotations

from kvx_conformance.suite import (
    adapter,
    adapter_bytes,
    adapter_leaving,
    adapter_many,
    protocol_ending,
    protocol_epochs,
    protocol_grants,
    protocol_hello,
    protocol_moving,
    protocol_over,
    protocol_scenarios,
    protocol_time,
    protocol_wire,
    transport_bounds,
    transport_ending,
    transport_moving,
    transport_peers,
    transport_permits,
    transport_processes,
    transport_resources,
)
from kvx_conformance.suite.case import CASES

__all__ = [
    "CASES",
    "adapter",
    "adapter_bytes",
    "adapter_leaving",
    "adapter_many",
    "protocol_ending",
    "protocol_epochs",
    "protocol_grants",
    "protocol_hello",
    "protocol_moving",
    "protocol_over",
    "protocol_scenarios",
    "protocol_time",
    "protocol_wire",
    "transport_bounds",
    "transport_ending",
    "transport_moving",
    "transport_peers",
    "transport_permits",
    "transport_processes",
    "transport_resources",
]
