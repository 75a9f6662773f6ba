"""`kvx doctor` on a host with NIXL: what it says of backends that load, and of those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from kvx.checks import Check
from kvx_nixl.checks import examine

pytestmark = pytest.mark.timeout(120)


def found(sections: dict[str, dict[str, Any]]) -> dict[str, Check]:
    return {check.name: check for check in examine(sections)}


def test_backends_are_loaded_and_not_only_listed(sections: dict[str, dict[str, Any]]) -> None:
    checks = found(sections)
    assert all(check.ok for check in checks.values()), checks
    assert "1.5.0" in checks["nixl"].detail
    assert checks["nixl UCX"].detail.startswith("loads") and checks["nixl LIBFABRIC"].detail.startswith("loads")
    assert "the plugin wants FABRIC_1.7" in checks["libfabric"].detail


def test_a_backend_that_does_not_load_is_told_with_what_to_do(sections: dict[str, dict[str, Any]]) -> None:
    bad = {**sections, "nixl-libfabric": {**sections["nixl-libfabric"], "preload": ["/nowhere/libfabric.so.1"]}}
    check = found(bad)["nixl LIBFABRIC"]
    assert not check.ok and check.fix
