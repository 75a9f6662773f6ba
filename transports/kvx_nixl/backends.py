"""NIXL's backends: what each is given, and how much may be in flight.

Completion, for both: a WRITE is done when the target has seen its notification, which NIXL
delivers after the bytes, and has said so over the bell. LIBFABRIC asks for no delivery-complete
semantics, so its own DONE of a WRITE is local; for UCX the word of the target costs one message
and needs no trust in what a flush means on each of UCX's transports. A READ is done when NIXL
says so: its bytes are then in this process's memory.
"""

from __future__ import annotations

import ctypes
import os

from attrs import frozen

from kvx.core.errors import ConfigError
from kvx_nixl.efa import devices
from kvx_nixl.options import Options

_PIECES = (512, 2048)
_EFA_PIECES = (96, 192)
"""EFA's throughput collapses beyond about 240 operations in flight."""


@frozen
class Backend:
    """One of NIXL's backends that move bytes between hosts."""

    name: str
    max_peers: int
    """Agents that one agent can meet in its life, removed ones too."""

    def pieces(self, options: Options) -> tuple[int, int]:
        """Most pieces in one post, and in flight to one peer."""
        on_efa = self.name == "LIBFABRIC" and options.provider in ("", "efa") and bool(devices())
        post, window = _EFA_PIECES if on_efa else _PIECES
        return options.post_pieces or post, options.window_pieces or window

    def check(self, options: Options) -> None:
        """Raises ConfigError where the backend would listen beyond loopback and may not."""
        if self.name != "UCX" and not self._may_leave_loopback(options):
            raise ConfigError("libfabric listens beyond loopback: set a secret, or trusted_network = true")

    @staticmethod
    def _may_leave_loopback(options: Options) -> bool:
        return options.open_to_the_network or options.trusted_network

    def prepare(self, options: Options) -> None:
        """Make the backend's libraries loadable. Raises OSError."""
        if options.provider:
            os.environ.setdefault("FI_PROVIDER", options.provider)
        # NIXL and libibverbs read these when they are loaded. Children made by fork share the parent's pinned
        # pages otherwise, and the first write of either side after it moves the page away from the device.
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        os.environ.setdefault("RDMAV_FORK_SAFE", "1")
        for library in options.preload:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)

    def params(self, options: Options) -> dict[str, str]:
        """The backend's own parameters."""
        params = dict(options.params)
        if self.name == "UCX":
            devices = options.devices or ("" if self._may_leave_loopback(options) else "lo")
            engine = [f"TLS={options.tls}"] if options.tls else []
            engine += [f"NET_DEVICES={devices}"] if devices else []
            if engine:
                params.setdefault("engine_config", ",".join(engine))
        return params


UCX = Backend("UCX", max_peers=1 << 20)
LIBFABRIC = Backend("LIBFABRIC", max_peers=240)
"""It numbers peers with 8 bits and never again; measured: the 256th is refused."""
