"""kvx moves the KV cache of LLM requests between prefill and decode instances, by push or by pull."""

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
from kvx.core.model import Mode, Outcome, Reason, Released

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "KvxError",
    "LayoutMismatch",
    "LocalProtocolError",
    "Mode",
    "Outcome",
    "PluginError",
    "Reason",
    "Released",
    "RemoteProtocolError",
    "TransportError",
    "__version__",
]
