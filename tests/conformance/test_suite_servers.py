"""What the cases of an adapter are compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvx_conformance.suite.servers import Servers


def server(name: str, *, lives: bool = True) -> Any:
    return SimpleNamespace(child=SimpleNamespace(url=name, running=lives))


@pytest.mark.parametrize(
    ("single", "prefill_lives", "asked"),
    [("single", True, "single"), (None, True, "prefill"), (None, False, "decode")],
)
def test_the_tokens_to_compare_with_are_of_a_server_to_which_nothing_was_moved(
    monkeypatch: pytest.MonkeyPatch, single: str | None, prefill_lives: bool, asked: str
) -> None:
    urls: list[str] = []
    monkeypatch.setattr(Servers, "_tokens", lambda self, url, prompt: urls.append(url))
    alone = server(single).child if single else None
    bench = cast("Any", Servers)(
        None, None, None, server("prefill", lives=prefill_lives), server("decode"), *[None] * 2, alone
    )
    bench.alone([1, 2, 3])
    assert urls == [asked]
