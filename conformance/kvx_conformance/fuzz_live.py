"""The fuzzer against a whole instance: a proven peer that says anything, on a real control port."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from attrs import define, field

from kvx.cluster import free_ports
from kvx.config import Options
from kvx.core import wire
from kvx.core.handshake import Handshakes
from kvx.core.messages import Envelope, Hello
from kvx.core.model import BlockTable, InstanceInfo, Mode, News, Outcome, Region, Released
from kvx.engine import EngineInstance, Expose, Stage
from kvx.instance import make_ticket, open_instance, read_ticket
from kvx_conformance.fuzz_inputs import Maker, Mutator
from kvx_conformance.fuzz_ports import WAIT_S
from kvx_conformance.pair import layout, part

SECRET = "a secret of all instances that are fuzzed"  # noqa: S105 - it guards nothing
_HEADER = struct.Struct(">I")


@define(eq=False)
class _Rank:
    """An instance with memory of its own, and what it has told."""

    name: str
    options: Options = field(init=False)
    memory: np.ndarray[Any, np.dtype[np.uint8]] = field(factory=lambda: np.zeros(1 << 14, dtype=np.uint8))
    epoch: int = field(factory=lambda: secrets.randbits(63))
    instance: EngineInstance = field(init=False)
    told: list[News] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.options = Options.load(
            {"listen": f"127.0.0.1:{free_ports(1)[0]}", "instance": self.name, "secret": SECRET}, {}
        )
        region = Region(0, self.memory.ctypes.data, self.memory.nbytes)
        self.instance = open_instance(self.options, layout(), [region], epoch=self.epoch)


def _pause() -> None:
    time.sleep(0.002)


class LiveInstance:
    """Two honest instances; the fuzzer proves itself to one of them and then misbehaves.

    An event that ends in an exception is a finding, and so is an honest transfer that fails.
    """

    def __init__(self, random: Random) -> None:
        self._random, self._mutator = random, Mutator(random)
        self._victim, self._friend = _Rank("victim"), _Rank("friend")
        self._epoch = random.getrandbits(63)
        self._links = 0
        self._sock: socket.socket | None = None
        self._ids = [f"t-{n}" for n in range(30)]
        self._maker = Maker(random, self._known())
        self._checked = 0

    def _known(self) -> dict[str, Callable[[], Any]]:
        pick = self._random.choice
        return {
            "transfer": lambda: pick(self._ids),
            "transfers": lambda: tuple(self._random.choices(self._ids, k=3)),
            "owner": lambda: self._info().peer,
            "epoch": lambda: self._epoch,
            "mode": lambda: Mode.PUSH,
            "legs": lambda: (0,),
            "first": lambda: (pick((0, 0, 1)),),
            "blocks": lambda: BlockTable.of(self._random.sample(range(17), pick((0, 1, 2)))),
            "tokens": lambda: pick((4, 8)),
            "proof": lambda: self._random.randbytes(32),
            "step": lambda: pick((1, 2, 3, 4)),
        }

    def _info(self) -> InstanceInfo:
        return InstanceInfo("hostile", 0, self._epoch, "127.0.0.1:1", layout(), ("tcp",), ("127.0.0.1:1",))

    def feed(self) -> bool:
        random = self._random
        if random.random() < 0.02:
            self._engine()
        if self._sock is None:
            self._prove()
        message = self._maker.message() if random.random() < 0.97 else self._maker.value(Hello)
        data = wire.encode(Envelope(wire.VERSION, self._epoch, self._victim.epoch, message))
        if random.random() < 0.05:
            data = self._mutator.changed(data)
        return self._send(_HEADER.pack(len(data)) + data)

    def _engine(self) -> None:
        """The victim's engine works with ids that the peer has in mouth too."""
        transfer, blocks = f"t-{self._random.randrange(10**9)}", BlockTable.of([14, 15])
        self._ids[self._random.randrange(len(self._ids))] = transfer
        address = "127.0.0.1:1" if self._random.random() < 0.5 else self._friend.instance.info.address
        mode = self._random.choice(list(Mode))
        self._victim.instance.put([Expose(transfer, mode, blocks, (0,), 8, 1.0, address)])

    def _prove(self) -> None:
        """The dialler's half of the handshake, with metadata that no transport has made."""
        host, _, port = self._victim.options.listen.rpartition(":")
        sock = self._sock = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self._links += 1
        junk = {"tcp": self._mutator.noise()} if self._random.random() < 0.5 else {}
        mine = Handshakes(self._info(), SECRET.encode(), os.urandom, junk)
        first = mine.opened(self._links, "victim", 0.0)
        assert first is not None
        self._say(sock, first)
        for envelope in self._heard(sock):
            if not isinstance(envelope.message, Hello):
                continue
            answer = mine.hello(self._links, envelope.message)
            for reply in answer.replies:
                self._say(sock, reply)
            if answer.introduced is not None:
                break
            if answer.refused:
                raise AssertionError(f"a proven peer is refused: {answer.refused}")
        sock.setblocking(False)

    def _say(self, sock: socket.socket, message: Hello) -> None:
        data = wire.encode(Envelope(wire.VERSION, self._epoch, 0, message))
        sock.sendall(_HEADER.pack(len(data)) + data)

    @staticmethod
    def _heard(sock: socket.socket) -> Iterator[Envelope]:
        while True:
            (length,) = _HEADER.unpack(sock.recv(4, socket.MSG_WAITALL))
            yield wire.decode(sock.recv(length, socket.MSG_WAITALL))

    def _send(self, data: bytes) -> bool:
        sock = self._sock
        assert sock is not None
        try:
            while True:
                if not sock.recv(1 << 16):
                    raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return False
        sock.settimeout(WAIT_S)
        try:
            sock.sendall(data)
            sock.setblocking(False)
        except TimeoutError as error:
            raise AssertionError(f"the instance has not read for {WAIT_S:g} s") from error
        except OSError:
            self._hang_up()
            return False
        return True

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def check(self) -> None:
        """Honest transfers in both modes, with the bytes compared; nothing has raised."""
        for mode in Mode:
            self._checked += 1
            self._good(f"good-{self._checked}", mode)
        errors = self._victim.instance.snapshot()["errors"]
        if errors:
            raise AssertionError(f"{errors} events have ended in an exception: see the log")

    def _good(self, transfer: str, mode: Mode) -> None:
        p, d = (self._victim, self._friend) if self._checked % 4 < 2 else (self._friend, self._victim)
        p.memory[: p.memory.size // 4] = self._checked % 251
        d.memory[: d.memory.size // 4] = 0
        blocks = BlockTable.of([1, 2])
        if mode is Mode.PUSH:
            d.instance.put([Expose(transfer, mode, blocks, (0,), 8, 30.0, p.instance.info.address)])
            p.instance.put([Stage(transfer, mode, part(1, 2), True, 8)])
        else:
            p.instance.put([Expose(transfer, mode, blocks, (0,), 8, 30.0)])
            text = make_ticket(
                p.options, epoch=p.epoch, transfer=transfer, first=(0,), blocks=blocks, tokens=8, lease_s=30.0
            )
            ticket = read_ticket(d.options, text)
            d.instance.put([Stage(transfer, mode, part(1, 2), True, 8, ticket)])
        for rank in (p, d):
            outcome = self._ended(rank, transfer)
            if not outcome.ok:
                raise AssertionError(f"an honest {mode.value} fails at {rank.name}: {outcome}")
        spec = layout().groups[0].layers[0]
        moved = d.memory[spec.block_bytes : 3 * spec.block_bytes]
        if (moved != self._checked % 251).any():
            raise AssertionError(f"an honest {mode.value} has moved other bytes")

    @staticmethod
    def _ended(rank: _Rank, transfer: str) -> Outcome:
        limit = time.monotonic() + WAIT_S
        while time.monotonic() < limit:
            rank.told += rank.instance.news()
            found = [news for news in rank.told if isinstance(news, Outcome) and news.transfer == transfer]
            if found and Released(transfer) in rank.told:
                rank.told.clear()
                return found[0]
            _pause()
        raise AssertionError(f"{transfer} has no end at {rank.name} within {WAIT_S:g} s: {rank.instance.snapshot()}")

    def close(self) -> None:
        self._hang_up()
        for rank in (self._victim, self._friend):
            rank.instance.close()
