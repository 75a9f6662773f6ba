"""One word to an instance, and its answer: for a person, a script or a router, who have no rank."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Iterator

from kvx.address import parse_address
from kvx.core import wire
from kvx.core.errors import KvxError, RemoteProtocolError, TransportError
from kvx.core.messages import Ack, Command, Envelope, Hello

_HEADER = struct.Struct(">I")
_MAX_FRAMES = 16


def ask(address: str, verb: str, argument: str = "", *, secret: bytes, timeout_s: float) -> Ack:
    """Send one Command to HOST:PORT and wait for its Ack, at most `timeout_s` seconds for all of it.

    With a `secret` the instance has to prove first that it knows it. An Ack may say no: see its
    `ok`, `reason` and `detail`. Raises ConfigError (no address), TransportError (nobody there, no
    answer in time, link lost), RemoteProtocolError (it does not speak kvx, or its proof does not
    hold) and KvxError (it refused the conversation).
    """
    host, port = parse_address(address)
    until = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            return _converse(sock, address, verb, argument, secret, until)
    except TimeoutError as error:
        raise TransportError(f"{address} did not answer in {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise TransportError(f"nobody listens at {address}; is the instance running?") from error
    except (OSError, UnicodeError) as error:
        raise TransportError(f"cannot reach {address}: {error}") from error


def _converse(sock: socket.socket, address: str, verb: str, argument: str, secret: bytes, until: float) -> Ack:
    nonce = secrets.token_bytes(16)
    _send(sock, until, Envelope(wire.VERSION, 0, 0, Hello(1, wire.VERSIONS, 0, nonce, wire.key_id(secret))))
    frames = _frames(sock, address, until)
    hello = next((message for message in frames if isinstance(message, Hello)), Hello(2))
    _believe(address, hello, nonce, secret)
    question = secrets.token_bytes(16)
    proof = wire.command_proof(secret, hello.nonce, verb, argument, question)
    _send(sock, until, Envelope(wire.VERSION, 0, hello.epoch, Command(verb, argument, question, proof)))
    for message in frames:
        match message:
            case Ack(transfer=transfer) if transfer == question.hex():
                return message
            case Hello(refusal=refusal, detail=detail) if refusal is not None:
                raise KvxError(f"{address} refused: {detail or refusal.value}")
            case _:
                continue
    raise RemoteProtocolError(f"{address} sent {_MAX_FRAMES} messages, none of which answers the question")


def _believe(address: str, hello: Hello, nonce: bytes, secret: bytes) -> None:
    """Raise unless this is step 2 of the handshake that `nonce` began."""
    if hello.refusal is not None:
        raise KvxError(f"{address} refused: {hello.detail or hello.refusal.value}")
    if hello.step != 2 or hello.echo != nonce:
        raise RemoteProtocolError(f"{address} does not answer the greeting")
    expected = wire.hello_proof(
        secret,
        dialler=False,
        own_epoch=hello.epoch,
        own_nonce=hello.nonce,
        peer_epoch=0,
        peer_nonce=nonce,
        fingerprint=hello.fingerprint,
    )
    if secret and not wire.proof_holds(expected, hello.proof):
        raise RemoteProtocolError(f"{address} does not prove that it knows the shared secret")


def _send(sock: socket.socket, until: float, envelope: Envelope) -> None:
    data = wire.encode(envelope)
    sock.settimeout(_left(until))
    sock.sendall(_HEADER.pack(len(data)) + data)


def _frames(sock: socket.socket, address: str, until: float) -> Iterator[object]:
    """The messages that arrive, a bounded number of them."""
    for _ in range(_MAX_FRAMES):
        (length,) = _HEADER.unpack(_exactly(sock, address, _HEADER.size, until))
        if length > wire.MAX_FRAME:
            raise RemoteProtocolError(f"{address} does not speak kvx: it announces {length} bytes")
        data = _exactly(sock, address, length, until)
        try:
            envelope = wire.decode(data)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{address} does not speak kvx as this side does: {error}") from error
        yield envelope.message


def _exactly(sock: socket.socket, address: str, size: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(_left(until))
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise TransportError(f"{address} closed the connection before it answered")
        data += piece
    return bytes(data)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
