"""Many worlds: run in parallel, summed up as they end, stopped and gone on with.

What is kept does not grow with the number of seeds: totals, the violations, and which batches
are done. With a record on disk a million worlds can be lived through in several sittings.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from attrs import define, field

import kvx
import kvx_conformance
from kvx.core.errors import ConfigError, KvxError
from kvx_conformance.sim import Summary, run_world

BATCH = 10
"""Worlds that one process lives through before it reports."""
COUNTED = (
    *("transfers", "ok", "failed", "aborts", "crashes", "deaths", "restarts", "cuts", "stalls", "duplicates"),
    *("reuses", "quarantined"),
)
KEPT = 1000
"""Violations that are kept; more are only counted."""
_AHEAD = 8
"""Batches for each process that are under way or wait for it; also how far one may be ahead of the slowest."""
_SAVE_S = 5.0
_BAR_S = 0.2
_LINE_S = 30.0
_LOOK_S = 0.5


@define
class Tally:
    """How far a campaign over `seeds` worlds from seed `first` on has come; what a record on disk holds."""

    first: int
    seeds: int
    source: str
    """Digest of the code that the worlds are made of."""
    worlds: int = 0
    violated: int = 0
    seconds: float = 0.0
    upto: int = 0
    """Every batch below this number is done, and those in `beyond`."""
    beyond: list[int] = field(factory=list)
    totals: dict[str, int] = field(factory=lambda: dict.fromkeys(COUNTED, 0))
    violations: list[tuple[int, str]] = field(factory=list)

    @property
    def batches(self) -> int:
        return -(-self.seeds // BATCH)

    def batch(self, number: int) -> range:
        start = self.first + number * BATCH
        return range(start, min(start + BATCH, self.first + self.seeds))

    def add(self, number: int, summaries: Sequence[Summary]) -> None:
        for summary in summaries:
            self.worlds += 1
            self.violated += bool(summary.violations)
            for name in COUNTED:
                self.totals[name] += getattr(summary, name)
            self.violations += [(summary.seed, text) for text in summary.violations]
        self.violations = sorted(self.violations)[:KEPT]
        self.beyond.append(number)
        while self.upto in self.beyond:
            self.beyond.remove(self.upto)
            self.upto += 1


def source_digest() -> str:
    """Of every Python file of kvx and of the simulation: a world means another one when either changes."""
    total = hashlib.sha256()
    for package in (kvx, kvx_conformance):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*.py")):
            total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def resume(first: int, seeds: int, record: Path | None) -> Tally:
    """A new tally, or the recorded one. Raises ConfigError for a record of something else."""
    fresh = Tally(first, seeds, source_digest())
    if record is None or not record.exists():
        return fresh
    try:
        found = msgspec.json.decode(record.read_bytes(), type=Tally)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--record {record} cannot be read: {error}. Remove it to begin anew.") from error
    if (found.first, found.seeds) != (first, seeds):
        asked, there = f"--first {first} --seeds {seeds}", f"--first {found.first} --seeds {found.seeds}"
        raise ConfigError(f"--record {record} is of {there}, not of {asked}: name another file")
    if found.source != fresh.source:
        raise ConfigError(
            f"--record {record} is of other source code: its worlds were others. Remove it to begin anew."
        )
    if found.totals.keys() != fresh.totals.keys() or not 0 <= found.upto <= found.batches:
        raise ConfigError(f"--record {record} is not what was written. Remove it to begin anew.")
    return found


def run(tally: Tally, jobs: int, record: Path | None, say: Callable[[str], None]) -> bool:
    """Go on until every world has been lived through or Ctrl-C was pressed; whether it was.

    Batches that are under way at Ctrl-C are ended and counted. Raises KvxError when a process dies.
    """
    begun, before = time.monotonic(), tally.seconds
    progress = _Progress(tally, say)
    saved = begun
    try:
        with _ctrl_c() as stopping, closing(_batches(tally, jobs, stopping)) as done:
            for number, summaries in done:
                tally.add(number, summaries)
                now = time.monotonic()
                tally.seconds = before + now - begun
                progress.tell(now)
                if record is not None and now >= saved + _SAVE_S:
                    save(tally, record)
                    saved = now
    finally:
        progress.clear()
        if record is not None:
            save(tally, record)
    return stopping.is_set()


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C, which therefore tears nothing; the second one interrupts as ever."""
    stopping, usual = threading.Event(), signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        stopping.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopping
    finally:
        signal.signal(signal.SIGINT, usual)


def save(tally: Tally, record: Path) -> None:
    """Replace the record in one step: whoever interrupts it finds the one before. Raises ConfigError."""
    part = record.with_name(record.name + ".part")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(tally))
        os.replace(part, record)
    except OSError as error:
        raise ConfigError(f"--record {record} cannot be written: {error.strerror}") from error


def _batches(tally: Tally, jobs: int, stopping: threading.Event) -> Generator[tuple[int, list[Summary]], None, None]:
    """The batches that are left, as they end; after `stopping` only those under way."""
    left = iter([number for number in range(tally.upto, tally.batches) if number not in tally.beyond])
    if jobs == 1:
        while not stopping.is_set() and (only := next(left, None)) is not None:
            yield only, _live(tally.batch(only))
        return
    pool = ProcessPoolExecutor(jobs, initializer=_follow)
    try:
        waiting: dict[Future[list[Summary]], int] = {}
        number = next(left, None)
        while waiting or number is not None:
            if stopping.is_set():
                number = None
                waiting = {future: batch for future, batch in waiting.items() if not future.cancel()}
            while number is not None and number < tally.upto + _AHEAD * jobs:
                waiting[pool.submit(_live, tally.batch(number))] = number
                number = next(left, None)
            done, _ = wait(waiting, _LOOK_S, "FIRST_COMPLETED")
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise KvxError("a process of the simulation was killed (out of memory?): its batch is not counted") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _live(seeds: Sequence[int]) -> list[Summary]:
    summaries = []
    for seed in seeds:
        try:
            summaries.append(run_world(seed))
        except Exception as error:
            error.add_note(f"in the world of seed {seed}")
            raise
    return summaries


def _follow() -> None:
    """Ctrl-C reaches the whole group, and the parent alone decides what it means; without it there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@define(eq=False)
class _Progress:
    """A line that overwrites itself on a terminal, else a line now and then."""

    _tally: Tally
    _say: Callable[[str], None]
    _begun: float = field(factory=time.monotonic)
    _before: int = field(init=False)
    _told: float = field(init=False)
    _terminal: bool = field(factory=sys.stderr.isatty)

    def __attrs_post_init__(self) -> None:
        self._before, self._told = self._tally.worlds, self._begun

    def tell(self, now: float) -> None:
        if now < self._told + (_BAR_S if self._terminal else _LINE_S):
            return
        self._told = now
        rate = (self._tally.worlds - self._before) / max(now - self._begun, 1e-9)
        left_s = (self._tally.seeds - self._tally.worlds) / max(rate, 1e-9)
        share = self._tally.worlds / self._tally.seeds
        ending = f"{rate:.0f} each second, {_clock(left_s)} left, {self._tally.violated} violated"
        count = f"{self._tally.worlds} of {self._tally.seeds} worlds, {ending}"
        if self._terminal:
            bar = f"[{'#' * int(20 * share):<20}] {count}"
            sys.stderr.write("\r\x1b[K" + bar[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
        else:
            self._say(count)

    def clear(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}:{minutes % 60:02d}:{int(seconds) % 60:02d}"
