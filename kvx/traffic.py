"""What each transport of a rank has moved, and where another one had to take its place: for status and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, define

_COUNTS = {
    "bytes": "Bytes moved by operations of this rank.",
    "operations": "Operations of this rank that ended well.",
    "failed": "Operations of this rank that failed or were cancelled.",
    "fallbacks": "Times that another transport took the place of this one.",
}

Family = tuple[str, str, str, list[tuple[Mapping[str, str], float]]]
"""Name, type, help and samples of a metric."""


@define
class Traffic:
    """Counts of one transport. Who starts an operation counts it: a push its producer, a pull its consumer."""

    bytes: int = 0
    operations: int = 0
    failed: int = 0
    fallbacks: int = 0
    last_fallback: str = ""
    """To whom, and why; empty: there was none."""

    def moved(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.operations += 1

    def fell_back(self, peer: str, why: str) -> None:
        self.fallbacks += 1
        self.last_fallback = f"{peer}: {why}"


def table(
    traffic: Mapping[str, Traffic], routes: Mapping[str, str], left_out: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    """By transport: its counts and the peers that it serves (`routes`: peer to transport), or why it is left out."""
    found: dict[str, dict[str, object]] = {
        name: {**asdict(one), "peers": sorted(peer for peer, used in routes.items() if used == name)}
        for name, one in traffic.items()
    }
    return {**found, **{name: {"left_out": why} for name, why in left_out.items()}}


def families(address: str, status: Mapping[str, Any]) -> list[Family]:
    """The same table as metrics, from the status of the rank at `address`."""
    rows: Mapping[str, Mapping[str, Any]] = status.get("transports", {})
    here = {name: row for name, row in rows.items() if "left_out" not in row}

    def labels(name: str) -> dict[str, str]:
        return {"rank": address, "transport": name}

    counts: list[Family] = [
        (f"kvx_transport_{key}_total", "counter", text, [(labels(name), row[key]) for name, row in here.items()])
        for key, text in _COUNTS.items()
    ]
    peers = [(labels(name), len(row["peers"])) for name, row in here.items()]
    left_out = [(labels(name), name not in here) for name in rows]
    return [
        *counts,
        ("kvx_transport_peers", "gauge", "Peers to which this rank uses this transport.", [*peers]),
        ("kvx_transport_left_out", "gauge", "1: it is configured and does not work on this rank.", [*left_out]),
    ]
