"""The stacks of processes that hang: asked for with SIGUSR1, which each program of the suite answers on stderr."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

ANSWER_S = 0.3
"""How long a process has to write its stacks."""
_LOG_TAIL = 6000


def answer_signals() -> None:
    """From now on write the stacks of all threads to stderr on SIGUSR1 and on a fatal signal, even in native code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def of_this_process(frame: FrameType | None, below: str) -> str:
    """The main thread's stack from `frame` up to the file `below`, with its source, and the stacks of all threads."""
    frames = traceback.extract_stack(frame)
    own = list(itertools.takewhile(lambda one: one.filename != below, reversed(frames)))
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return f"{''.join(traceback.format_list(own[::-1]))}\nall threads:\n{file.read()}"


def ask(processes: Iterable[int]) -> None:
    """Let these processes write their stacks to their logs. Those that would die of the signal are left alone."""
    asked = [process for process in processes if _answers(process)]
    for process in asked:
        try:
            os.kill(process, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    if asked:
        time.sleep(ANSWER_S)


def descendants(process: int) -> list[int]:
    """The processes that this one has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended while we looked
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(process, ()))
    for one in found:
        found += children.get(one, ())
    return found


def logs(folder: Path) -> str:
    """How each log of a case's folder ends: there its processes have written their stacks."""
    ends = []
    for log in sorted(folder.rglob("*.log")):
        text = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()
        if text:
            ends.append(f"{log.name} ends:\n{text}\n")
    return "\n".join(ends)


def _answers(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
