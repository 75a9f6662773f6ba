"""kvx moves the KV cache of LLM requests between prefill and decode instances, by push or by pull.

Engines import this package in each of their processes, so it holds what is cheap: the errors and
the version. Options are in `kvx.config`, the protocol's values in `kvx.core.model`, and
`kvx.instance.open_instance` is where an adapter begins.
"""

from __future__ import annotations

from kvx.core.errors import (
    ConfigError,
    KvxError,
    LayoutMismatch,
    LocalProtocolError,
    PluginError,
    RemoteProtocolError,
    TransportError,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "KvxError",
    "LayoutMismatch",
    "LocalProtocolError",
    "PluginError",
    "RemoteProtocolError",
    "TransportError",
    "__version__",
]
