"""Importing this fills `case.CASES` with the whole standard suite."""

from __future__ import annotations

from kvx_conformance.suite import adapter, transport_bounds, transport_moving
from kvx_conformance.suite.case import CASES

__all__ = ["CASES", "adapter", "transport_bounds", "transport_moving"]
