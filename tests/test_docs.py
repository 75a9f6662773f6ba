from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.joinpath("docs").rglob("*.md")])


def test_generated_parts_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci/docs", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_commands_and_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    command_line = "".join((ROOT / "kvx" / name).read_text(encoding="utf-8") for name in ("cli.py", "bench/command.py"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
        for command in re.findall(r"(?:^\$ |`)kvx ([a-z]+)", text, re.MULTILINE):
            assert f'"{command}"' in command_line or command in ("conformance", "sim"), f"{page}: kvx {command}"
