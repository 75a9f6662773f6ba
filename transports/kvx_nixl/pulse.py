"""A periodic timer as a file descriptor: it wakes the transport while something has a deadline, and else nobody."""

from __future__ import annotations

import contextlib
import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Pulse:
    def __init__(self) -> None:
        self.fd = int(_libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._period_s = 0.0

    def every(self, seconds: float) -> None:
        """Be readable again and again with this period; 0: never."""
        if seconds == self._period_s:
            return
        self._period_s = seconds
        period = divmod(int(seconds * 1e9), 1_000_000_000)
        if _libc.timerfd_settime(self.fd, 0, ctypes.byref(_Spec(*period, *period)), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)
