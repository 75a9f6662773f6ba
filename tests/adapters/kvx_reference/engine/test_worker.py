"""The engine's thread: what clients hear when the engine breaks, and how it ends."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvx_reference.engine.completions import Piece, TextStream
from kvx_reference.engine.engine import Engine, RequestError, Settings
from kvx_reference.engine.model import Model
from kvx_reference.engine.request import Finish, Request
from kvx_reference.engine.sampling import Sampling
from kvx_reference.engine.server import Server
from kvx_reference.engine.tokenizer import WordTokenizer, vocabulary
from kvx_reference.engine.worker import EngineDead, Worker

TOKENIZER = WordTokenizer(vocabulary(199))


class Breaks(Model):
    """Computes a few steps."""

    steps = 3

    def forward(self, *arguments: Any) -> Any:
        self.steps -= 1
        if self.steps < 0:
            raise FloatingPointError("broken on purpose")
        return super().forward(*arguments)


@pytest.fixture
def waiting(model: Model) -> Iterator[Worker]:
    """One that has not begun."""
    worker = Worker(Engine(model, Settings(blocks=60, block_size=4)))
    yield worker
    worker.close()
    assert worker._thread is not None
    assert not worker._thread.is_alive()


@pytest.fixture
def worker(waiting: Worker) -> Worker:
    waiting.start()
    return waiting


def submit(worker: Worker, name: str, tokens: int, prompt: tuple[int, ...] = (5, 6)) -> queue.Queue[Piece]:
    pieces: queue.Queue[Piece] = queue.Queue()
    request = Request(name, prompt, Sampling(max_tokens=tokens, ignore_eos=True))
    worker.submit(request, TextStream(TOKENIZER), pieces.put)
    return pieces


def test_pieces_come_in_order_and_the_last_one_says_why(worker: Worker) -> None:
    pieces = submit(worker, "a", 5)
    got = [pieces.get(timeout=20) for _ in range(5)]
    assert [piece.finish for piece in got] == [None] * 4 + [Finish.LENGTH]
    assert "".join(piece.text for piece in got) == TOKENIZER.decode([each.token for p in got for each in p.drawn])


def test_the_same_id_twice_is_an_error_of_the_second(waiting: Worker) -> None:
    first = submit(waiting, "a", 200)
    second = submit(waiting, "a", 3)
    waiting.start()  # only now: the first one could be over before the second comes
    refused = second.get(timeout=20)
    assert refused.finish is Finish.ERROR
    assert "a request a already" in refused.error
    waiting.abort("a")
    assert first.get(timeout=20).error == ""


def test_a_request_that_cannot_be_served_is_refused_at_once(worker: Worker) -> None:
    with pytest.raises(RequestError, match="room for"):
        submit(worker, "a", 1000)


@pytest.fixture
def broken(model: Model) -> Iterator[Worker]:
    worker = Worker(Engine(Breaks(model.config, model._weights), Settings(blocks=60, block_size=4)))
    yield worker
    worker.close()


def test_everybody_hears_of_a_broken_engine(broken: Worker) -> None:
    pieces = [submit(broken, name, 9) for name in ("a", "b")]
    broken.start()
    for each in pieces:
        got = [each.get(timeout=20) for _ in range(4)]
        assert [piece.finish for piece in got] == [None] * 3 + [Finish.ERROR]
        assert "broken on purpose" in got[-1].error
    with pytest.raises(EngineDead, match="broken on purpose"):
        submit(broken, "late", 1)


def test_a_broken_engine_over_http(broken: Worker) -> None:
    async def talk() -> None:
        app = Server(broken, TOKENIZER, "tiny").app()
        async with TestClient(TestServer(app)) as client:
            assert (await client.get("/health")).status == 200
            endless = {"prompt": [5], "max_tokens": 9, "ignore_eos": True, "stream": True}  # it breaks before it stops
            streamed = await client.post("/v1/completions", json=endless)
            lines = (await streamed.text()).split("\n\n")
            assert streamed.status == 200
            assert '"code": 500' in lines[-3]
            assert lines[-2] == "data: [DONE]"
            answer = await client.post("/v1/completions", json={"prompt": [5]})
            assert answer.status == 503
            assert "broken on purpose" in (await answer.json())["error"]["message"]
            assert (await client.get("/health")).status == 503

    asyncio.run(talk())


def test_an_engine_that_breaks_at_once_answers_500(broken: Worker) -> None:
    broken.engine.model.steps = 0  # type: ignore[attr-defined]

    async def talk() -> None:
        app = Server(broken, TOKENIZER, "tiny").app()
        async with TestClient(TestServer(app)) as client:
            answer = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 9})
            assert answer.status == 500
            assert (await answer.json())["error"]["type"] == "internal_error"

    asyncio.run(talk())


def test_held_back_text_comes_with_the_end() -> None:
    """A text that may become a stop text is not sent before that is known."""
    stream = TextStream(TOKENIZER, ("w5 w9",))
    assert [stream.add(token) for token in (4, 5, 6, 5)] == ["w4", " ", "w5 w6", " "]
    assert not stream.stopped
    assert stream.end() == "w5"
    stream = TextStream(TOKENIZER, ("w5 w9", "w7"))
    assert [stream.add(token) for token in (4, 5, 9)] == ["w4", " ", ""]
    assert stream.stopped
