"""A bench's second process: started as a module, spoken to in lines of JSON, never waited for without end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from kvx.core.errors import TransportError

ANSWER_S = 60.0
"""How long an answer, or one copy, may take."""


class Child:
    """`python -m MODULE`, with `env` added to the environment. The first line that it gets is `setup`."""

    def __init__(self, module: str, setup: dict[str, Any], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of ours
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **(env or {})},
        )
        self._received = b""
        self.pid = self._process.pid
        self.hello = self.ask(setup)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back. Raises TransportError if there is no answer in time."""
        self.tell(question)
        return self._answer(time.monotonic() + ANSWER_S)

    def tell(self, line: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")

    def _answer(self, deadline: float) -> dict[str, Any]:
        stdout = self._process.stdout
        while stdout is not None and b"\n" not in self._received:
            ready = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            data = os.read(stdout.fileno(), 65536) if ready else b""
            if not data:
                raise TransportError("the bench's second process does not answer")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise TransportError("the bench's second process answers nonsense")
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Lines:
    """The child's end: lines from standard input, as they come."""

    def __init__(self) -> None:
        self._received = b""

    def read(self) -> list[dict[str, Any]]:
        """What has arrived; waits for at least some bytes. Raises EOFError once the parent has gone."""
        data = os.read(0, 65536)
        if not data:
            raise EOFError("the parent has gone")
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> dict[str, Any]:
        while not (lines := self.read()):
            continue
        return lines[0]

    @staticmethod
    def write(answer: dict[str, Any]) -> None:
        os.write(1, json.dumps(answer).encode() + b"\n")
