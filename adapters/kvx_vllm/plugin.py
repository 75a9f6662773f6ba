"""Entry points: kvx's own hooks, and vLLM's `general_plugins`. Importing this costs nothing heavy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.drift import Adapter
    from kvx.driver import EngineDriver

CONNECTOR = "KvxConnector"


@hookimpl
def kvx_drivers() -> Mapping[str, EngineDriver]:
    from kvx_vllm.driver import VllmDriver

    return {"vllm": VllmDriver()}


@hookimpl
def kvx_interfaces() -> Mapping[str, Adapter]:
    from kvx_vllm.interface import VLLM

    return {"vllm": VLLM}


def register() -> None:
    """Make `KvxConnector` known by name. vLLM calls this in each process, maybe more than once.

    Where the command line asks for kvx with options that cannot work, the first process ends here:
    one sentence, exit status 2. Nothing else that goes wrong keeps vLLM from starting.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, "kvx_vllm.connector", CONNECTOR)
            _look_ahead()
    except Exception:  # a plugin must not keep its host from starting
        logging.getLogger("vllm.kvx").exception("kvx: %s could not be registered with this vLLM", CONNECTOR)


def _look_ahead() -> None:
    from multiprocessing import parent_process

    if parent_process() is not None:
        return
    from kvx.core.errors import ConfigError
    from kvx_vllm import preflight

    settings = preflight.settings_on(sys.argv, CONNECTOR)
    if settings is None:
        return
    try:
        preflight.check(settings)
    except ConfigError as error:
        sys.stderr.write(f"kvx cannot start: {error}\n")
        raise SystemExit(2) from None
