"""Entry point: the reference engine's driver. Importing this costs nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.driver import EngineDriver


@hookimpl
def kvx_drivers() -> Mapping[str, EngineDriver]:
    from kvx_reference.driver import ReferenceDriver

    return {"reference": ReferenceDriver()}
