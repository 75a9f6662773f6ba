"""`kvx demo`: a small model, real servers, and the question whether moved cache gives the same tokens.

The prefill server, asked without transfer parameters, is the single instance to compare with; an
engine whose servers have roles starts one more. A second decode server is the control: it differs
in its transport, which says that all KV cache has come and moves none of it. If tokens were equal
there too, equality would prove nothing.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from kvx import report
from kvx.cluster import Child
from kvx.core.errors import KvxError
from kvx.core.model import Mode, Role
from kvx.driver import SmallModel
from kvx.up import Say, Site, site

DROPPING = "kvx_conformance.faults:dropping"
"""The control's transport, by its factory; nothing else is told to drop bytes."""
MAX_TOKENS = 16
ANSWER_S = 120.0
"""Longest wait for the next piece of an answer."""
EVENTS_S = 10.0
"""Longest wait for the last line of an event log."""
_MAX_BLOCKS = 15


class DemoError(KvxError):
    """A server has answered a request with an error."""


@frozen
class Generation:
    """The answer to one request: its tokens, and the seconds until the first of them."""

    tokens: list[int]
    ttft_s: float


@frozen
class Pair:
    """A decode server behind its router, and the file to which it writes what it has received."""

    router: Child
    events: Path


@frozen
class Result:
    """One mode. `bytes` and `transfers_ok` count what the decode server says it has received."""

    mode: Mode
    requests: int
    tokens_equal: int
    control_tokens_equal: int
    transfers_ok: int
    ttft_ms: Mapping[str, float]
    bytes: int

    @property
    def good(self) -> bool:
        return self.tokens_equal == self.transfers_ok == self.requests and self.control_tokens_equal < self.requests

    def fields(self) -> dict[str, Any]:
        """As the JSON has it."""
        names = ("requests", "tokens_equal", "control_tokens_equal", "transfers_ok", "ttft_ms", "bytes")
        return {"mode": self.mode.value, **{name: getattr(self, name) for name in names}}


def run(
    engine: str,
    mode: Mode | None,
    requests: int,
    say: Say,
    transport: str = "tcp",
    section: Mapping[str, Any] | None = None,
) -> list[Result]:
    """One result for `mode`, or for each that the engine can; `section` holds the transport's options.

    Raises as `kvx.up.site` does, and DemoError.
    """
    given: dict[str, Any] = {transport: dict(section)} if section else {}
    with site(engine, "", (), say, mode) as place:
        logs = place.cluster.logs
        cache = place.small.cache_regions
        dropped: dict[str, Any] = {} if cache is None else {DROPPING: {"regions": cache}}
        prefill = place.engine("prefill", Role.PRODUCER, transports=[transport, DROPPING], **given, **dropped)
        log = str(logs / "decode.jsonl")
        decode = place.engine("decode", Role.CONSUMER, transports=[transport], **given, event_log=log)
        log = str(logs / "control.jsonl")
        control = place.engine("control", Role.CONSUMER, transports=[DROPPING], **dropped, event_log=log)
        alone = place.single("single") if place.driver.has_roles else prefill.child
        say(f"starting {engine} servers: prefill, decode, and the control, whose transport drops the cache's bytes")
        place.wait_ready()
        results = []
        for seed, chosen in enumerate([mode] if mode else [one for one in Mode if one in place.driver.modes]):
            pairs = [
                Pair(place.router(f"router-{chosen.value}-{name}", [prefill], [node], chosen), logs / f"{name}.jsonl")
                for name, node in (("decode", decode), ("control", control))
            ]
            place.wait_ready(*(pair.router for pair in pairs))
            results.append(_compare(place, alone, pairs[0], pairs[1], chosen, prompts(place.small, requests, seed)))
        return results


def prompts(small: SmallModel, count: int, seed: int) -> list[list[int]]:
    """Random prompts whose lengths lie around block borders, from one block to fifteen."""
    draw = random.Random(seed)  # noqa: S311 - data of a demo
    lengths = [(1 + i * _MAX_BLOCKS // count) * small.block_size + i % 3 - 1 for i in range(count)]
    return [[draw.choice(small.tokens) for _ in range(length)] for length in lengths]


def table(results: Sequence[Result]) -> list[str]:
    """What a person reads."""
    lines = [f"{'mode':<6}{'tokens equal':>14}{'bytes dropped':>16}{'TTFT median':>14}{'KV moved':>12}"]
    for one in results:
        equal, control = (f"{n} of {one.requests}" for n in (one.tokens_equal, one.control_tokens_equal))
        ttft, moved = f"{one.ttft_ms['median']:.1f} ms", f"{one.bytes / 2**20:.1f} MiB"
        lines.append(f"{one.mode.value:<6}{equal:>14}{control:>16}{ttft:>14}{moved:>12}")
    return lines


def verdict(results: Sequence[Result]) -> str:
    """One sentence."""
    for one in results:
        if one.transfers_ok < one.requests:
            return f"BAD: {one.requests - one.transfers_ok} transfers of {one.mode.value} failed; see the servers' logs"
        if one.tokens_equal < one.requests:
            return f"BAD: with {one.mode.value}, tokens differ from those of a single instance"
        if not one.good:
            return f"BAD: with {one.mode.value}, tokens are equal even where every byte was dropped: nothing is proven"
    return "Good: prefill here and decode there gives a single instance's tokens; without the moved bytes it does not."


def _compare(
    place: Site, single: Child, pair: Pair, control: Pair, mode: Mode, work: Sequence[Sequence[int]]
) -> Result:
    place.say(f"{mode.value}: {len(work)} requests, each in three ways")
    equal = control_equal = 0
    ttft = []
    for prompt in work:
        moved = generate(pair.router.url, place.model, prompt)
        dropped = generate(control.router.url, place.model, prompt)
        # The last of the three, so that the prefill server finds nothing in its prefix cache before.
        alone = generate(single.url, place.model, prompt)
        equal += moved.tokens == alone.tokens
        control_equal += dropped.tokens == alone.tokens
        ttft.append(moved.ttft_s * 1000)
    received = _received(pair.events, mode, len(work))
    return Result(
        mode=mode,
        requests=len(work),
        tokens_equal=equal,
        control_tokens_equal=control_equal,
        transfers_ok=len(received),
        ttft_ms=report.summary(ttft),
        bytes=sum(received),
    )


def _received(events: Path, mode: Mode, expected: int) -> list[int]:
    """Bytes of each transfer of this mode that came well, as the event log says; waits for the last line."""
    end = time.monotonic() + EVENTS_S
    while True:
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        outcomes = [json.loads(line) for line in lines]
        received = [int(one["bytes"]) for one in outcomes if one["ok"] and one["mode"] == mode.value]
        if len(received) >= expected or time.monotonic() > end:
            return received
        time.sleep(0.05)


def generate(url: str, model: str, prompt: Sequence[int]) -> Generation:
    """Send one prompt to a server or router, greedily. Raises DemoError."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    body = {"model": model, "prompt": list(prompt), "max_tokens": MAX_TOKENS, **fixed}
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    started = time.monotonic()
    tokens: list[int] = []
    ttft_s = 0.0
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise DemoError(f"{url} answered {answer.status}: {answer.read(2000).decode(errors='replace')}")
        for event in _events(answer):
            if "error" in event:
                raise DemoError(f"{url} broke off: {event['error']}")
            new = [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]
            if new and not tokens:
                ttft_s = time.monotonic() - started
            tokens += new
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoError(f"{url}: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()
    return Generation(tokens, ttft_s)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its end."""
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
