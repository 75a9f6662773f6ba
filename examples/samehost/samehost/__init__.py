"""A transport between processes of one host. kvx loads this module in every engine process: it has to cost nothing."""

from collections.abc import Mapping
from typing import Any

from kvx.hookspecs import hookimpl


def make(section: Mapping[str, Any]) -> Any:
    from samehost.transport import SameHost

    return SameHost(section)


@hookimpl
def kvx_transports() -> Mapping[str, Any]:
    return {"samehost": make}
