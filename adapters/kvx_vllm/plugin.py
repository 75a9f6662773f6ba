"""Entry points: kvx's own hooks, and vLLM's `general_plugins`. Importing this costs nothing heavy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.driver import EngineDriver

CONNECTOR = "KvxConnector"


@hookimpl
def kvx_drivers() -> Mapping[str, EngineDriver]:
    from kvx_vllm.driver import VllmDriver

    return {"vllm": VllmDriver()}


def register() -> None:
    """Make `KvxConnector` known by name. vLLM calls this in each process, maybe more than once; it never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, "kvx_vllm.connector", CONNECTOR)
    except Exception:  # a plugin must not keep its host from starting
        logging.getLogger("vllm.kvx").exception("kvx: %s could not be registered with this vLLM", CONNECTOR)
