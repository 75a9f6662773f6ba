"""The driver port: how kvx starts an engine's servers and puts a request to them.

A driver lives outside of the engine: in the router, in tests, in `kvx doctor`. It never imports
the engine; it knows its command line and its HTTP dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import frozen

from kvx.core.model import Mode, Role


@frozen
class Server:
    """One server that shall be started.

    `model` is a folder or name as the engine takes it, `port` its HTTP port on `host`. `options`
    are kvx's (see `kvx.config.Options`); None starts the engine without kvx, as a single
    instance. `arguments` are appended to the engine's command line as they are. `role` and
    `meeting_port`, a further free port, are only looked at by an engine whose servers have roles.
    """

    model: str
    port: int
    host: str = "127.0.0.1"
    options: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    role: Role | None = None
    meeting_port: int | None = None


@frozen
class Launch:
    """How to start it: a command, what to add to the environment, and the path that answers 200 when it serves.

    `address` is HOST:PORT that a router has to be told of this prefill server (`--prefill URL=HOST:PORT`);
    empty: the router asks the server.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    ready_path: str
    address: str = ""


@frozen
class SmallModel:
    """A small random model for demos and tests, which the engine serves on any machine.

    `make` is the command that writes it, in seconds; `arguments` are those of each `Server` of it, `block_size` is
    in tokens and `tokens` are the ids that a prompt may hold. `cache_regions`: only so many of the
    regions that an instance registers, the first ones, hold KV cache; None: all do.
    """

    make: tuple[str, ...]
    arguments: tuple[str, ...]
    block_size: int
    tokens: range
    cache_regions: int | None = None


@frozen
class RequestInfo:
    """What is known of a request before it is sent anywhere. Counts are in tokens, None where unknown."""

    model: str
    prompt_tokens: int | None = None
    max_tokens: int | None = None


@frozen
class Probe:
    """What an instance tells of itself over HTTP: the control addresses of its ranks, and who it is.

    `free_blocks`: the share of its KV blocks that are free, None where it does not say.
    """

    instance: str
    epoch: int
    addresses: tuple[str, ...]
    dp_rank: int
    dp_size: int
    fingerprint: str
    free_blocks: float | None = None


class Dialect(Protocol):
    """How one request becomes two: bodies of HTTP requests in, bodies out. Pure; nothing is changed in place."""

    @property
    def can_withdraw(self) -> bool:
        """Whether `transfer` is the id that the instances use, by which a push can be withdrawn from its producer."""
        ...

    def prefill_leg(
        self, body: Mapping[str, Any], mode: Mode, transfer: str, *, prefill_address: str | None = None
    ) -> dict[str, Any]:
        """The body for the prefill instance: one token, not streamed.

        `transfer` is the id of this attempt; in pull it is not used, since the producer draws one.
        `prefill_address`: as the router knows it.
        """
        ...

    def decode_leg(
        self,
        body: Mapping[str, Any],
        mode: Mode,
        transfer: str,
        *,
        prefill_answer: Mapping[str, Any] | None = None,
        prefill_address: str | None = None,
    ) -> dict[str, Any]:
        """The body for the decode instance.

        Pull needs the prefill instance's answer, push its control address; without it KvxError.
        """
        ...

    def ticket(self, prefill_answer: Mapping[str, Any]) -> str | None:
        """The text of the ticket in a prefill answer, with which it can be released; None: there is none."""
        ...

    def probe_request(self, model: str) -> dict[str, Any]:
        """A body that makes an instance answer with its Probe and costs one token."""
        ...

    def read_probe(self, answer: Mapping[str, Any]) -> Probe:
        """The Probe in that answer. Raises RemoteProtocolError where it is missing or malformed."""
        ...


class EngineDriver(Protocol):
    """One engine."""

    @property
    def dialect(self) -> Dialect: ...

    @property
    def tested(self) -> str:
        """The versions that kvx is tested with, such as `0.32.*`."""
        ...

    @property
    def modes(self) -> frozenset[Mode]:
        """What its servers can do."""
        ...

    @property
    def has_roles(self) -> bool:
        """Whether a server with kvx either prefills or decodes, as its `role` says, and serves no request alone."""
        ...

    def installed(self) -> str | None:
        """The engine's version in this environment, without importing it; None: it is not here."""
        ...

    def launch(self, server: Server) -> Launch:
        """Raises ConfigError where the server cannot be started so."""
        ...

    def small_model(self, folder: str) -> SmallModel:
        """The model for demos and tests, to be written into `folder`; it fits prompts of 16 blocks."""
        ...
