from __future__ import annotations

from kvx.used import UsedIds


def test_an_id_is_remembered_for_its_time_and_no_longer() -> None:
    now = 0.0
    used = UsedIds(10.0, lambda: now)
    used.add("a")
    now = 9.0
    used.add("b")
    assert "a" in used
    now = 10.0
    used.add("c")
    assert "a" not in used
    assert len(used) == 2
