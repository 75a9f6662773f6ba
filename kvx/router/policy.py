"""Which instances serve a request, and in which mode. Pure: what is known goes in, a decision comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from attrs import frozen

from kvx.core.errors import KvxError
from kvx.core.model import Mode
from kvx.driver import RequestInfo

SHORT_TOKENS = 256
"""A prompt of so few tokens holds few blocks for a short time, so the decode instance may hold them from the start."""
FULL = 0.1
"""Share of free blocks under which a decode instance is full."""
QUEUED = 4
"""So many requests at the least busy prefill instance are a queue: a new one is not computed at once."""
GAINED = 1.0
"""So many requests fewer, on average, at the instance that a late choice finds: then it is worth waiting for."""
DETOUR = 4
"""So many open requests more than the least busy one may an instance have that knows the conversation."""

Wish = Callable[[RequestInfo], Mode | None]
"""The plugins' choice of a mode (hook `kvx_choose_mode`)."""


class NoInstance(KvxError):
    """Nobody can serve this request now; the text says why."""


class Busy(KvxError):
    """Who could serve this request has no room for it now; the text says who."""


class Reason(StrEnum):
    """Why a mode was chosen: a value of the metric's label `reason`."""

    SET = "set"
    PLUGIN = "plugin"
    PUSH_ONLY = "push_only"
    PULL_ONLY = "pull_only"
    NO_ADDRESS = "no_address"
    CONVERSATION = "conversation"
    DECODE_FULL = "decode_full"
    SHORT_PROMPT = "short_prompt"
    PREFILL_QUEUE = "prefill_queue"
    LATE_CHOICE = "late_choice"
    OVERLAP = "overlap"


@frozen
class Candidate:
    """One instance as far as a choice needs it. Push needs a prefill instance's control address, HOST:PORT.

    `open` counts the router's own requests there, `free` is the share of its KV blocks that were free when it was
    last asked, None where it does not say. One that is `resting` has failed lately and serves if nobody else can.
    """

    url: str
    up: bool = True
    address: str | None = None
    note: str = ""
    """Why it is not up, or why its address is not known."""
    open: int = 0
    free: float | None = None
    resting: bool = False


@frozen(kw_only=True)
class View:
    """What the router knows when it decides on one request.

    `mode` is the operator's, None: it may differ between requests. `modes` are what the engines can do. `prompt_tokens`
    is an estimate where the prompt is text. `home`: the URL of the decode instance that has most of the prompt from
    earlier turns. `late_gain`: how many requests fewer, on average, a decode instance had that was chosen after the
    prefill. `waiting` prefilled prompts wait for a decode instance. `room`: open requests that an instance may have.
    `turn` counts requests; `tried` are the URLs where this request has failed.
    """

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]
    request: RequestInfo
    mode: Mode | None = None
    modes: frozenset[Mode] = frozenset(Mode)
    prompt_tokens: int | None = None
    home: str | None = None
    late_gain: float = 0.0
    waiting: int = 0
    room: int = 1 << 30
    turn: int = 0
    tried: frozenset[str] = frozenset()


@frozen
class Decision:
    """`why` tells a person what `reason` counts. In pull `decode` is only who would be chosen now: see `late`."""

    mode: Mode
    reason: Reason
    why: str
    prefill: Candidate
    decode: Candidate


def decide(view: View, wish: Wish) -> Decision:
    """The least busy of those that can serve, in turn where several are. Raises NoInstance and Busy."""
    mode, reason, why = _mode(view, wish)
    prefill = _pick("prefill", view.prefill, view, _at_prefill(view, push=mode is Mode.PUSH), view.room)
    decode = _decode(view, view.room if mode is Mode.PUSH else None)
    if mode is Mode.PUSH and view.waiting:
        raise Busy(f"{view.waiting} prefilled prompts wait for a decode instance: they come first")
    return Decision(mode, reason, why, prefill, decode)


def late(view: View) -> Candidate:
    """The decode instance of a pull whose prefill is over. Raises NoInstance and Busy."""
    return _decode(view, view.room)


def late_gain(decode: Sequence[Candidate], early: str, own: int) -> float:
    """How many open requests fewer another instance has now than the one chosen `early`, `own` requests not counted."""
    opened = {one.url: one.open - (own if one.url == early else 0) for one in decode if one.up}
    return opened[early] - min(opened.values()) if early in opened else 0.0


def _mode(view: View, wish: Wish) -> tuple[Mode, Reason, str]:
    """The first rule that applies."""
    if view.mode is not None:
        return view.mode, Reason.SET, "the operator has set it"
    able = view.modes
    if len(able) == 1:
        (only,) = able
        reason = Reason.PUSH_ONLY if only is Mode.PUSH else Reason.PULL_ONLY
        return only, reason, f"these engines can only {only.value}"
    reachable = _at_prefill(view, push=True)
    wanted = wish(view.request)
    if wanted is not None and (wanted is Mode.PULL or reachable):
        return wanted, Reason.PLUGIN, "a plugin has chosen it"
    if not reachable:
        return Mode.PULL, Reason.NO_ADDRESS, "no prefill instance has told its control address, which push needs"
    if (home := _home(view)) is not None:
        return Mode.PUSH, Reason.CONVERSATION, f"{home.url} has the earlier turns, so waiting finds no better one"
    decode = _at_decode(view)
    if decode and (view.waiting or all(_is_full(one, view) for one in decode)):
        return Mode.PULL, Reason.DECODE_FULL, "no decode instance has room now; one may when the prefill is over"
    length = view.prompt_tokens
    if length is not None and length <= SHORT_TOKENS:
        return Mode.PUSH, Reason.SHORT_PROMPT, f"{length} tokens are computed so soon that no wait pays"
    if (queue := min(one.open for one in reachable)) >= QUEUED:
        return (
            Mode.PULL,
            Reason.PREFILL_QUEUE,
            f"{queue} requests are before it, push would hold blocks for all of them",
        )
    if view.late_gain >= GAINED:
        return Mode.PULL, Reason.LATE_CHOICE, f"lately a late choice found {view.late_gain:.1f} requests fewer"
    return Mode.PUSH, Reason.OVERLAP, "blocks leave while the rest is computed"


def _is_full(one: Candidate, view: View) -> bool:
    return one.open >= view.room or (one.free is not None and one.free < FULL)


def _at_prefill(view: View, *, push: bool) -> list[Candidate]:
    return [one for one in _serving(view.prefill, view) if one.address or not push]


def _at_decode(view: View) -> list[Candidate]:
    return _serving(view.decode, view)


def _serving(pool: Sequence[Candidate], view: View) -> list[Candidate]:
    """Who is up and was not tried; those that failed lately only where there is nobody else."""
    up = [one for one in pool if one.up and one.url not in view.tried]
    return [one for one in up if not one.resting] or up


def _home(view: View) -> Candidate | None:
    """The instance that knows the conversation, as long as that makes nobody wait."""
    decode = _at_decode(view)
    home = next((one for one in decode if one.url == view.home), None)
    if home is None or _is_full(home, view):
        return None
    return home if home.open <= min(one.open for one in decode) + DETOUR else None


def _decode(view: View, room: int | None) -> Candidate:
    able = _at_decode(view)
    return _home(view) or _pick("decode", view.decode, view, able, room)


def _pick(
    pool: str, candidates: Sequence[Candidate], view: View, able: Iterable[Candidate], room: int | None
) -> Candidate:
    serving = {one.url: one for one in able}
    if not serving:
        told = "; ".join(f"{one.url}: {one.note or 'no answer'}" for one in candidates)
        raise NoInstance(f"no {pool} instance can serve this ({told or 'none is known'})")
    free = {url for url, one in serving.items() if room is None or one.open < room}
    if not free:
        raise Busy(f"all {len(serving)} {pool} instances have {room} open requests")
    order = {one.url: (one.open, (index - view.turn) % len(candidates)) for index, one in enumerate(candidates)}
    return serving[min(free, key=lambda url: order[url])]
