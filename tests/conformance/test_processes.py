"""The scenarios, on simulated endpoints and on real processes: the tables are the ones they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

from kvx.core.model import Reason
from kvx_conformance.actor import Actor, Shape
from kvx_conformance.catalogue import SCENARIOS
from kvx_conformance.live import Live
from kvx_conformance.processes import judge, main, play_all
from kvx_conformance.scenarios import Expect, Scenario, StuckError, table
from kvx_conformance.staged import Play

STARRED = {
    *("A1", "A2", "A3", "A5", "B1", "B2", "B6", "B7", "B9", "C1", "C2", "C8", "C16", "D1", "D2"),
    *("F3", "F6", "G3", "H1", "H2", "I4", "J1", "J2", "K1", "O1"),
}
QUICK = ("KVX-ABT-002", "KVX-CUT-004", "KVX-DIE-005")


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated(name: str) -> None:
    play = Play(SCENARIOS[name])
    play.run()
    assert play.rows == table(SCENARIOS[name]), play.details


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK)
def test_on_real_processes(name: str, tmp_path: Path) -> None:
    verdict = judge(SCENARIOS[name], tmp_path)
    assert verdict.holds, verdict.problem


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_on_real_processes() -> None:
    verdicts = list(play_all(list(SCENARIOS.values()), jobs=4))
    assert len(verdicts) == len(SCENARIOS)
    assert not [f"{verdict.id}: {verdict.problem}" for verdict in verdicts if not verdict.holds]


def test_every_starred_hazard_has_a_scenario() -> None:
    assert {hazard for scenario in SCENARIOS.values() for hazard in scenario.hazards} >= STARRED


def test_ids_are_unique_and_stable() -> None:
    assert all(scenario.id == name for name, scenario in SCENARIOS.items())
    assert len(SCENARIOS) >= 76


# ------------------------------------------------------ what is wrong is seen


def twisted(name: str, *reasons: Reason) -> Scenario:
    """The same scenario with another table."""
    scenario = SCENARIOS[name]
    steps = tuple(
        evolve(step, reasons=frozenset(reasons)) if isinstance(step, Expect) and step.transfer == "t" else step
        for step in scenario.steps
    )
    return evolve(scenario, steps=steps)


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvx_conformance.processes.PACES", (3.0,))


@pytest.mark.usefixtures("one_try")
def test_another_outcome_than_the_named_one_is_seen(tmp_path: Path) -> None:
    verdict = judge(twisted("KVX-ABT-006", Reason.LAYOUT), tmp_path)
    assert not verdict.holds
    assert [row.outcome for row in verdict.rows[:1]] == ["failed (aborted)"]
    assert verdict.problem.count("failed (layout)") == 2, "on both stages"


@pytest.mark.usefixtures("one_try")
def test_a_flipped_bit_is_seen_where_nobody_sums_up(tmp_path: Path) -> None:
    verdict = judge(evolve(twisted("KVX-CUT-016"), integrity=False), tmp_path)
    for rows in (verdict.rows, verdict.simulated):
        assert [(row.outcome, row.intact) for row in rows[:2]] == [("ok", False), ("ok", True)]
    assert not verdict.holds


def test_bytes_in_a_block_without_owner_are_seen() -> None:
    actor = Actor(Shape(), 0, 1)
    assert actor.flaws() == []
    block = actor.pool.free[3]
    actor.cache.memory[block * 4096] ^= 1
    assert actor.flaws() == [f"blocks [{block}] were written while nobody owned them"]


def test_a_wait_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scenario = SCENARIOS["KVX-LSE-001"]
    never = evolve(scenario, steps=(*scenario.steps[:1], Expect("d")))
    with pytest.raises(StuckError, match="d has not come to outcome t"):
        Play(never).run()
    monkeypatch.setattr("kvx_conformance.scenarios.LIMIT_S", 0.2)
    with Live(never, tmp_path) as live, pytest.raises(StuckError, match="d has not come to outcome t"):
        live.run()


def test_no_process_is_left(tmp_path: Path) -> None:
    scenario = SCENARIOS["KVX-DIE-004"]
    with Live(evolve(scenario, steps=scenario.steps[:1]), tmp_path) as live:
        live.run()
        programs = [program for programs in live._programs.values() for program in programs]
        live.signal("d", "stop")
        assert [program.process.poll() for program in programs] == [None, None]
    assert all(program.process.returncode == 0 for program in programs)


# --------------------------------------------------------------- a second try


def test_a_table_that_differs_is_tried_again_only_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvx_conformance import processes

    paces: list[float] = []

    def play(scenario: Scenario, folder: Path, pace: float, void: list[str]) -> processes.Verdict:
        paces.append(pace)
        verdict = processes.Verdict("", "", (), [], [], [], [], False, "differs", pace, list(void), 0.0, 0.0)
        return evolve(verdict, holds=pace == 8.0)

    monkeypatch.setattr(processes, "_play", play)
    monkeypatch.setattr(processes, "PAUSE", float("inf"))
    assert not judge(SCENARIOS["KVX-MOV-001"], tmp_path).holds
    monkeypatch.setattr(processes, "PAUSE", -1.0)
    second = judge(SCENARIOS["KVX-MOV-001"], tmp_path)
    assert paces == [1.0, 1.0, 3.0, 8.0]
    assert second.holds
    assert len(second.void) == 2


def test_the_command_writes_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "processes.json"
    assert main(["KVX-ABT-006", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["schema"], record["scenarios"], record["equal"]) == ("kvx.processes/1", 1, 1)
    (row,) = record["table"]
    assert row["rows"] == row["simulated"]
    assert row["rows"][0] == "p t: failed (aborted), released"
    assert "KVX-ABT-006 holds" in capsys.readouterr().err


def test_the_command_knows_its_scenarios() -> None:
    with pytest.raises(SystemExit) as left:
        main(["KVX-ABT-999"])
    assert left.value.code == 2
