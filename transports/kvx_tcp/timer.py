"""Deadlines as a file descriptor, so that an idle transport is woken by nothing else."""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_MONOTONIC, _NONBLOCK_CLOEXEC = 1, os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Timer:
    """Calls functions later. Its descriptor is readable when one is due."""

    def __init__(self) -> None:
        self.fd = int(_libc.timerfd_create(_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, seconds: float, call: Callable[[], None]) -> int:
        """A number with which the call can be forgotten again."""
        self._count += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._count, call))
        self._arm()
        return self._count

    def forget(self, number: int) -> None:
        """Nothing is woken for this call any more; one that has been made or forgotten is no matter."""
        self._due = [due for due in self._due if due[1] != number]
        heapq.heapify(self._due)
        self._arm()

    def run(self) -> None:
        """Call what is due."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        self._arm()

    def _arm(self) -> None:
        wait_ns = max(1, int((self._due[0][0] - time.monotonic()) * 1e9)) if self._due else 0
        spec = _Spec(0, 0, *divmod(wait_ns, 1_000_000_000))
        if _libc.timerfd_settime(self.fd, 0, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        self._due.clear()
        os.close(self.fd)
