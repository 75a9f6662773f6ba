"""A NIXL agent behind a typed door: every exception of it becomes NixlError, and no text of it is unpickled.

Only the official Python API is used, and of it nothing that pickles (`get_serialized_descs` and
`deserialize_descs` do). An agent belongs to one thread: NIXL does not lock.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from attrs import define

from kvx.core.errors import TransportError
from kvx_nixl.backends import Backend
from kvx_nixl.options import Options
from kvx_nixl.regions import Regions, Table

_HEADER = b"nixlSerDes|Agent"
MAX_METADATA = 16 << 20


class NixlError(TransportError):
    """A call into NIXL has failed; the cause has NIXL's own exception."""


@define(eq=False)
class Lists:
    """A pair of prepared lists, local and remote, of one length."""

    local: Any
    remote: Any


class Agent:
    """Raises NixlError, from every method; ImportError from the first where NIXL is not installed."""

    def __init__(self, name: str, backend: Backend, options: Options, regions: Regions) -> None:
        self.name = name
        self.calling: tuple[str, float] | None = None
        """The call into NIXL that has not returned, and since when (monotonic seconds)."""
        api = importlib.import_module("nixl._api")
        self._backends = [backend.name]
        # The progress thread spins for ever, a whole core for each agent: this thread's own loop makes the progress.
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[])
        self._nixl: Any = self._call("creating the agent", api.nixl_agent, name, config)
        self._call(f"loading {backend.name}", self._nixl.create_backend, backend.name, backend.params(options))
        if backend.name not in self._nixl.backends:
            raise NixlError(f"NIXL has no backend {backend.name}")
        self._registered = [
            self._call("registering memory", self._nixl.register_memory, rows, kind, self._backends)
            for kind, rows in regions.rows()
        ]

    def metadata(self) -> bytes:
        return bytes(self._call("metadata", self._nixl.get_agent_metadata))

    def add(self, name: str, metadata: bytes) -> None:
        """Learn of a peer's agent. Its metadata is checked first: NIXL forgets agents over damaged bytes."""
        if agent_of(metadata) != name:
            raise NixlError(f"the metadata is not that of agent {name!r}")
        self.learn(name, metadata)

    def learn(self, name: str, metadata: bytes) -> None:
        """NIXL's own part of it. LIBFABRIC blocks in it until the peer does the same."""
        added = self._call(f"adding {name}", self._nixl.add_remote_agent, metadata)
        if (added.decode() if isinstance(added, bytes) else added) != name:
            raise NixlError(f"NIXL has taken {added!r} from the metadata of {name!r}")

    def remove(self, name: str) -> None:
        self._call(f"removing {name}", self._nixl.remove_remote_agent, name)

    def prepare(self, name: str, local: Table, local_kind: str, remote: Table, remote_kind: str) -> Lists:
        """Check and translate pieces once, for all posts that take them by their index."""
        here = self._call("preparing", self._nixl.prep_xfer_dlist, "NIXL_INIT_AGENT", local, local_kind, self._backends)
        try:
            there = self._call("preparing", self._nixl.prep_xfer_dlist, name, remote, remote_kind, self._backends)
        except NixlError:
            here.release()
            raise
        return Lists(here, there)

    def release(self, lists: Lists) -> None:
        self._call("releasing", lists.local.release)
        self._call("releasing", lists.remote.release)

    def make(self, op: str, lists: Lists, indices: Any, notification: bytes) -> Any:
        """A post of these pieces; nothing of it has begun."""
        return self._call(
            "making a post",
            self._nixl.make_prepped_xfer,
            op,
            lists.local,
            indices,
            lists.remote,
            indices,
            notification,
            self._backends,
        )

    def start(self, post: Any) -> bool:
        """Is it done already? What raises may have begun all the same."""
        return self._done(self._call("posting", self._nixl.transfer, post))

    def check(self, post: Any) -> bool:
        return self._done(self._call("moving", self._nixl.check_xfer_state, post))

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calling = (what, time.monotonic())
        try:
            return function(*arguments)
        except Exception as error:  # NIXL's exceptions have no common base
            raise NixlError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            self.calling = None

    @staticmethod
    def _done(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise NixlError(f"NIXL says {state}")
        return state == "DONE"

    def drop(self, post: Any) -> None:
        """Give back a post that has ended. This does not end one that has not."""
        self._call("releasing a post", post.release)

    def notifications(self) -> dict[str, list[bytes]]:
        """What has arrived since the last call, by the sender's agent; also the call that makes progress."""
        found: dict[str, list[bytes]] = self._call("progress", self._nixl.get_new_notifs)
        return found

    def deregister(self) -> None:
        """Give the memory back. This stops no WRITE that is on its way to it."""
        while self._registered:
            self._call("deregistering", self._nixl.deregister_memory, self._registered.pop())

    def close(self) -> None:
        """Deregister and destroy."""
        self.deregister()
        self._nixl = None


def agent_of(metadata: bytes) -> str:
    """The name in the head of an agent's metadata. Raises NixlError."""
    if len(metadata) > MAX_METADATA:
        raise NixlError(f"metadata of {len(metadata)} bytes")
    start = len(_HEADER) + 8
    length = int.from_bytes(metadata[len(_HEADER) : start], "little")
    if not metadata.startswith(_HEADER) or length > 1024 or len(metadata) <= start + length:
        raise NixlError("this is no agent's metadata")
    try:
        return metadata[start : start + length].decode()
    except UnicodeDecodeError as error:
        raise NixlError("this is no agent's metadata") from error
