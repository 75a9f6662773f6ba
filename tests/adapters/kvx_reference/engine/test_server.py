"""The HTTP face, spoken to over a socket: one real process without a connector."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import frozen

from kvx.cluster import Child, Cluster, free_ports
from kvx.driver import Launch
from kvx_reference.driver import ReferenceDriver

COMMAND = (sys.executable, "-m", "kvx_reference.engine")


@frozen
class Client:
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        with contextlib.closing(self.connect()) as connection:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
            connection.request(method, path, data)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None

    def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = self.ask("POST", "/v1/completions", {"temperature": 0, "return_token_ids": True, **body})
        assert status == 200, answer
        return dict(answer)

    def tokens(self, **body: Any) -> list[int]:
        return list(self.complete(**body)["choices"][0]["token_ids"])

    def stream(self, **body: Any) -> Iterator[dict[str, Any] | str]:
        """Events as they come."""
        with contextlib.closing(self.connect()) as connection:
            body = {"temperature": 0, "return_token_ids": True, "stream": True, **body}
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            while line := answer.readline():
                if line.strip():
                    data = line.decode().removeprefix("data: ").strip()
                    yield data if data == "[DONE]" else json.loads(data)


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with Cluster(tmp_path_factory.mktemp("server")) as cluster:
        (port,) = free_ports(1)
        command = (*COMMAND, "--random", "0", "--port", str(port), "--blocks", "64", "--served-model-name", "tiny")
        started = cluster.start("engine", Launch(command, {}, "/health"), f"http://127.0.0.1:{port}")
        cluster.wait_ready()
        yield started
        cluster.check()


@pytest.fixture(scope="module")
def client(child: Child) -> Client:
    return Client(int(child.url.rpartition(":")[2]))


def test_models_and_health(client: Client) -> None:
    assert client.ask("GET", "/health") == (200, None)
    status, models = client.ask("GET", "/v1/models")
    assert status == 200
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 4096)]


def test_the_cache_itself_is_there_for_a_look(client: Client) -> None:
    prompt = [7, 8] * 20
    client.tokens(prompt=prompt, max_tokens=2)
    url = f"http://127.0.0.1:{client.port}"
    found = ReferenceDriver().raw_kv(url, prompt)
    assert found and ReferenceDriver().raw_kv(url, prompt[:32]) == found
    assert ReferenceDriver().raw_kv(url, [9, *prompt]) == b""
    assert client.ask("POST", "/cache", {"prompt": "w1"})[0] == 400


def test_a_text_and_its_tokens_are_the_same_prompt(client: Client) -> None:
    by_text = client.complete(prompt="w5 w6 w7", max_tokens=6)
    by_tokens = client.complete(prompt=[5, 6, 7], max_tokens=6)
    choice = by_text["choices"][0]
    assert choice == by_tokens["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["text"] == " ".join(f"w{token}" for token in choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert by_text["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert "kv_transfer_params" not in by_text
    neutral = {"n": 1, "echo": False, "top_k": -1, "presence_penalty": 0.0, "logit_bias": None}
    assert client.tokens(prompt=["w5 w6 w7"], max_tokens=6, **neutral) == choice["token_ids"]


def test_a_stream_brings_the_same_piece_by_piece(client: Client) -> None:
    whole = client.complete(prompt="w9 w8", max_tokens=7)["choices"][0]
    *events, done = client.stream(prompt="w9 w8", max_tokens=7, stream_options={"include_usage": True})
    assert done == "[DONE]"
    *pieces, usage = [event for event in events if isinstance(event, dict)]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7
    choices = [piece["choices"][0] for piece in pieces]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["token_ids"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"]
    assert choices[0]["prompt_token_ids"] == [9, 8]


def test_a_stream_does_not_wait_for_its_end(client: Client) -> None:
    """The first piece is here while another request still finds the engine at work on this one."""
    events = client.stream(prompt=[7, 7], max_tokens=900)
    first = next(events)
    assert isinstance(first, dict)
    assert first["choices"][0]["finish_reason"] is None
    assert client.tokens(prompt=[5], max_tokens=1)
    events.close()  # type: ignore[attr-defined]


def test_stop_texts_end_the_answer_before_them(client: Client) -> None:
    words = client.complete(prompt=[11, 12], max_tokens=8)["choices"][0]["text"].split()
    for stop in (words[3], f"{words[3]} {words[4]}", words[3][:3]):
        wanted = " ".join(words).partition(stop)[0]
        answer = client.complete(prompt=[11, 12], max_tokens=8, stop=["never", stop])["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (wanted, "stop")
        events = [event for event in client.stream(prompt=[11, 12], max_tokens=8, stop=stop) if isinstance(event, dict)]
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_logprobs_and_seeds(client: Client) -> None:
    answer = client.complete(prompt=[5, 6], max_tokens=3, logprobs=2)["choices"][0]
    logprobs = answer["logprobs"]
    for token, logprob, top in zip(
        answer["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[f"w{token}"] == logprob == max(top.values())
    drawn = [client.tokens(prompt=[5, 6], max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([], "no JSON object"),
        ({}, "prompt has to be"),
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": ["a", "b"]}, "one text"),
        ({"prompt": [1, True]}, "one list of token ids"),
        ({"prompt": [5, 4000]}, r"0..2047"),
        ({"prompt": [2**80]}, r"0..2047"),
        ({"prompt": "w5", "n": 2}, "n is not supported"),
        ({"prompt": "w5", "top_k": 5}, "top_k is not supported"),
        ({"prompt": "w5", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "w5", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "w5", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "w5", "max_tokens": 1100}, "room for 1024"),
        ({"prompt": "w5", "temperature": -1}, "temperature"),
        ({"prompt": "w5", "temperature": float("nan")}, "temperature"),
        ({"prompt": "w5", "top_p": 0}, "top_p"),
        ({"prompt": "w5", "seed": -1}, "seed"),
        ({"prompt": "w5", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "w5", "stop": [""]}, "stop"),
        ({"prompt": "w5", "stream": "yes"}, "stream"),
        ({"prompt": "w5", "echo": True}, "echo"),
        ({"prompt": "w5", "cache_salt": 3}, "cache_salt"),
        ({"prompt": "w5", "kv_transfer_params": []}, "kv_transfer_params"),
    ],
)
def test_requests_that_cannot_be_served(client: Client, body: object, text: str) -> None:
    status, answer = client.ask("POST", "/v1/completions", body)
    assert status == 400
    assert text in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["code"] == 400


def test_clients_that_leave_end_their_requests(client: Client) -> None:
    before = client.ask("GET", "/stats")[1]["counters"].get("abort", 0)
    for stream in (True, False) * 3:
        with contextlib.closing(client.connect()) as connection:
            body = {"prompt": [9] * 100, "max_tokens": 900, "ignore_eos": True, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body))
            if stream:
                assert connection.getresponse().readline()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        stats = client.ask("GET", "/stats")[1]
        if stats["counters"].get("abort", 0) == before + 6:
            break
        time.sleep(0.05)
    assert stats["counters"]["abort"] == before + 6
    assert stats["waiting"] == stats["running"] == 0
    assert stats["blocks"] == {"total": 64, "free": 64}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "nowhere"), "nowhere/config.json"),
        (("--random", "0", "--connector", "nowhere:made"), "nowhere:made"),
        (("--random", "0", "--connector-options", "[]"), "JSON object"),
        (("--random", "0", "--blocks", "0"), "not positive"),
        ((), "required"),
    ],
)
def test_what_cannot_start_says_why(arguments: tuple[str, ...], text: str) -> None:
    done = subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
