"""docs/write-an-adapter.md quotes the adapter: what it shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/write-an-adapter.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_each_piece_of_code_is_cut_out_of_the_adapter(block: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "adapters/kvx_reference").glob("*.py")]
    assert any(block in source for source in sources)


def test_the_page_shows_code() -> None:
    assert len(BLOCKS) >= 9
    assert PAGE.count("```") == 2 * len(BLOCKS)
