"""A look at the command line before SGLang starts its processes: what can be known at once is said in one sentence."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvx.config import Options
from kvx.core.errors import ConfigError
from kvx_sglang.versions import check_version

BACKEND = "kvx"
FLAG = "--disaggregation-transfer-backend"
HOLD = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
"""After so many seconds SGLang reuses pages of a failed request without proof that nobody writes into them."""
HOLD_S = 365 * 86400


def asks_for(command_line: Sequence[str]) -> bool:
    """Whether SGLang is started with kvx as its transfer backend; the last flag counts."""
    chosen = ""
    for index, word in enumerate(command_line):
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            chosen = value if equals else "".join(command_line[index + 1 : index + 2])
    return chosen == BACKEND


def load_options() -> Options:
    """kvx's options from the environment: SGLang has no settings of a transfer backend. Raises ConfigError."""
    options = Options.load()
    check_version(options.allow_untested_engine)
    if options.mode == "pull":
        raise ConfigError("option mode is pull: SGLang's prefill waits for decode's pages, so kvx can push there only")
    return options


def hold_pages() -> None:
    """In the processes that are started from here time alone frees nothing, unless the operator has chosen one."""
    os.environ.setdefault(HOLD, str(HOLD_S))


def check() -> None:
    """Raises ConfigError: options that cannot work, an untested SGLang, a control port that is in use."""
    options = load_options()
    options.check_listen("set KVX_LISTEN to a free port of this machine")
