"""A failing world becomes small: fewer elements, the same failure, a story that can be read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvx_conformance.commands import sim
from kvx_conformance.mutants import SIM, Tree
from kvx_conformance.oneside import OneSided
from kvx_conformance.removals import MUTANTS
from kvx_conformance.shrink import kind_of, shrink
from kvx_conformance.sim import World, run_world

CHECKOUT = Path(__file__).parents[2]
TWO_READERS = "only an accepted Done is acknowledged"
"""Without this rule two readers of one ticket may both believe that they have read it."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A checkout without one rule."""
    tree = Tree(CHECKOUT, tmp_path_factory.mktemp("tree"))
    (mutant,) = [mutant for mutant in MUTANTS if mutant.removes == TWO_READERS]
    tree.edit(mutant)
    return tree


def _failing(tree: Tree) -> int:
    """A seed that fails in this tree."""
    for first in range(0, 200, 20):
        done = tree.run("-c", SIM, "--first", str(first), "--seeds", "20")
        found = re.search(r"^seed (\d+): .* was read by", done.stderr, re.MULTILINE)
        if found:
            assert done.returncode == 1
            assert f"kvx sim --seed {found[1]} --shrink" in done.stderr
            return int(found[1])
    raise AssertionError("no world misses the rule")


def test_a_rule_taken_out_is_told_in_a_small_world(broken: Tree) -> None:
    seed = _failing(broken)
    done = broken.run("-c", SIM, "--seed", str(seed), "--shrink")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    command = shlex.split(lines[-1].removeprefix("to see it again: "))
    kept = command[command.index("--only") + 1].split(",")
    assert 2 * len(kept) < len(World(seed).elements)
    story = lines[: lines.index("")]
    assert 10 < len(story) < 150
    assert any("says Done(" in line for line in story)
    assert any("VIOLATION" in line for line in story)

    again = broken.run("-c", SIM, *command[2:])
    assert again.returncode == 1
    assert "was read by" in again.stderr
    assert sim(command[2:]) == 0  # with the rule in its place


def test_none_of_what_is_left_can_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that never land: one request is enough to see it, and it takes this request."""
    monkeypatch.setattr(OneSided, "_copy", lambda *_: None)
    seed = next(seed for seed in range(20) if run_world(seed).violations)
    shrunk = shrink(seed)
    assert shrunk is not None
    assert [name for name in shrunk.elements if name.startswith("t")] == list(shrunk.elements)
    for missed in shrunk.elements:
        assert not run_world(seed, only=[name for name in shrunk.elements if name != missed]).violations
    assert shrunk.command == f"kvx sim --seed {seed} --only {','.join(shrunk.elements)}"


def test_what_is_left_out_changes_nothing_else() -> None:
    """Of a world with one request left, its engine is asked the same at the same moments as in the whole world."""

    def asked(seed: int, only: list[str] | None) -> str:
        lines: list[str] = []
        run_world(seed, lines.append, only)
        first = next((line for line in lines if "Expose(transfer='t0'" in line or "Stage(transfer='t0'" in line), "")
        return first.split(" blocks")[0].split(" part")[0]

    calm = [seed for seed in range(60) if World(seed).kind == "calm"]
    assert len(calm) > 5
    for seed in calm:
        assert asked(seed, ["t0"]) == asked(seed, None) != ""


def test_kinds_of_failure() -> None:
    one = kind_of("11.736: a WRITE of t2 landed in blocks of green#2@267 that ['nobody'] own")
    assert one == kind_of("3.1: a WRITE of t0+ landed in blocks of red#0@001 that ['t1', 't2'] own")
    assert one != kind_of("3.1: a READ of t0 landed in blocks of red#0@001 that ['t1'] own")
    assert kind_of("1.0: t0 is ok at red#1@9, but wrong: layer a") == kind_of(
        "2.5: t3 is ok at blue#0@12, but wrong: b"
    )


def test_a_world_that_holds_has_nothing_to_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    assert shrink(3) is None
    assert sim(["--seed", "3", "--shrink"]) == 0
    assert "holds" in capsys.readouterr().err


def test_elements_are_named_and_need_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(["--seed", "3", "--only", "t0,t99"]) == 2
    assert "has no ['t99']; it has" in capsys.readouterr().err
    assert sim(["--only", "t0"]) == 2
    assert sim(["--shrink"]) == 2
