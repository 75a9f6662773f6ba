"""Interop: pairs of engines that take each other's cache over, and those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from kvx import cli
from kvx_conformance.suite import broken_adapters, interop
from kvx_conformance.suite.interop import Cell

JOINED = Cell("a", "b", "push", moved=4096, reason="", detail="", tokens_equal=True, running=True, seconds=0.1)
REFUSED = evolve(JOINED, moved=0, reason="layout", detail="dtype: this here, that there")


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (JOINED, "joined"),
        (REFUSED, "refused"),
        (evolve(REFUSED, reason="", tokens_equal=None), "refused"),
        (evolve(JOINED, tokens_equal=False), "BROKEN"),
        (evolve(JOINED, tokens_equal=None), "BROKEN"),
        (evolve(REFUSED, tokens_equal=False), "BROKEN"),
        (evolve(REFUSED, detail=""), "BROKEN"),
        (evolve(JOINED, moved=0), "BROKEN"),
        (evolve(JOINED, running=False), "BROKEN"),
        (evolve(REFUSED, running=False), "BROKEN"),
    ],
)
def test_verdicts(cell: Cell, verdict: str) -> None:
    assert (cell.verdict, cell.holds) == (verdict, verdict != "BROKEN")
    assert verdict in interop.line(cell)


def run(engines: list[str], file: Path) -> tuple[int, list[dict[str, Any]]]:
    status = cli.main(["conformance", "interop", *engines, "--json", str(file)])
    return status, json.loads(file.read_text())["pairs"]


@pytest.mark.timeout(120)
def test_engines_of_one_kind_take_each_others_cache_over(tmp_path: Path) -> None:
    status, pairs = run(["reference"], tmp_path / "interop.json")
    assert status == 0
    assert [(pair["mode"], pair["verdict"], pair["tokens_equal"]) for pair in pairs] == [
        ("push", "joined", True),
        ("pull", "joined", True),
    ]
    assert all(pair["moved"] > 0 for pair in pairs)


@pytest.mark.timeout(120)
def test_wrong_blocks_make_a_pair_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bent = f"{broken_adapters.__name__}:turns_blocks_round"
    status, pairs = run(["reference", bent], tmp_path / "interop.json")
    found = {(pair["producer"], pair["consumer"], pair["mode"]): pair["verdict"] for pair in pairs}
    assert status == 1
    for mode in ("push", "pull"):
        assert found["reference", "reference", mode] == "joined"
        assert found["reference", bent, mode] == "BROKEN"
    assert "BROKEN" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_unlike_caches_are_refused_in_words(tmp_path: Path) -> None:
    bent = f"{broken_adapters.__name__}:mistakes_its_layout"
    status, pairs = run(["reference", bent], tmp_path / "interop.json")
    refused = [pair for pair in pairs if pair["producer"] != pair["consumer"]]
    assert status == 0
    assert len(refused) == 4
    for pair in refused:
        assert (pair["verdict"], pair["moved"], pair["reason"], pair["tokens_equal"]) == ("refused", 0, "layout", True)
        assert "packing: " in pair["detail"]
