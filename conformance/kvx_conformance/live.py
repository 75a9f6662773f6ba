"""Scenarios on real processes: each rank a process with its own memory and an instance, behind a proxy."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from attrs import define, field, frozen

from kvx.cluster import wait_stopped
from kvx.core.model import Mode, Role
from kvx_conformance.actor import JUNK, Call
from kvx_conformance.instance_program import Answer, Order, Setup
from kvx_conformance.proxy import Proxy
from kvx_conformance.scenarios import Break, Performance, Plane, Row, Scenario, StuckError
from kvx_conformance.suite.subject import Subject

KVX = Subject("tcp")
REGION_ACCESS = "kvx_conformance.faults:region_access"
"""Around another transport: can neither forbid nor fence."""
START_S = 60.0
"""How long a process may take to import and open its instance, on a machine that is busy."""
_MARGIN_S = 10.0
_PORTS = range(20_000, 32_000)
"""Below the ports that the kernel gives to others by itself."""
_LOG_TAIL = 1500


class ProgramError(AssertionError):
    """A process of an instance died, broke, or did not answer; the text ends with the end of its log."""


def hold_ports(count: int) -> list[socket.socket]:
    """Sockets on `count` neighbouring loopback ports, so that nobody else takes them.

    None of them listens: whoever sets SO_REUSEADDR, as servers do, can still listen there.
    """
    for _ in range(1000):
        first = random.choice(_PORTS)  # noqa: S311 - any will do
        with contextlib.ExitStack() as undo:
            held = [undo.enter_context(socket.socket()) for _ in range(count)]
            try:
                for offset, sock in enumerate(held):
                    sock.bind(("127.0.0.1", first + offset))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError:
                continue
            undo.pop_all()
            return held
    raise ProgramError(f"no {count} neighbouring ports are free")


@define(eq=False)
class Program:
    """One rank of one start of an instance: a process, and lines to and from it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    _came: bytearray = field(factory=bytearray)

    @classmethod
    def start(cls, name: str, setup: Setup, folder: Path) -> Program:
        """Start it without waiting: the first answer says that it listens."""
        log = folder / f"{name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                (sys.executable, "-m", "kvx_conformance.instance_program"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                process_group=0,
            )
        program = cls(name, process, log)
        program.send(setup)
        return program

    def send(self, what: Setup | Order) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(what) + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise self._broken(str(error)) from error

    def answer(self, timeout_s: float) -> Answer:
        """The next answer. Raises ProgramError."""
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._came:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._broken(f"no answer in {timeout_s:g} s")
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._broken("it died")
                self._came += data
        line, _, rest = bytes(self._came).partition(b"\n")
        self._came = bytearray(rest)
        return msgspec.json.decode(line, type=Answer)

    def ask(self, order: Order, timeout_s: float = _MARGIN_S) -> Answer:
        self.send(order)
        return self.answer(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal; SIGSTOP has come into force when this returns."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(_MARGIN_S)
        if number == signal.SIGSTOP:
            wait_stopped(self.process.pid)

    def close(self) -> None:
        """End it: its stdin ends, and what does not follow is killed."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_MARGIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_MARGIN_S)
        self.process.stdout.close()

    def _broken(self, problem: str) -> ProgramError:
        tail = self.log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
        return ProgramError(f"{self.name}: {problem}; its log ends:\n{tail}")


@frozen
class Place:
    """Where an instance runs, over all its starts: first ports of its ranks and of the proxy before them."""

    control: int
    data: int
    front_control: int
    front_data: int


class Live(Performance):
    """One scenario on real processes; a context manager, after which nothing of it is left.

    `subject` is what they run on. Only where its data connections can be led through a proxy do they run behind one.
    """

    def __init__(self, scenario: Scenario, folder: Path, pace: float = 1.0, subject: Subject = KVX) -> None:
        super().__init__(scenario, pace)
        self._folder = folder
        self._subject = subject
        self._proxy = Proxy()
        self._programs: dict[str, list[Program]] = {}
        self._tickets: dict[str, str] = {}
        self._held: list[socket.socket] = []
        self._places = {who: self._place(who) for who in scenario.shapes}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for programs in self._programs.values():
            for program in programs:
                program.close()
        self._proxy.close()
        for sock in self._held:
            sock.close()

    def run(self) -> list[Row]:
        for who in self.scenario.shapes:  # all at once: most of a start is importing
            self._launch(who)
        return super().run()

    # ---------------------------------------------------------------- instances

    def _place(self, who: str) -> Place:
        ranks = self.scenario.shapes[who].ranks
        held = hold_ports(4 * ranks)
        self._held += held
        first = int(held[0].getsockname()[1])
        place = Place(*(first + i * ranks for i in range(4)))
        for rank in range(ranks):
            self._proxy.front(Plane.CONTROL, who, place.front_control + rank, place.control + rank)
            if self._subject.relayed:
                self._proxy.front(Plane.DATA, who, place.front_data + rank, place.data + rank)
        return place

    def _launch(self, who: str) -> None:
        epoch = secrets.randbits(63)
        self._programs[who] = [
            Program.start(f"{self.scenario.id}-{who}{rank}", self._setup(who, rank, epoch), self._folder)
            for rank in range(self.scenario.shapes[who].ranks)
        ]

    def _setup(self, who: str, rank: int, epoch: int) -> Setup:
        scenario, place = self.scenario, self._places[who]
        transport, section = self._subject.transport, dict(self._subject.options)
        if scenario.region_access:
            transport, section = REGION_ACCESS, {"inner": transport, **section}
        if self._subject.relayed:
            section |= {"port": place.data + rank, "advertise_port": place.front_data + rank, "chunk_bytes": 4096}
        options = {
            "instance": who,
            "listen": f"127.0.0.1:{place.control}",
            "advertise": f"127.0.0.1:{place.front_control}",
            "transports": [transport],
            "integrity": "crc" if scenario.integrity else "none",
            **self.limits,
            transport: section,
        }
        if who in scenario.secrets:
            options["secret"] = scenario.secrets[who]
        return Setup(who, scenario.shapes[who], rank, epoch, options, self._subject.instance)

    def start(self, who: str) -> None:
        if who not in self._programs:
            self._launch(who)
        for program in self._programs[who]:
            program.answer(START_S)
        self._proxy.open(who)

    def signal(self, who: str, what: str) -> None:
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}[what]
        if what == "kill":
            self._proxy.refuse(who)
        for program in self._programs[who]:
            program.signal(number)
        if what == "kill":
            for program in self._programs.pop(who):
                program.close()

    def garbage(self, who: str) -> None:
        place = self._places[who]
        for rank in range(self.scenario.shapes[who].ranks):
            data = [place.data + rank] if self._subject.relayed else []
            for port in (place.control + rank, *data):
                for junk in JUNK:
                    with socket.create_connection(("127.0.0.1", port), timeout=_MARGIN_S) as stranger:
                        stranger.sendall(junk)

    # -------------------------------------------------------------- what they say

    def call(self, call: Call) -> None:
        consumer = call.role is Role.CONSUMER
        place = self._places[call.producer]
        order = Order(
            "call",
            call=call,
            address=f"127.0.0.1:{place.front_control}" if consumer and call.mode is Mode.PUSH else None,
            ticket=self._tickets[call.transfer] if consumer and call.mode is Mode.PULL else None,
            lease_s=self.lease_s(call),
        )
        for answer in self._all(call.who, order):
            if answer.ticket is not None:
                self._tickets[call.transfer] = answer.ticket

    def _all(self, who: str, order: Order, timeout_s: float = _MARGIN_S) -> list[Answer]:
        """Ask all ranks at once."""
        for program in self._programs[who]:
            program.send(order)
        return [program.answer(timeout_s) for program in self._programs[who]]

    def wait(self, who: str, condition: str, transfer: str) -> None:
        order = Order("wait", condition=condition, transfer=transfer, limit_s=self.limit_s)
        answers = self._all(who, order, self.limit_s + _MARGIN_S)
        if not all(answer.met for answer in answers):
            state = [answer.snapshot for answer in answers]
            problem = f"{who} has not come to {condition} {transfer}"
            raise StuckError(f"{self.scenario.id}: {problem}: {state}; rows so far: {self.rows}")

    def tell(self, who: str, transfer: str) -> list[dict[str, Any]]:
        return [answer.row for answer in self._all(who, Order("row", transfer=transfer))]

    def end(self, who: str) -> tuple[list[str], bool]:
        answers = self._all(who, Order("end"))
        return [flaw for answer in answers for flaw in answer.flaws], all(answer.full for answer in answers)

    # ------------------------------------------------------------------- faults

    def arm(self, what: Break) -> None:
        self._proxy.arm(what)

    def fired(self) -> None:
        if not self._proxy.fired(self.limit_s):
            raise StuckError(f"{self.scenario.id}: a fault has not happened; rows so far: {self.rows}")

    def heal(self) -> None:
        self._proxy.heal()
