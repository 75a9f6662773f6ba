"""An engine's own servers on this machine, as the cases of an adapter see them: over HTTP and the control channel."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import define, frozen

from kvx import demo
from kvx.cluster import Child
from kvx.config import Options, bounds
from kvx.core.errors import ConfigError, KvxError, PluginError
from kvx.core.model import Mode, Role
from kvx.operator import ask
from kvx.up import Node, Site, site
from kvx_conformance.suite.case import Context, Finding, NotExercised
from kvx_conformance.suite.subject import CountsBlocks, CutsOtherwise, ReadsCache

GATED = "kvx_conformance.faults:gated"
UNSTOPPABLE = "kvx_conformance.faults:StubbornRegionAccess"
"""The same gate before writes that a target can neither keep out nor have cancelled, as with RDMA."""
SHORT: dict[str, Any] = {
    "lease_s": 10,
    "patience_s": 20,
    "part_gap_s": 10,
    "op_timeout_s": 6,
    "drain_limit_s": 3,
    "grace_s": 4,
    "keepalive_s": 1,
    "lost_s": 3,
    "ack_wait_s": 5,
    "quarantine_s": 2,
}
"""Options that make every bound short enough to be waited for, at pace 1."""
SEEN_S = 60.0
"""How long a transfer may take to be seen on both sides, on a machine that computes slowly."""
_SPARE_S = 5.0
"""What a bound leaves to the engine itself: to recompute, to answer, to free."""
_POLL_S = 0.05


@define
class Servers:
    """Prefill, decode, and a router of one mode before them; a gate holds every moved byte back while it is shut.

    `single` is a server without kvx, of an engine whose servers have roles and do not serve alone.
    """

    place: Site
    context: Context
    mode: Mode
    prefill: Node
    decode: Node
    router: Child
    gate: Path
    single: Child | None = None

    def bound_s(self, failure: str) -> float:
        """By when both engines have their outcome, with what the engine itself needs (`kvx.config.BOUNDS`)."""
        return (bounds(Options.load(SHORT, env={}))[failure] + _SPARE_S) * self.context.pace

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        return [[self.context.rng.choice(self.place.small.tokens) for _ in range(length)] for length in lengths]

    def through(self, prompt: Sequence[int], router: Child | None = None) -> list[int]:
        """The tokens that a client of the router gets."""
        return self._tokens((router or self.router).url, prompt)

    def alone(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a single instance: of one without kvx, or of a server that has only what it computed itself.

        The decode server, which may have kept what came to it, is asked where the prefill server lives no more.
        """
        lives = self.prefill.child.running
        return self._tokens((self.single or (self.prefill if lives else self.decode).child).url, prompt)

    def start(self, prompt: Sequence[int], *, max_tokens: int = demo.MAX_TOKENS, stream: bool = False) -> Client:
        """A client that has sent its request and waits."""
        return Client.ask(self.router.url, self.place.model, prompt, max_tokens=max_tokens, stream=stream)

    def open(self, node: Node) -> dict[str, Any]:
        """The open transfers as an instance's status has them."""
        secret = self.place.secret_file.read_bytes()
        with _guarded(f"status of {node.child.name}"):
            answer = ask(node.control, "status", secret=secret, timeout_s=10 * self.context.pace)
            found: dict[str, Any] = json.loads(answer.body)["open"]
            return found

    def free_blocks(self, node: Node) -> int:
        """As the engine's driver counts them; only for cases that need Feature.BLOCKS."""
        driver = self.place.driver
        assert isinstance(driver, CountsBlocks)
        with _guarded(f"free blocks of {node.child.name}"):
            return driver.free_blocks(node.url)

    def raw_kv(self, node: Node, tokens: Sequence[int]) -> bytes:
        """The cache itself, as the engine's driver reads it; only for cases that need Feature.RAW."""
        driver = self.place.driver
        assert isinstance(driver, ReadsCache)
        with _guarded(f"the cache of {node.child.name}"):
            return driver.raw_kv(node.url, tokens)

    def received(self) -> int:
        """How many transfers the decode server's event log calls good."""
        log = _log(self.place)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return sum(bool(json.loads(line)["ok"]) for line in lines)

    def drain(self, node: Node) -> None:
        """Open transfers may run on for ten seconds."""
        secret = self.place.secret_file.read_bytes()
        with _guarded(f"drain of {node.child.name}"):
            answer = ask(node.control, "drain", "10", secret=secret, timeout_s=10 * self.context.pace)
        if not answer.ok:
            raise Finding(f"{node.child.name} refuses to be drained: {answer.detail}")

    def begun(self) -> None:
        """Wait until both sides hold the one transfer. Raises NotExercised."""
        if not until(lambda: self.open(self.prefill) and self.open(self.decode), SEEN_S * self.context.pace):
            raise NotExercised("No transfer was open on both sides.")

    def kill(self, node: Node) -> None:
        """SIGKILL to the whole server."""
        node.child.signal(signal.SIGKILL)
        with _guarded(f"kill of {node.child.name}"):
            self.place.cluster.stop(node.child)

    def replace_prefill(self) -> None:
        """Start it again at its old addresses."""
        with _guarded("restart of the prefill server"):
            options = _options(self.context, self.gate, self.place, GATED, demo.DROPPING)
            self.prefill = self.place.engine("prefill-again", Role.PRODUCER, instead_of=self.prefill, **options)
            self.place.wait_ready(self.prefill.child)

    def replace_decode(self) -> None:
        """Start it again at its old addresses."""
        with _guarded("restart of the decode server"):
            options = {**_options(self.context, self.gate, self.place, GATED), "event_log": str(_log(self.place))}
            self.decode = self.place.engine("decode-again", Role.CONSUMER, instead_of=self.decode, **options)
            self.place.wait_ready(self.decode.child)

    @contextmanager
    def standing_still(self, node: Node) -> Generator[None, None, None]:
        """The whole server is stopped inside of the block."""
        node.child.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            node.child.signal(signal.SIGCONT)

    def _tokens(self, url: str, prompt: Sequence[int]) -> list[int]:
        with _guarded(f"a request of {len(prompt)} tokens"):
            return demo.generate(url, self.place.model, prompt).tokens


@frozen
class Client:
    """One request under way."""

    connection: http.client.HTTPConnection

    @classmethod
    def ask(cls, url: str, model: str, prompt: Sequence[int], *, max_tokens: int, stream: bool) -> Client:
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, **fixed}
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=demo.ANSWER_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return cls(connection)

    def leave(self) -> None:
        """Close the connection without an answer."""
        self.connection.close()

    def first_event(self, limit_s: float) -> str:
        """The first line of a streamed answer, at most `limit_s` seconds from now. Raises Finding where none comes."""
        self._wait_at_most(limit_s)
        with _guarded("the first event of a stream"):
            return self.connection.getresponse().readline().decode()

    def _wait_at_most(self, limit_s: float) -> None:
        sock = self.connection.sock
        assert isinstance(sock, socket.socket)
        sock.settimeout(limit_s)

    def answer(self, limit_s: float) -> tuple[int, list[int]]:
        """Status and tokens, at most `limit_s` seconds from now. Raises Finding where none comes."""
        self._wait_at_most(limit_s)
        with _guarded("the answer to the client"), contextlib.closing(self.connection):
            response = self.connection.getresponse()
            content = response.read()
        if response.status != 200:
            return response.status, []
        with _guarded("the answer's body"):
            return 200, list(json.loads(content)["choices"][0]["token_ids"])


@contextmanager
def servers(
    context: Context, mode: Mode, gated: str = GATED, *, cut: Role | None = None
) -> Generator[Servers, None, None]:
    """Servers of the subject's engine over its transport behind a gate, gone with everything when the block ends.

    The cache of the one in role `cut` is cut in another way than the other's; only with Feature.CUT.
    """
    gate = context.folder / "gate"
    with contextlib.ExitStack() as stack:
        with _guarded("the start of the servers"):
            place = stack.enter_context(site(context.subject.engine, "", (), _say))
            options = _options(context, gate, place, gated, demo.DROPPING)
            with _cut(place, cut is Role.PRODUCER):
                prefill = place.engine("prefill", Role.PRODUCER, **options)
            options = {**_options(context, gate, place, gated), "event_log": str(_log(place))}
            with _cut(place, cut is Role.CONSUMER):
                decode = place.engine("decode", Role.CONSUMER, **options)
            single = place.single("single") if place.driver.has_roles else None
            place.wait_ready()
            router = place.router("router", [prefill], [decode], mode)
            place.wait_ready(router)
        yield Servers(place, context, mode, prefill, decode, router, gate, single)


@contextmanager
def _cut(place: Site, otherwise: bool) -> Generator[None, None, None]:
    """Servers that are started inside of the block are cut `otherwise`."""
    usual = place.arguments
    if otherwise:
        assert isinstance(place.driver, CutsOtherwise)
        place.arguments = (*usual, *place.driver.other_cut())
    try:
        yield
    finally:
        place.arguments = usual


def _log(place: Site) -> Path:
    """Where the decode server says what it has received."""
    return place.cluster.logs / "decode.jsonl"


def control(bench: Servers) -> tuple[Node, Child]:
    """A further decode server, whose transport says that every byte has come and moves none, and its router."""
    with _guarded("the start of the control"):
        options = _options(bench.context, bench.gate, bench.place, demo.DROPPING)
        node = bench.place.engine("control", Role.CONSUMER, **options)
        bench.place.wait_ready(node.child)
        router = bench.place.router("control-router", [bench.prefill], [node], bench.mode)
        bench.place.wait_ready(router)
    return node, router


def until(condition: Callable[[], object], limit_s: float) -> bool:
    """Whether it came true within the limit, seconds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _options(context: Context, gate: Path, place: Site, *transports: str) -> dict[str, Any]:
    """Of an instance that has these wrappers of the subject's transport."""
    inner = {**context.subject.options, "inner": context.subject.transport}
    own: dict[str, dict[str, Any]] = {GATED: {"gate": str(gate)}, UNSTOPPABLE: {"gate": str(gate)}}
    if place.small.cache_regions is not None:
        own[demo.DROPPING] = {"regions": place.small.cache_regions}
    short = {name: seconds * context.pace for name, seconds in SHORT.items()}
    return {**short, "transports": list(transports), **{name: {**inner, **own.get(name, {})} for name in transports}}


@contextmanager
def _guarded(what: str) -> Generator[None, None, None]:
    """What the servers do not do is a Finding that names the call."""
    try:
        yield
    except (ConfigError, PluginError):
        raise  # the suite's own mistake, or this machine's
    except (KvxError, OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise Finding(f"{what}: {str(error) or type(error).__name__}") from error


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
