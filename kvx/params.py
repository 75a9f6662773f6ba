"""A request's `kv_transfer_params`, checked: what it asks of this instance.

Everything of kvx stands under the key `kvx`; all other keys are vLLM's, which other engines take
over. A client can write any of it, so nothing is used unchecked; a fault concerns one request and
never raises.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from attrs import frozen

from kvx.address import parse_address
from kvx.core.errors import ConfigError, RemoteProtocolError
from kvx.core.model import Mode, Reason, Ticket

MAX_TRANSFER_ID = 128


@frozen
class Fault:
    """Why one request cannot be transferred."""

    reason: Reason
    detail: str

    def answer(self) -> dict[str, Any]:
        return {"reason": self.reason.value, "detail": self.detail}


@frozen
class Produce:
    """Keep this request's blocks for another instance. In push the router has drawn the transfer's id."""

    mode: Mode
    transfer: str = ""


@frozen
class Consume:
    """Take this request's blocks from another instance: by ticket (pull) or from `address` (push).

    `tokens`: the producer of a push has only so many of the prompt's tokens (a conversation's earlier
    turns). `prompt`: digest of the tokens that the ticket was made for.
    """

    mode: Mode
    transfer: str
    ticket: Ticket | None = None
    address: str | None = None
    tokens: int | None = None
    prompt: str | None = None

    def load(self, prompt: int) -> int:
        """How many of the prompt's tokens come from the producer."""
        offered = self.tokens if self.ticket is None else self.ticket.grant.tokens
        return prompt if offered is None else min(prompt, offered)


@frozen
class Wish:
    """All that one request asks for."""

    produce: Produce | Fault | None = None
    consume: Consume | Fault | None = None
    probe: bool = False


ReadTicket = Callable[[str], Ticket]
MayDial = Callable[[str], bool]


def read_params(params: object, mode: str, read_ticket: ReadTicket, may_dial: MayDial) -> Wish:
    """What these parameters ask for. `mode` is the option: `auto`, or the only mode that is allowed."""
    if not isinstance(params, Mapping):
        return Wish()
    kvx = params.get("kvx")
    if kvx is not None and not isinstance(kvx, Mapping):
        fault = Fault(Reason.OTHER, f"kv_transfer_params: kvx is a {type(kvx).__name__}, not an object")
        return Wish(
            fault if params.get("do_remote_decode") else None, fault if params.get("do_remote_prefill") else None
        )
    kvx = kvx or {}
    produce = _produce(kvx, mode) if params.get("do_remote_decode") else None
    consume = _consume(kvx, mode, read_ticket, may_dial) if params.get("do_remote_prefill") else None
    return Wish(produce, consume, kvx.get("probe") is True)


def _produce(kvx: Mapping[str, Any], allowed: str) -> Produce | Fault:
    # Who takes blocks may hand them on: then `kvx` speaks of what it takes, `kvx.next` of the rest, by default pull.
    if "ticket" in kvx or "from" in kvx:
        following = kvx.get("next", {})
        if not isinstance(following, Mapping):
            return Fault(Reason.OTHER, f"kvx.next is a {type(following).__name__}, not an object")
        kvx = following
    push = kvx.get("mode") == "push"
    if fault := _mode_fault(kvx, "push" if push else "pull", allowed):
        return fault
    if not push:
        return Produce(Mode.PULL)
    transfer = _transfer_id(kvx.get("transfer"))
    return transfer if isinstance(transfer, Fault) else Produce(Mode.PUSH, transfer)


def _consume(kvx: Mapping[str, Any], allowed: str, read_ticket: ReadTicket, may_dial: MayDial) -> Consume | Fault:
    push = kvx.get("mode") == "push"
    if fault := _mode_fault(kvx, "push" if push else "pull", allowed):
        return fault
    if push:
        return _consume_push(kvx, may_dial)
    text = kvx.get("ticket")
    if not isinstance(text, str):
        detail = "kv_transfer_params hold no kvx ticket: they are not from a kvx prefill instance"
        return Fault(Reason.UNKNOWN_TRANSFER, detail)
    try:
        ticket = read_ticket(text)
    except RemoteProtocolError as error:
        return Fault(Reason.AUTH, str(error))
    if not may_dial(ticket.grant.address):
        return Fault(Reason.AUTH, f"the ticket's address {ticket.grant.address} is not in option peers")
    prompt = kvx.get("prompt")
    if not isinstance(prompt, str | None):
        return Fault(Reason.OTHER, f"kvx.prompt is a {type(prompt).__name__}, not a text")
    return Consume(Mode.PULL, ticket.grant.transfer, ticket=ticket, prompt=prompt)


def _consume_push(kvx: Mapping[str, Any], may_dial: MayDial) -> Consume | Fault:
    transfer = _transfer_id(kvx.get("transfer"))
    if isinstance(transfer, Fault):
        return transfer
    address = kvx.get("from")
    try:
        parse_address(address if isinstance(address, str) else "")
    except ConfigError:
        return Fault(Reason.OTHER, f"kvx.from is {str(address)[:80]!r}, not HOST:PORT of a prefill instance")
    if not may_dial(str(address)):
        return Fault(Reason.AUTH, f"kvx.from is {address}, which is not in option peers")
    tokens = kvx.get("tokens")
    if tokens is not None and not (type(tokens) is int and tokens > 0):
        return Fault(Reason.OTHER, f"kvx.tokens is {str(tokens)[:80]!r}, not a number of tokens")
    return Consume(Mode.PUSH, transfer, address=str(address), tokens=tokens)


def _mode_fault(kvx: Mapping[str, Any], mode: str, allowed: str) -> Fault | None:
    if kvx.get("mode", mode) not in ("push", "pull"):
        return Fault(Reason.OTHER, f"kvx.mode is {str(kvx['mode'])[:80]!r}, not push or pull")
    if allowed not in ("auto", mode):
        return Fault(Reason.OTHER, f"the request asks for {mode}, option mode allows {allowed} only")
    return None


def _transfer_id(value: object) -> str | Fault:
    if isinstance(value, str) and 0 < len(value) <= MAX_TRANSFER_ID and value.isprintable():
        return value
    return Fault(Reason.OTHER, f"kvx.transfer has to be a text of 1 to {MAX_TRANSFER_ID} printable characters")


class End(Protocol):
    """How a transfer ended; an Outcome is one."""

    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> Reason | None: ...
    @property
    def detail(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


def told(end: End | None) -> dict[str, Any]:
    """What an answer says of a transfer; None: it has not ended yet."""
    if end is None:
        return {"ok": None}
    answer: dict[str, Any] = {"ok": end.ok, "bytes": end.bytes, "seconds": end.seconds}
    return answer if end.ok else {**answer, "reason": (end.reason or Reason.OTHER).value, "detail": end.detail}


def prompt_digest(tokens: Iterable[int]) -> str:
    """What a producer says of its tokens, so that a consumer never takes the blocks of another prompt."""
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()[:32]


def offer(ticket: str, prompt: str | None = None) -> dict[str, Any]:
    """A producer's answer in pull, in upstream's keys and kvx's own: it goes to the consumer as it is.

    `prompt`: the digest of the tokens whose blocks are offered.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "kvx": {"ticket": ticket} if prompt is None else {"ticket": ticket, "prompt": prompt},
    }


def no_offer(fault: Fault) -> dict[str, Any]:
    """A producer's answer from which the consumer computes by itself."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "kvx": {"ok": False, **fault.answer()}}


def other_prompt() -> Fault:
    """A ticket's blocks hold the values of one prompt only."""
    return Fault(Reason.PROMPT, "the ticket was made for another prompt: both legs have to send the same one")


def used_before(transfer: str) -> Fault:
    """A ticket or an id is good for one request."""
    detail = f"transfer {transfer} was used before: a ticket or id is good for one request"
    return Fault(Reason.UNKNOWN_TRANSFER, detail)
