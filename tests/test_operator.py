"""Commands to an instance: the conversation, and each way in which it can fail."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve

from kvx.control import ControlChannel
from kvx.core import wire
from kvx.core.endpoint import Endpoint
from kvx.core.errors import ConfigError, KvxError, RemoteProtocolError, TransportError
from kvx.core.messages import Ack, Command, Envelope, Hello, Message, Renew
from kvx.core.model import InstanceInfo, Layout, Reason
from kvx.memory import Memory
from kvx.operator import ask
from kvx.runtime import Runtime

SECRET = b"shared"
EPOCH = 99
NONCE = bytes(range(16))


class Acceptor:
    """One end of a conversation, played by a script on a thread of its own."""

    def __init__(self, script: Callable[[Acceptor], None]) -> None:
        self.heard: list[Envelope] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, args=(script,))
        self._thread.start()

    def _run(self, script: Callable[[Acceptor], None]) -> None:
        with contextlib.suppress(OSError):
            self.sock, _ = self._listener.accept()
            self.sock.settimeout(20)
            with self.sock:
                script(self)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)

    def hear(self) -> Message:
        (length,) = struct.unpack(">I", self.sock.recv(4, socket.MSG_WAITALL))
        self.heard.append(wire.decode(self.sock.recv(length, socket.MSG_WAITALL)))
        return self.heard[-1].message

    def say(self, message: Message) -> None:
        data = wire.encode(Envelope(wire.VERSION, EPOCH, 0, message))
        self.sock.sendall(struct.pack(">I", len(data)) + data)

    def greet(self, key: bytes = SECRET, **changes: Any) -> None:
        hello = self.hear()
        assert isinstance(hello, Hello)
        proof = wire.hello_proof(
            key, dialler=False, own_epoch=EPOCH, own_nonce=NONCE, peer_epoch=0, peer_nonce=hello.nonce, fingerprint="f"
        )
        second = Hello(2, (1,), EPOCH, NONCE, wire.key_id(key), hello.nonce, proof, "f")
        self.say(evolve(second, **changes))

    def until_closed(self) -> None:
        while self.sock.recv(1 << 16):
            pass


Play = Callable[[Callable[[Acceptor], None]], Acceptor]


@pytest.fixture
def play() -> Iterator[Play]:
    made: list[Acceptor] = []

    def start(script: Callable[[Acceptor], None]) -> Acceptor:
        made.append(Acceptor(script))
        return made[-1]

    yield start
    for acceptor in made:
        acceptor.close()


@pytest.fixture
def instance() -> Iterator[str]:
    """Control address of a rank without an engine's memory."""
    control = ControlChannel("127.0.0.1:0", handshake_s=10, clock=time.monotonic)
    info = InstanceInfo("i", 0, EPOCH, control.address, Layout("m", "f", "v", (), 1))
    endpoint = Endpoint(info, capabilities=unused, entropy=os.urandom, key=SECRET)
    runtime = Runtime(endpoint, control, {}, Memory([]), choose=unused)
    yield control.address
    runtime.close()


def unused(_: InstanceInfo | None) -> Any:
    raise AssertionError("no peer has come")


def test_a_running_instance_answers(instance: str) -> None:
    answer = ask(instance, "status", secret=SECRET, timeout_s=20)
    assert answer.ok
    assert json.loads(answer.body)["open"] == {}
    refused = ask(instance, "dance", secret=SECRET, timeout_s=20)
    assert not refused.ok
    assert "dance" in refused.detail
    for other in (b"other", b""):
        with pytest.raises(KvxError, match="the shared secrets differ"):
            ask(instance, "status", secret=other, timeout_s=20)


@pytest.mark.parametrize("key", [SECRET, b""])
def test_a_command_and_its_answer(play: Play, key: bytes) -> None:
    def script(far: Acceptor) -> None:
        far.greet(key)
        command = far.hear()
        assert isinstance(command, Command)
        far.say(Renew(echo=True))
        far.say(Ack("another question", False))
        far.say(Ack(command.nonce.hex(), True, body="{}"))

    far = play(script)
    answer = ask(far.address, "release", "kvx1.x", secret=key, timeout_s=20)
    first, second = far.heard
    command = second.message
    assert isinstance(first.message, Hello)
    assert isinstance(command, Command)
    assert (first.message.step, first.message.epoch, first.message.key_id) == (1, 0, wire.key_id(key))
    assert (second.from_epoch, second.to_epoch) == (0, EPOCH)
    assert (command.verb, command.argument) == ("release", "kvx1.x")
    assert command.proof == wire.command_proof(key, NONCE, "release", "kvx1.x", command.nonce)
    assert answer == Ack(command.nonce.hex(), True, body="{}")


def test_nonces_are_new_each_time(play: Play) -> None:
    def script(far: Acceptor) -> None:
        far.greet()
        command = far.hear()
        assert isinstance(command, Command)
        far.say(Ack(command.nonce.hex(), False, Reason.OTHER, "no"))

    ends = [play(script) for _ in range(2)]
    answers = [ask(far.address, "drain", "1", secret=SECRET, timeout_s=20) for far in ends]
    assert answers[0].transfer != answers[1].transfer
    assert not answers[0].ok
    assert len({far.heard[0].message.nonce for far in ends if isinstance(far.heard[0].message, Hello)}) == 2


@pytest.mark.parametrize(
    ("script", "error", "says"),
    [
        (lambda far: far.greet(b"other"), RemoteProtocolError, "does not prove"),
        (lambda far: far.greet(proof=b""), RemoteProtocolError, "does not prove"),
        (lambda far: far.greet(fingerprint="g"), RemoteProtocolError, "does not prove"),
        (lambda far: far.greet(echo=NONCE), RemoteProtocolError, "does not answer the greeting"),
        (lambda far: far.greet(step=4), RemoteProtocolError, "does not answer the greeting"),
        (lambda far: far.greet(refusal=Reason.VERSION, detail="too old"), KvxError, "refused: too old"),
        (lambda far: far.greet(refusal=Reason.VERSION), KvxError, "refused: version"),
        (lambda far: far.sock.sendall(b"HTTP/1.1 400 Bad Request"), RemoteProtocolError, "does not speak kvx"),
        (lambda far: far.sock.sendall(b"\x00\x00\x00\x01\xc1"), RemoteProtocolError, "not an envelope"),
        (lambda far: [far.say(Renew()) for _ in range(16)], RemoteProtocolError, "does not answer the greeting"),
        (lambda far: far.hear(), TransportError, "closed the connection"),
    ],
)
def test_a_bad_greeting_gets_no_command(
    play: Play, script: Callable[[Acceptor], None], error: type[KvxError], says: str
) -> None:
    def whole(far: Acceptor) -> None:
        script(far)
        far.sock.shutdown(socket.SHUT_WR)
        far.until_closed()

    far = play(whole)
    with pytest.raises(error, match=says) as caught:
        ask(far.address, "status", secret=SECRET, timeout_s=20)
    assert str(caught.value).startswith(far.address)
    assert not [envelope for envelope in far.heard if isinstance(envelope.message, Command)]


def test_a_refusal_after_the_command(play: Play) -> None:
    def script(far: Acceptor) -> None:
        far.greet()
        far.hear()
        far.say(Hello(2, refusal=Reason.DRAINING))

    with pytest.raises(KvxError, match="refused: draining"):
        ask(play(script).address, "status", secret=SECRET, timeout_s=20)


def test_answers_to_other_questions_end_in_bounded_number(play: Play) -> None:
    def script(far: Acceptor) -> None:
        far.greet()
        far.hear()
        for _ in range(20):
            far.say(Ack("other", True))
        far.until_closed()

    with pytest.raises(RemoteProtocolError, match="none of which answers"):
        ask(play(script).address, "status", secret=SECRET, timeout_s=20)


def test_silence_ends_in_bounded_time(play: Play) -> None:
    far = play(lambda far: far.until_closed())
    with pytest.raises(TransportError, match=r"did not answer in 0\.2 s"):
        ask(far.address, "status", secret=SECRET, timeout_s=0.2)


def test_bytes_that_drip_do_not_stretch_the_time(play: Play) -> None:
    def script(far: Acceptor) -> None:
        far.sock.sendall(struct.pack(">I", 1000))
        for _ in range(1000):
            far.sock.sendall(b"\x95")
            time.sleep(0.05)

    with pytest.raises(TransportError, match="did not answer"):
        ask(play(script).address, "status", secret=SECRET, timeout_s=0.3)


def test_nobody_there() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match="nobody listens"):
            ask(f"127.0.0.1:{sock.getsockname()[1]}", "status", secret=b"", timeout_s=20)


def test_what_is_no_address() -> None:
    with pytest.raises(ConfigError):
        ask("nonsense", "status", secret=b"", timeout_s=20)
