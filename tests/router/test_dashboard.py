"""deploy/grafana.json: each query asks for metrics and labels that routers and engines really export."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvx.router.metrics import render
from kvx.traffic import families

ROOT = Path(__file__).parent.parent.parent
BOARD = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
_NAME = re.compile(r"(?:vllm:)?kvx_[a-z_]+")


def queries() -> Iterator[Any]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(target["expr"], target["legendFormat"], id=f"{panel['id']}{target['refId']}")


def samples(lines: str) -> dict[str, set[str]]:
    """The labels of each metric in Prometheus' text format; names without a sample are left out."""
    found: dict[str, set[str]] = {}
    for line in lines.splitlines():
        if match := re.match(r"([a-z_:]+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'([a-z_]+)="', match[2] or ""))
    return found


@pytest.fixture(scope="module")
def of_engines() -> Mapping[str, set[str]]:
    """What vLLM's /metrics had when it was last looked at, without vLLM's own labels; what `kvx status` prints."""
    kept = json.loads((ROOT / "docs/evidence/vllm_metrics.json").read_text(encoding="utf-8"))
    vllm = "\n".join(f"{sample} 0" for sample in kept["decode"])
    row = {"peers": ["p#0"], "bytes": 1, "operations": 1, "failed": 0, "fallbacks": 0, "last_fallback": None}
    told = {"transports": {"tcp": row, "nixl-ucx": {"left_out": "no library"}}}
    return samples(vllm) | samples(render(families("127.0.0.1:5700", told)))


@pytest.fixture
def of_router(world: Any, fake: Any, tmp_path: Path) -> Mapping[str, set[str]]:
    async def scenario() -> str:
        path = tmp_path / "pools.toml"
        async with world(None, [fake("p")], [fake("d")], pool_file=path) as w:
            path.write_text(path.read_text().replace("prefill = [", 'prefill = ["http+dns://localhost:1", '))
            await w.until(lambda: w.router.dispatcher.pools.names)
            assert (await w.complete())[0] == 200
            async with w.client.get(f"{w.url}/metrics") as answer:
                return str(await answer.text())

    return samples(asyncio.run(scenario()))


def test_each_question_of_the_router_s_metrics_has_a_panel(of_router: Mapping[str, set[str]]) -> None:
    asked = {name for query in queries() for name in _NAME.findall(query.values[0])}
    assert set(of_router) - asked == set()


@pytest.mark.parametrize(("query", "legend"), list(queries()))
def test_a_query_asks_for_what_is_exported(
    query: str, legend: str, of_engines: Mapping[str, set[str]], of_router: Mapping[str, set[str]]
) -> None:
    exported = {**of_engines, **of_router}
    (name,) = _NAME.findall(query)
    assert name in exported
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    filtered = set(re.findall(r'([a-z_]+)!?="', query))
    assert (grouped | filtered) - exported[name] == set()
    shown = set(re.findall(r"\{\{([a-z_]+)\}\}", legend))
    assert shown <= (grouped or exported[name])
    counted = name.endswith(("_total", "_bucket"))
    assert counted == ("rate(" in query or "increase(" in query)
