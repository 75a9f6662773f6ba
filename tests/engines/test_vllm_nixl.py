"""A prefill and a decode server of vLLM over NIXL alone, on each backend; the prefill server is the oracle."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import frozen

from kvx.core.model import Mode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HELPER = Path(__file__).parents[1] / "transports/kvx_nixl/backends_here.py"
LENGTHS = [2, 31, 33, 100, 257, 700]
MODES = [Mode.PULL, Mode.PUSH]


@frozen
class Pair:
    transport: str
    prefill: Any
    decode: Any

    def moved(self) -> dict[Mode, int]:
        """Bytes that this transport moved, as each server's status says: pull at D, push at P."""
        told = {Mode.PUSH: self.prefill.status(), Mode.PULL: self.decode.status()}
        # It is the only one, so nothing else can have moved them.
        assert [list(one["transports"]) for one in told.values()] == [[self.transport]] * 2
        return {mode: int(one["transports"][self.transport]["bytes"]) for mode, one in told.items()}


@pytest.fixture(scope="module")
def here() -> ModuleType:
    spec = importlib.util.spec_from_file_location(HELPER.stem, HELPER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["nixl-ucx", "nixl-libfabric"])
def pair(
    request: pytest.FixtureRequest, bench: Any, here: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    transport = request.param
    section, back = dict(here.OPTIONS[transport]), None
    if transport == "nixl-libfabric":
        section["preload"] = [str(path) for path in here.libraries(tmp_path_factory.mktemp("nixl"))]
        try:
            back = here.enter_private_network()
        except OSError as error:
            pytest.skip(f"no network namespace can be made here: {error}")
    try:
        prefill, decode = (
            bench.start(f"{name}-{transport}", transports=[transport], **{transport: section})
            for name in ("prefill", "decode")
        )
        bench.cluster.wait_ready(timeout_s=480)
        yield Pair(transport, prefill, decode)
        settled = bench.until(lambda: not prefill.status()["open"] and not decode.status()["open"], 60)
        assert settled, (prefill.status(), decode.status())
        bench.cluster.stop(prefill.child, decode.child)
    finally:
        if back is not None:
            here.leave_private_network(back)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_a_single_vllm_and_nixl_moved_the_bytes(
    bench: Any, pair: Pair, keep: Any, mode: Mode
) -> None:
    rows, before = [], pair.moved()
    for prompt in bench.prompts(91 + MODES.index(mode), LENGTHS):
        served = bench.serve(pair.prefill, pair.decode, bench.completion(prompt, 16), mode)
        wanted = pair.prefill.post(bench.completion(prompt, 16)).tokens
        row = {"tokens": len(prompt), "equal": served.decode.tokens == wanted, **served.decode.kvx}
        rows.append({**row, "expected_bytes": bench.moved(len(prompt))})
    after = pair.moved()
    status = {name: one.status() for name, one in (("prefill", pair.prefill), ("decode", pair.decode))}
    transports = {name: one["transports"] for name, one in status.items()}
    keep(
        f"vllm_{pair.transport}_{mode.value}",
        {"mode": mode.value, "transport": pair.transport, "requests": rows, "transports": transports},
    )
    assert [row["tokens"] for row in rows if not row["equal"]] == []
    # Equal tokens alone could be a recompute: the bytes came, and the decode server computed the last token only.
    assert {row["ok"] for row in rows} == {True}
    assert [row["bytes"] for row in rows] == [row["expected_bytes"] for row in rows]
    assert {row["computed_tokens"] for row in rows} == {1}
    other = Mode.PUSH if mode is Mode.PULL else Mode.PULL
    assert after[mode] - before[mode] == sum(row["expected_bytes"] for row in rows)
    assert after[other] == before[other]
