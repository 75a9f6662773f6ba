"""`kvx conformance interop`: each engine as P with each engine as D. Is the cache taken over, or refused in words?

Engines may speak unlike dialects, so no router stands before them: P is asked in P's dialect and D in D's, with the
same transfer. A pair holds when D has moved the bytes and answers with the tokens of a single instance, or when no
byte has moved, somebody has said why, and D answers with those tokens or with an error. Both servers run on.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import asdict, field, frozen

from kvx import demo, plugins
from kvx.cluster import Child
from kvx.core.errors import KvxError
from kvx.core.model import Mode, Role
from kvx.driver import EngineDriver
from kvx.up import Node, Say, Site, site
from kvx_conformance.suite.servers import SHORT, until

ANSWER_S = 90.0
"""Longest answer to one leg; with the options of SHORT each transfer is over long before."""
LEAVE_S = 5.0
"""How long the client of the prefill leg stays when the decode leg is over."""
SETTLE_S = 30.0
"""How long the decode instance may take to tell of a transfer whose request was answered."""
_TOLD = 700
"""Characters of what an engine says."""


@frozen
class Cell:
    """What became of one request: prefill at `producer`, decode at `consumer`.

    `moved`: bytes, as D's event log has them. `reason` and `detail`: why none were; the detail is that of kvx, or
    the engine's own error where kvx was not reached. `tokens_equal`: to those of a single instance, None where D
    answered with an error. `seconds`: until both legs were answered.
    """

    producer: str
    consumer: str
    mode: str
    moved: int
    reason: str
    detail: str
    tokens_equal: bool | None
    running: bool
    seconds: float

    @property
    def holds(self) -> bool:
        if not self.running or self.tokens_equal is False:
            return False
        return bool(self.moved and self.tokens_equal) or bool(not self.moved and self.detail)

    @property
    def verdict(self) -> str:
        if not self.holds:
            return "BROKEN"
        return "joined" if self.moved else "refused"

    def fields(self) -> dict[str, Any]:
        """As the JSON has it."""
        return {"verdict": self.verdict, **asdict(self)}


@frozen
class _Place:
    """One engine: a server in each role, one to compare with, and where its decode server logs outcomes."""

    name: str
    site: Site
    prefill: Node
    decode: Node
    alone: Child
    events: Path

    @property
    def driver(self) -> EngineDriver:
        return self.site.driver


def perform(names: Sequence[str], seed: int, say: Say, *, same_model: bool) -> list[Cell]:
    """Every ordered pair of these engines, with itself too, in each mode of either.

    Each serves its own small model, or, with `same_model`, that of the first one, so that nothing but the engines
    differs. Raises as `kvx.up.site` does.
    """
    draw = random.Random(seed)  # noqa: S311 - data
    cells = []
    with _places(names, say, same_model) as places:
        ranges = [place.site.small.tokens for place in (places[:1] if same_model else places)]
        tokens = range(max(one.start for one in ranges), min(one.stop for one in ranges))
        for producer, consumer, mode in itertools.product(places, places, Mode):
            if mode in producer.driver.modes | consumer.driver.modes:
                cell = _attempt(producer, consumer, mode, partial(draw.choice, tokens))
                say(f"{producer.name} -> {consumer.name}, {mode.value}: {cell.verdict} after {cell.seconds:.1f} s")
                cells.append(cell)
    return cells


def line(cell: Cell) -> str:
    """What a person reads of one pair."""
    pair = f"{cell.producer} -> {cell.consumer}, {cell.mode}:"
    if not cell.holds:
        return f"{pair} BROKEN {cell.fields()}"
    if cell.moved:
        return f"{pair} joined, {cell.moved} bytes, the tokens of a single instance"
    then = "the tokens of a single instance" if cell.tokens_equal else "an error" if cell.seconds else "not asked"
    return f"{pair} refused, {cell.reason or 'by the engine'}: {cell.detail} (client: {then})"


def table(folder: Path) -> str:
    """The kept runs as Markdown: a row for each pair, with what stands in the way."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for pair in content["pairs"]:
            names = [f"{name} {content['engines'][name]}" for name in (pair["producer"], pair["consumer"])]
            why = f"{pair['reason']}: {pair['detail']}" if pair["reason"] else pair["detail"]
            what = f"{pair['moved']} bytes" if pair["moved"] else f"`{why}`"
            got = {True: "tokens of a single instance", False: "wrong tokens", None: "an error"}[pair["tokens_equal"]]
            answer = got if pair["seconds"] else "not asked"
            rows.append(f"| {' | '.join([*names, pair['mode'], pair['verdict'], what, answer])} |")
    head = "| P | D | mode | verdict | moved, or why not | D's client got |"
    return "\n".join([head, "|---" * 6 + "|", *rows]) + "\n"


@contextmanager
def _places(names: Sequence[str], say: Say, same_model: bool) -> Generator[list[_Place], None, None]:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(site(names[0], "", (), say))
        model = first.model if same_model else ""
        sites = [first]
        for name in names[1:]:
            arguments = plugins.load().driver(name).small_model(model).arguments if model else ()
            sites.append(stack.enter_context(site(name, model, arguments, say)))
        places = [_start(name, one, first.secret_file) for name, one in zip(names, sites, strict=True)]
        for one in sites:
            one.wait_ready()
        yield places


def _start(name: str, place: Site, secret_file: Path) -> _Place:
    events = place.cluster.logs / "interop.jsonl"
    shared = {**SHORT, "secret_file": str(secret_file)}
    prefill = place.engine("prefill", Role.PRODUCER, **shared)
    decode = place.engine("decode", Role.CONSUMER, **shared, event_log=str(events))
    # Not the decode server, which may have kept wrong bytes that came to it.
    alone = place.single("single") if place.driver.has_roles else prefill.child
    return _Place(name, place, prefill, decode, alone, events)


def _attempt(producer: _Place, consumer: _Place, mode: Mode, token: Callable[[], int]) -> Cell:
    for one in (producer, consumer):
        if mode not in one.driver.modes:
            able = ", ".join(sorted(other.value for other in one.driver.modes))
            return _cell(producer, consumer, mode, detail=f"{one.name} cannot {mode.value}, only {able}")
    prompt = [token() for _ in range(3 * _block(producer, consumer) + 1)]
    seen = len(_outcomes(consumer))
    started = time.monotonic()
    prefill, decode = _ask_both(producer, consumer, mode, prompt)
    seconds = time.monotonic() - started
    until(lambda: len(_outcomes(consumer)) > seen, SETTLE_S if decode.tokens else 0.0)
    outcomes = _outcomes(consumer)[seen:]
    wanted = demo.generate(consumer.alone.url, consumer.site.model, prompt).tokens
    last = outcomes[-1] if outcomes else {}
    return _cell(
        producer,
        consumer,
        mode,
        moved=sum(int(one["bytes"]) for one in outcomes),
        reason="" if last.get("ok") else str(last.get("reason") or ""),
        detail="" if last.get("ok") else str(last.get("detail") or decode.error or prefill.error),
        tokens_equal=list(decode.tokens) == wanted if decode.tokens else None,
        seconds=round(seconds, 3),
    )


@frozen
class _Answer:
    """What one leg got: a body with tokens, or the words of the engine, or of the connection to it."""

    body: Mapping[str, Any] = field(factory=dict)
    tokens: tuple[int, ...] = ()
    error: str = ""


def _ask_both(producer: _Place, consumer: _Place, mode: Mode, prompt: Sequence[int]) -> tuple[_Answer, _Answer]:
    """Both legs, each in the dialect of its engine: in push at once, in pull one after the other."""
    transfer = secrets.token_hex(16)
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": demo.MAX_TOKENS}
    body = {"prompt": list(prompt), **fixed}
    node = producer.prefill
    own = node.address or node.control
    # Where an engine's servers have roles, they meet at another port than the control channel's.
    met = own if consumer.driver.has_roles else node.control
    first = producer.driver.dialect.prefill_leg(
        {**body, "model": producer.site.model}, mode, transfer, prefill_address=own
    )
    with _asked(node.url, first) as asked:
        known = _answer(asked, ANSWER_S).body if mode is Mode.PULL else None
        second = {**body, "model": consumer.site.model}
        try:
            second = consumer.driver.dialect.decode_leg(
                second, mode, transfer, prefill_answer=known, prefill_address=met
            )
        except KvxError as error:
            return _Answer(known or {}), _Answer(error=str(error))
        with _asked(consumer.decode.url, second) as other:
            decode = _answer(other, ANSWER_S)
        # A prefill server may wait for a consumer that never comes: this client leaves then, as a router's does.
        return _Answer(known) if known is not None else _answer(asked, LEAVE_S), decode


@contextmanager
def _asked(url: str, body: Mapping[str, Any]) -> Generator[http.client.HTTPConnection, None, None]:
    """One request under way; the client leaves when the block ends."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    with contextlib.closing(connection):
        with contextlib.suppress(OSError):  # whoever asks for the answer is told
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield connection


def _answer(connection: http.client.HTTPConnection, limit_s: float) -> _Answer:
    try:
        if connection.sock is not None:
            connection.sock.settimeout(limit_s)
        answer = connection.getresponse()
        content: Any = json.loads(answer.read())
        if answer.status == 200:
            return _Answer(content, tuple(content["choices"][0]["token_ids"]))
        return _Answer(error=f"{answer.status} {content}")
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        return _Answer(error=f"no answer: {str(error) or type(error).__name__}")


def _cell(producer: _Place, consumer: _Place, mode: Mode, **found: Any) -> Cell:
    fields = {"moved": 0, "reason": "", "detail": "", "tokens_equal": None, "seconds": 0.0, **found}
    running = producer.prefill.child.running and consumer.decode.child.running
    detail = " ".join(fields.pop("detail").split())[:_TOLD]
    return Cell(producer.name, consumer.name, mode.value, detail=detail, running=running, **fields)


def _outcomes(place: _Place) -> list[dict[str, Any]]:
    lines = place.events.read_text(encoding="utf-8").splitlines() if place.events.exists() else []
    return [json.loads(one) for one in lines]


def _block(*places: _Place) -> int:
    return max(one.site.small.block_size for one in places)
