"""The reports that are kept: none was changed, and README's table is what they say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvx_conformance.suite import compatibility, report

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "docs/conformance/reports"
KEPT = compatibility.load(REPORTS)


def test_the_readmes_table_is_what_the_reports_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- begin compatibility:[^\n]*-->\n(.*?)<!-- end compatibility -->", text, re.DOTALL)
    assert block.strip() == compatibility.table(KEPT, "docs/conformance/reports").strip(), "make docs"
    rows = block.strip().splitlines()[2:]
    assert len(rows) == len(KEPT)
    for row, (name, content) in zip(rows, KEPT.items(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        verdicts = [case["verdict"] for case in content["cases"] if not case["provisional"]]
        counts = [verdicts.count(verdict) for verdict in ("pass", "skip_undeclared", "disabled")]
        assert [int(cell) for cell in cells[3:7]] == [*counts, len(verdicts) - sum(counts)]
        for link in re.findall(r"\(([^()]+\.\w+)\)", cells[-1]):
            assert (ROOT / link).is_file()
            assert Path(link).stem == name


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_report_is_whole(name: str) -> None:
    content = KEPT[name]
    assert content["target"]["name"] == name
    assert content["target"]["version"]
    assert (content["schema"], content["strict"], content["not_reached"]) == ("kvx.conformance/1", False, [])
    assert all(one["reason"] for one in content["exempt"])
    assert content["target"]["libraries"]
    assert content["reproduce"].startswith("kvx conformance run")


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("suffix", compatibility.SUFFIXES)
def test_a_kept_report_names_no_path_of_a_machine(name: str, suffix: str) -> None:
    text = (REPORTS / f"{name}.{suffix}").read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(work|tmp|home|root|usr|opt)/", text)


def _copy(folder: Path) -> dict[str, Any]:
    for suffix in compatibility.SUFFIXES:
        shutil.copy(REPORTS / f"tcp.{suffix}", folder)
    content: dict[str, Any] = json.loads((folder / "tcp.json").read_text(encoding="utf-8"))
    return content


def test_a_changed_report_is_refused(tmp_path: Path) -> None:
    content = _copy(tmp_path)
    assert compatibility.load(tmp_path).keys() == {"tcp"}
    content["verdicts"]["pass"] += 1
    (tmp_path / "tcp.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its digest differs"):
        compatibility.load(tmp_path)


def test_a_report_of_some_cases_is_refused(tmp_path: Path) -> None:
    content = {**_copy(tmp_path), "partial": True}
    (tmp_path / "tcp.json").write_text(json.dumps({**content, "digest": report.digest(content)}))
    with pytest.raises(ValueError, match="whole profile"):
        compatibility.load(tmp_path)


def test_a_page_of_another_run_is_refused(tmp_path: Path) -> None:
    _copy(tmp_path)
    (tmp_path / "tcp.md").write_text("# tcp")
    with pytest.raises(ValueError, match=r"tcp\.md is not of the run"):
        compatibility.load(tmp_path)
