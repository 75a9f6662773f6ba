"""docs/write-a-transport.md quotes the example: what it shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/write-a-transport.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_piece_of_code_is_cut_out_of_the_example(block: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "examples/samehost/samehost").glob("*.py")]
    assert any(block in source for source in sources)


def test_the_page_shows_code_and_commands() -> None:
    assert len(BLOCKS) >= 8
    assert PAGE.count("```") == 2 * (len(BLOCKS) + 1)
    assert PAGE.count("```console") == 1
