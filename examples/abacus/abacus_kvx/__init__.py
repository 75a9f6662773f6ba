"""The plugin: kvx loads this module in every engine process, so it imports the driver when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.driver import EngineDriver


@hookimpl
def kvx_drivers() -> Mapping[str, EngineDriver]:
    from abacus_kvx.driver import AbacusDriver

    return {"abacus": AbacusDriver()}
