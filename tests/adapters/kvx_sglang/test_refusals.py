"""What kvx for SGLang does not transfer, asked of its manager in SGLang's own context: refused with a sentence.

Each message is recorded: the matrix (`make test-matrix`) shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvx.core.errors import ConfigError
from kvx_sglang import preflight

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
FAILED = 0

Record = Callable[[str, object], None]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"pp_size": 2}, "2 pipeline stages"),
        ({"tp_size": 2, "moe_tp_size": 2, "attn_tp_size": 1, "attn_cp_size": 2}, "2 context parallel ranks"),
        ({"attn_dcp_size": 2}, "2 decode context parallel ranks"),
        ({"num_dp_ranks": 2}, "2 data parallel ranks"),
    ],
    ids=["pipeline", "context", "decode context", "data"],
)
def test_ranks_that_are_not_tensor_parallel(
    rig: Any, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], what: str, record_property: Record
) -> None:
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(rig._context, "ranks", lambda rank, size: get_parallel().override(**sizes))
    with pytest.raises(ConfigError, match=f"SGLang runs with {what}") as refusal:
        rig.manager("decode", rig.buffers(1))
    record_property("refusal", refusal.value)


def test_another_page_size_at_prefill(rig: Any, record_property: Record) -> None:
    """Where SGLang would end its decode server, one request fails after the other."""
    rig.prefill(rig.buffers(1, page=32))
    manager = rig.decode(rig.buffers(2))
    receiver = rig.receiver(manager, 1)
    receiver.send_metadata(np.array([6], np.int32), 1, None, decode_prefix_len=0)
    rig.until("refused", lambda: receiver.poll() == FAILED)
    with pytest.raises(Exception, match="page size 32") as refusal:
        receiver.failure_exception()
    told = str(refusal.value.failure_reason)  # type: ignore[attr-defined]
    assert told.startswith("kvx: layout: ")
    record_property("refusal", told)


def test_pull(monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    monkeypatch.setenv("KVX_MODE", "pull")
    with pytest.raises(ConfigError, match="kvx can push there only") as refusal:
        preflight.load_options()
    record_property("refusal", refusal.value)
