"""The simulation as a test: random worlds hold, replay exactly, and see what is broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from kvx_conformance.commands import sim
from kvx_conformance.fabric import Process
from kvx_conformance.oneside import OneSided, Operation
from kvx_conformance.room import Note
from kvx_conformance.scenarios import Plane
from kvx_conformance.sim import World, run_world

CHUNK = 15


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_worlds_hold(first: int) -> None:
    worlds = [run_world(seed) for seed in range(first, first + CHUNK)]
    assert not [(world.seed, world.violations) for world in worlds if world.violations]


def test_all_kinds_of_fault_happen() -> None:
    worlds = [run_world(seed) for seed in range(60)]
    for name in ("ok", "failed", "aborts", "crashes", "deaths", "restarts", "cuts", "stalls", "duplicates", "reuses"):
        assert sum(getattr(world, name) for world in worlds) >= 10, name
    assert {world.kind for world in worlds} == {"calm", "aborts", "faults", "storm"}


@pytest.mark.parametrize("seed", [3, 20, 39])
def test_a_seed_replays_exactly(seed: int) -> None:
    traces: list[list[str]] = [[], []]
    summaries = [run_world(seed, trace.append) for trace in traces]
    assert summaries[0] == summaries[1]
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50


def test_a_seed_replays_in_another_process() -> None:
    """No order of a set, which differs from process to process, may decide anything."""
    program = (
        "import hashlib; from kvx_conformance.sim import run_world; lines = []\n"
        "for seed in range(6): run_world(seed, lines.append)\n"
        "print(hashlib.sha256('\\n'.join(lines).encode()).hexdigest())"
    )
    digests = set()
    for number in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": number}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_bytes_that_do_not_arrive_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = OneSided._copy

    def lossy(self: OneSided, op: Operation, batch: list[tuple[int, int, int]]) -> None:
        copy(self, op, batch[1:])

    monkeypatch.setattr(OneSided, "_copy", lossy)
    texts = [text for seed in range(12) for text in run_world(seed).violations]
    assert any("is ok at" in text and "but wrong" in text for text in texts)


def test_a_byte_that_comes_after_its_blocks_were_freed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14 broken on purpose: a transport that calls an operation over before its bytes have landed."""

    def early(self: OneSided, op: Operation) -> None:
        if not op.initiator.alive or op.op_id not in op.initiator.ops:
            return
        op.initiator.ops.pop(op.op_id)
        op.initiator.feed(Done(op.op_id, op.post.local.nbytes))

    from kvx.core.events import OpDone as Done

    post = OneSided.post

    def impatient(self: OneSided, process: Process, action: object) -> None:
        before = set(process.ops)
        post(self, process, action)  # type: ignore[arg-type]
        for op_id in set(process.ops) - before:
            op = process.ops[op_id]
            self.fabric.soon(op.rng, lambda op=op: early(self, op))  # type: ignore[misc]

    monkeypatch.setattr(OneSided, "post", impatient)
    texts = [text for seed in range(40) for text in run_world(seed).violations]
    assert any("landed in blocks" in text or "while nobody owned them" in text for text in texts)


def test_a_cut_of_one_direction_lets_the_other_one_pass() -> None:
    world = World(2)
    red, blue = (world.places[name].engine.processes[0] for name in ("red", "blue"))
    world.fabric.cut([("red", "blue")], [Plane.CONTROL], 5.0)
    passing = {
        (plane, way[0]): world.fabric.held_until(plane, *way) for plane in Plane for way in permutations((red, blue))
    }
    assert {key for key, until in passing.items() if until is not None} == {(Plane.CONTROL, red)}


def test_cuts_of_every_kind_happen() -> None:
    said: list[str] = []

    def note(what: Note) -> None:
        if not what.who:
            said.append(str(what.what))

    for seed in range(400):
        world = World(seed, note)
        if world.kind == "storm":
            world.run()
    cuts = {(line.split(" from ")[0], line.count(" to ")) for line in said if line.startswith("CUT")}
    planes = ("connection", "control", "data", "control and data")
    assert cuts == {(f"CUT of {what}", ways) for what in planes for ways in (1, 2)}


def test_messages_that_come_twice_are_harmless() -> None:
    """In a calm world all that is asked for ends well, however often each message comes."""
    doubled = [seed for seed in range(400) if (world := World(seed)).kind == "calm" and "duplicates" in world.elements]
    summaries = [run_world(seed) for seed in doubled[:25]]
    assert sum(summary.duplicates for summary in summaries) > 100
    assert not [summary.violations for summary in summaries if summary.violations]


def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "deep" / "sim.json"
    assert sim(["--first", "5", "--seeds", "4", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert (report["schema"], report["worlds"], report["violations"]) == ("kvx.sim/1", 4, [])
    assert {"restarts", "duplicates", "reuses", "deaths"} <= report.keys()
    assert report["transfers"] == report["ok"] + report["failed"] or report["transfers"] > 0
    assert "4 worlds" in capsys.readouterr().err


def test_the_command_says_which_seed_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OneSided, "_copy", lambda *_: None)
    assert sim(["--seeds", "6", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {found["seed"] for found in report["violations"]} <= set(range(6))
    assert report["violations"]


def test_a_trace_needs_a_seed() -> None:
    assert sim(["--trace"]) == 2
    assert sim(["--seed", "3", "--trace"]) == 0
