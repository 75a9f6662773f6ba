"""Entry points: kvx's own hooks, and SGLang's plugins. Importing this costs nothing heavy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from kvx.hookspecs import hookimpl

if TYPE_CHECKING:
    from kvx.drift import Adapter
    from kvx.driver import EngineDriver


@hookimpl
def kvx_drivers() -> Mapping[str, EngineDriver]:
    from kvx_sglang.driver import SglangDriver

    return {"sglang": SglangDriver()}


@hookimpl
def kvx_interfaces() -> Mapping[str, Adapter]:
    from kvx_sglang.interface import SGLANG

    return {"sglang": SGLANG}


def load() -> None:
    """Make transfer backend `kvx` known. SGLang calls this in each process, maybe more than once.

    SGLang only logs what goes wrong in a plugin. Where the command line asks for kvx and it cannot be had, the first
    process ends here instead: one sentence, exit status 2. Other servers start whatever happens.
    """
    from kvx_sglang import preflight

    wanted = parent_process() is None and preflight.asks_for(sys.argv)
    try:
        from kvx_sglang import compat

        compat.register_backend()
        if wanted:
            preflight.check()
            preflight.hold_pages()
    except Exception as error:  # whatever it is, a server that asked for kvx has to hear it
        if wanted:
            sys.stderr.write(f"kvx cannot start: {error}\n")
            raise SystemExit(2) from None
        logging.getLogger("sglang.srt.disaggregation.kvx").exception("kvx: cannot be registered with this SGLang")
