"""A router and reference servers as processes: what a signal, `kvx drain` of an instance and the pool file do."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from kvx.cluster import Child, free_ports
from kvx.core.model import Mode
from kvx.driver import Launch
from kvx.up import Node, Site, site

WAIT_S = 60.0
"""Longest wait for what has to happen."""
MANY = 1500
"""Tokens of a stream that is stopped in its middle: no machine has them all before that."""


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Stream:
    """A streamed completion, of which `events` are the events so far."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)
        body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.events: list[Any] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with closing(self._connection), suppress(http.client.HTTPException, OSError):
            answer = self._connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    self.events.append("[DONE]" if data == b"[DONE]" else json.loads(data))

    def end(self) -> list[Any]:
        """All of its events."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.events


def ask(url: str, path: str, body: Any = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=WAIT_S)) as connection:
        headers = {"Content-Type": "application/json"} if body else {}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), dict(answer.getheaders())


def held(url: str, model: str, node: Node) -> Stream:
    """A request that the router has open, and whose decode server stands still before it gives an answer."""
    node.child.signal(signal.SIGSTOP)
    stream = Stream(url, model, 8)
    until(lambda: ask(url, "/status")[1]["decode"][0]["open"] == 1)
    return stream


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with site("reference", "", (), lambda line: None) as made:
        yield made


def router(place: Site, prefill: list[Node], decode: list[Node], *options: str) -> Child:
    """As `Site.router` starts one, with further options."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvx", "router", "--port", str(port), "--mode", Mode.PUSH.value, *options]
    command += [word for node in prefill for word in ("--prefill", node.url)]
    command += [word for node in decode for word in ("--decode", node.url)]
    env = {"KVX_SECRET_FILE": str(place.secret_file)}
    return place.cluster.start("router", Launch(tuple(command), env, "/health"), f"http://127.0.0.1:{port}")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_open_requests_are_served_before_the_router_ends(place: Site) -> None:
    prefill, decode = [place.engine("prefill")], [place.engine("decode")]
    child = router(place, prefill, decode, "--drain-s", str(WAIT_S))
    place.wait_ready()
    stream = held(child.url, place.model, decode[0])
    child.signal(signal.SIGTERM)
    until(lambda: ask(child.url, "/health")[0] == 503)
    status, told, headers = ask(child.url, "/v1/completions", {"model": place.model, "prompt": [1]})
    assert (status, told["error"]["type"], headers["Retry-After"]) == (503, "stopping", "1")
    assert "about to stop" in told["error"]["message"]
    decode[0].child.signal(signal.SIGCONT)
    events = stream.end()
    assert events[-1] == "[DONE]"
    assert not any("error" in event for event in events[:-1])
    assert child.process.wait(WAIT_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_request_that_is_longer_than_the_limit_is_told_why_it_ends(place: Site) -> None:
    prefill, decode = [place.engine("prefill")], [place.engine("decode")]
    child = router(place, prefill, decode, "--drain-s", "0.2")
    place.wait_ready()
    stream = Stream(child.url, place.model, MANY)
    until(lambda: stream.events)
    decode[0].child.signal(signal.SIGSTOP)
    child.signal(signal.SIGTERM)
    events = stream.end()
    assert events[-1]["error"]["type"] == "stopping"
    assert "was not over in 0.2 s" in events[-1]["error"]["message"]
    assert child.process.wait(WAIT_S) == 0
    decode[0].child.signal(signal.SIGCONT)
    # The legs were ended with it: the engine has nothing left to do.
    until(lambda: ask(decode[0].url, "/stats")[1]["blocks"] == {"total": 512, "free": 512})


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_second_signal_waits_for_nobody(place: Site) -> None:
    prefill, decode = [place.engine("prefill")], [place.engine("decode")]
    child = router(place, prefill, decode, "--drain-s", "3600")
    place.wait_ready()
    stream = held(child.url, place.model, decode[0])
    child.signal(signal.SIGINT)
    until(lambda: ask(child.url, "/health")[0] == 503)
    child.signal(signal.SIGINT)
    assert child.process.wait(WAIT_S) == 0
    assert stream.end() == []


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", list(Mode))
def test_requests_go_elsewhere_when_an_operator_drains_an_instance(place: Site, mode: Mode) -> None:
    prefill = [place.engine(f"prefill-{number}") for number in range(2)]
    decode = [place.engine(f"decode-{number}") for number in range(2)]
    child = place.router("router", prefill, decode, mode)
    place.wait_ready()

    def told() -> dict[str, Any]:
        status = ask(child.url, "/status")[1]
        return {one["url"]: one for one in (*status["prefill"], *status["decode"])}

    for node in (prefill[0], decode[1]):
        command = [sys.executable, "-m", "kvx", "drain", node.control]
        env = {"KVX_SECRET_FILE": str(place.secret_file)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr
        until(lambda node=node: told()[node.url]["draining"])
    before = told()
    for number in range(8):
        body = {"model": place.model, "prompt": [number + 3] * 20, "max_tokens": 2, "temperature": 0}
        status, answer, _ = ask(child.url, "/v1/completions", body)
        assert status == 200, answer
    after = told()
    served = [after[node.url]["requests"] - before[node.url]["requests"] for node in (*prefill, *decode)]
    assert served == [0, 8, 8, 0]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_instances_come_and_go_as_the_pool_file_says(place: Site, tmp_path: Path) -> None:
    nodes = [place.engine(name) for name in ("prefill", "decode-0", "decode-1")]
    file = tmp_path / "pools.toml"

    def write(*decode: Node) -> None:
        lists = {"prefill": [nodes[0].url], "decode": [node.url for node in decode]}
        new = file.with_suffix(".new")
        new.write_text("".join(f"{name} = {json.dumps(urls)}\n" for name, urls in lists.items()))
        new.replace(file)

    def serving() -> set[str]:
        return {one["url"] for one in ask(child.url, "/status")[1]["decode"] if one["up"]}

    def decodes_at(node: Node) -> None:
        before = ask(node.url, "/stats")[1]["counters"].get("loads", 0)
        body = {"model": place.model, "prompt": list(range(3, 60)), "max_tokens": 2, "temperature": 0}
        status, answer, _ = ask(child.url, "/v1/completions", body)
        assert status == 200, answer
        assert ask(node.url, "/stats")[1]["counters"].get("loads", 0) == before + 1

    write(nodes[1])
    child = router(place, [], [], "--pools", str(file))
    place.wait_ready()
    for node in (nodes[1], nodes[2]):
        write(node)
        until(lambda node=node: serving() == {node.url})
        decodes_at(node)
    file.write_text("decode = [")
    until(lambda: ask(child.url, "/status")[1]["pool_file"]["error"])
    decodes_at(nodes[2])


def test_what_is_open_ends_and_nothing_else_begins(world: Any, fake: Any) -> None:
    async def scenario() -> None:
        go_on = asyncio.Event()

        async def patient(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return web.json_response({"choices": [{"text": one.name}]})

        async with world(Mode.PULL, [fake("p")], [fake("d", patient)]) as w:
            opened = asyncio.create_task(w.complete())
            await w.decode[0].asked.wait()
            end = asyncio.create_task(w.router.drain(WAIT_S))
            await w.until(lambda: w.router.stopping)
            async with w.client.post(f"{w.url}/v1/completions", json={"prompt": [1]}) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert (await answer.json())["error"]["type"] == "stopping"
            assert (await w.status())["stopping"]
            assert not end.done()
            go_on.set()
            assert (await opened)[0] == 200
            await end
            assert w.router.counters == {"requests": 2, "ok": 1, "turned_away": 1}

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["not begun", "text/event-stream", "application/json"])
def test_what_takes_too_long_is_ended_with_the_reason_where_one_can_be_told(world: Any, fake: Any, kind: str) -> None:
    async def scenario() -> None:
        async def endless(one: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"Content-Type": kind})
            if kind != "not begun":
                await answer.prepare(request)
                await answer.write(b"data: {}\n\n")
            await asyncio.Event().wait()
            return answer

        async with world(Mode.PULL, [fake("p")], [fake("d", endless)]) as w:
            opened = asyncio.create_task(w.client.post(f"{w.url}/v1/completions", json={"prompt": [1]}))
            await w.decode[0].asked.wait()
            if kind != "not begun":
                await (await asyncio.shield(opened)).content.readany()
            await w.router.drain(0.0)
            async with await opened as answer:
                if kind == "application/json":
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
                else:
                    told = (await answer.read()).removeprefix(b"data: ")
                    assert json.loads(told)["error"]["type"] == "stopping"
            end = "failed" if kind == "not begun" else "broken_off"
            assert w.router.counters[end] == 1
            assert w.router.counters["ok"] == 0
            await w.decode[0].left.wait()

    asyncio.run(scenario())
