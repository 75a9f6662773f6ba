"""The event log: one JSON line per finished transfer."""

from __future__ import annotations

import json
import logging
import os
import time

from kvx.core.errors import ConfigError
from kvx.core.model import Outcome

_log = logging.getLogger(__name__)


class EventLog:
    """Appends outcomes to the file of option `event_log`, which several ranks and instances may share.

    A line has `at` (seconds of the wall clock), `peer` (this rank) and the fields of `Outcome`.
    Raises ConfigError where the file cannot be opened at the start; later failures are logged.
    """

    def __init__(self, path: str, peer: str) -> None:
        self._path = path
        self._peer = peer
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"option event_log: {path} cannot be written: {error.strerror}") from error

    def write(self, outcome: Outcome) -> None:
        """Append one line, whole or not at all."""
        line = {
            "schema": "kvx.outcome/1",
            "at": time.time(),
            "peer": self._peer,
            "transfer": outcome.transfer,
            "ok": outcome.ok,
            "reason": outcome.reason and outcome.reason.value,
            "detail": outcome.detail,
            "mode": outcome.mode and outcome.mode.value,
            "role": outcome.role and outcome.role.value,
            "bytes": outcome.bytes,
            "seconds": outcome.seconds,
            "parts": outcome.parts,
        }
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as error:
            _log.warning("event log %s: %s", self._path, error)

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
