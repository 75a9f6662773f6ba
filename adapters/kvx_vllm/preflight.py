"""A look at the command line before vLLM starts its processes.

The connector itself is made in vLLM's workers, minutes later and three processes deep; whatever
it says there, vLLM wraps into tracebacks and exit status 1. What can be known at once is said
at once, in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvx.config import Options
from kvx_vllm.versions import check_version

FLAG = "--kv-transfer-config"
MULTI = "MultiConnector"


def settings_on(command_line: Sequence[str], connector: str) -> Mapping[str, Any] | None:
    """kvx's settings on vLLM's command line; None where it names another connector, or none."""
    text = ""
    for index, word in enumerate(command_line):
        flag, equals, _ = word.replace("_", "-", 3).partition("=") if word.startswith("--") else ("", "", "")
        if flag == FLAG:  # the last one counts
            text = word.partition("=")[2] if equals else "".join(command_line[index + 1 : index + 2])
    try:
        config = json.loads(text)
    except ValueError:
        return None  # there is none, or vLLM says it better
    return _settings_in(config, connector)


def _settings_in(config: object, connector: str) -> Mapping[str, Any] | None:
    """In the configuration of one connector, or of the MultiConnector around it."""
    if not isinstance(config, dict):
        return None
    settings = config.get("kv_connector_extra_config") or {}
    if not isinstance(settings, dict):
        return None
    if config.get("kv_connector") == connector:
        return settings
    inner = settings.get("connectors") if config.get("kv_connector") == MULTI else None
    found = (_settings_in(one, connector) for one in (inner if isinstance(inner, list) else ()))
    return next((one for one in found if one is not None), None)


def check(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError: options that cannot work, an untested vLLM, a control port that is in use."""
    options = Options.load(settings)
    check_version(options.allow_untested_engine)
    options.check_listen("set listen to a free port of this machine")
