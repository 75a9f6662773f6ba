"""The generated parts of docs/protocol.md: fields, limits, and diagrams of what two endpoints really said."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import attrs
import msgspec

from kvx.core import handshake, wire
from kvx.core.events import (
    Abort,
    Action,
    Claim,
    Event,
    Expose,
    Fence,
    Forbid,
    OpDone,
    OpFailed,
    Post,
    Report,
    Send,
    Stage,
)
from kvx.core.messages import KINDS, GrantMessage, Hello, Renew
from kvx.core.model import (
    CacheGroup,
    Grant,
    InstanceInfo,
    LayerSpec,
    Layout,
    Mode,
    Offered,
    Outcome,
    Peer,
    Reason,
    Released,
    Ticket,
)
from kvx_conformance.pair import Net, Node
from kvx_conformance.pair import ticket as ticket_of
from kvx_conformance.scenes import expose, stage

RECORDS = (Grant, Ticket, Peer, InstanceInfo, Layout, CacheGroup, LayerSpec)
LIMITS = {
    "MAX_FRAME": "bytes of one envelope from a proven peer",
    "MAX_FRAME_UNPROVEN": "bytes of one envelope from anybody else",
    "MAX_TICKET": "characters of a ticket",
    "MAX_GROUPS": "cache groups: in a layout, a grant, `first`",
    "MAX_LAYERS": "layers of one group, and names of one stage",
    "MAX_BLOCKS": "block ids in one grant, all groups together",
    "MAX_LEGS": "ranks in `legs`, each named once",
    "MAX_RENEWED": "transfers in one Renew",
    "MAX_ENTRIES": "versions, facts and transports in Hello",
    "PROOF_BYTES": "bytes of a proof; a Hello may have none (0)",
}


# ------------------------------------------------------------------------------ fields


def fields() -> str:
    """A table for each message and each record in one."""
    kinds = [(f"{_name(kind)} (kind {number})", kind) for number, kind in KINDS.items()]
    tables = [*kinds, *((_name(record), record) for record in RECORDS)]
    reasons = "**A reason** is one of the texts " + ", ".join(f"`{reason.value}`" for reason in Reason) + "."
    return "\n\n".join([reasons, *(_table(title, kind) for title, kind in tables)]) + "\n"


def limits() -> str:
    rows = [f"| `{name}` | {getattr(wire, name)} | {text} |" for name, text in LIMITS.items()]
    rows.append(f"| `PARKED` | {handshake.PARKED} | messages kept on a connection whose handshake has not ended |")
    rows.append(f"| `PARKED_BYTES` | {handshake.PARKED_BYTES} | bytes of these together |")
    return "\n".join(["| limit | value | of what |", "|---|---|---|", *rows]) + "\n"


def _table(title: str, kind: type[attrs.AttrsInstance]) -> str:
    hints = get_type_hints(kind, include_extras=True)
    rows = []
    for field in attrs.fields(kind):
        default = "required" if field.default is attrs.NOTHING else f"`{_default(field.default)}`"
        rows.append(f"| `{field.name}` | {_type(hints[field.name])} | {default} |")
    return "\n".join([f"**{title}**", "", "| field | type | default |", "|---|---|---|", *rows])


def _default(value: Any) -> str:
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        return "{}"
    if isinstance(value, Enum):
        return str(value.value)
    return {
        "None": "nil",
        "True": "true",
        "False": "false",
        "()": "[]",
        "b''": "empty",
        "": "empty",
        "UNSET": "left out",
    }.get(str(value), str(value))


def _name(kind: type) -> str:
    return kind.__name__.removesuffix("Message")


def _type(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _limited(arguments[0], next(m for m in arguments[1:] if isinstance(m, msgspec.Meta)))
    if origin is tuple:
        return f"array of ({_type(arguments[0])})"
    if origin is dict:
        return f"map of ({_type(arguments[0])}) to ({_type(arguments[1])})"
    if origin in (typing.Union, types.UnionType):
        return _type(arguments[0]) + (", or left out" if msgspec.UnsetType in arguments else ", or nil")
    if attrs.has(kind):
        return "map `blocks`: `{groups: [[block id, ...], ...]}`" if kind.__name__ == "BlockTable" else _name(kind)
    if kind is Reason:
        return "a reason"
    if issubclass(kind, Enum):
        return "text: " + ", ".join(f"`{member.value}`" for member in kind)
    return {int: "int", str: "text", bytes: "bytes", float: "float", bool: "bool"}[kind]


def _limited(kind: type, meta: msgspec.Meta) -> str:
    name = _type(kind)
    if kind in (int, float):
        return f"{name} {_power(meta.ge)} to {_power(meta.le)}"
    low, high = meta.min_length or 0, meta.max_length
    return f"{name} of {low} to {high}"


def _power(value: float | None) -> str:
    for bits in (40, 63, 20):
        if value in (2**bits, 2**bits - 1):
            return f"2^{bits}" + ("" if value == 2**bits else "-1")
    return f"{value:g}" if value is not None else "any"


# --------------------------------------------------------------------------- sequences


class _Watched(Net):
    """Writes down what the endpoints do, in the order in which they do it."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.lines: list[str] = []

    def act(self, node: Node, action: Action) -> None:
        line = self._line(node, action)
        if line:
            self.lines.append(line)
        super().act(node, action)

    def _line(self, node: Node, action: Action) -> str | None:
        me = _who(node)
        match action:
            case Send() as send:
                return f"{me}->>{_other(me)}: {_said(send)}"
            case Post(op=op):
                return f"{me}-){_other(me)}: {op.name} {len(action.local)} pieces (data)"
            case Forbid():
                return f"Note over {me}: transport: forbid"
            case Fence(generation=generation):
                return f"Note over {me}: transport: fence below generation {generation}"
            case Report(news=Outcome(ok=ok, reason=reason)):
                return f"Note over {me}: Outcome({'ok' if ok else f'failed, {reason.value if reason else None}'})"
            case Report(news=Released()):
                return f"Note over {me}: Released: the engine may reuse its blocks"
            case Report(news=Offered()):
                return f"Note over {me}: Offered"
            case _:
                return None

    def engine(self, node: Node, event: Event) -> None:
        words = {Expose: "Expose", Claim: "Claim", Abort: "Abort"}
        word = words.get(type(event), "")
        if isinstance(event, Stage):
            word = f"Stage({'last part' if event.last else 'first part'})"
        self.lines.append(f"Note over {_who(node)}: engine: {word}")
        node.put(event)
        self.flow()

    def end(self, node: Node, *, ok: bool = True) -> None:
        """Its operations end."""
        self.lines.append(f"Note over {_who(node)}: operations end: {OpDone.__name__ if ok else OpFailed.__name__}")
        node.end_ops(ok=ok)
        self.flow()

    def note(self, text: str) -> None:
        self.lines.append(f"Note over P,D: {text}")


def _who(node: Node) -> str:
    return node.info.instance.upper()


def _other(me: str) -> str:
    return "D" if me == "P" else "P"


def _said(send: Send) -> str:
    match send.message:
        case Hello(step=step, refusal=None):
            return f"Hello {step}"
        case GrantMessage(grant=grant):
            return f"Grant(generation {grant.generation}, lease {grant.lease_s:g} s)"
        case Renew(transfers=transfers, echo=echo):
            return f"Renew({'t' if transfers else ''}{'echo' if echo else ''})"
        case message:
            reason = getattr(message, "reason", None)
            ok = getattr(message, "ok", None)
            words = [str(word) for word in (None if ok is None else f"ok={str(ok).lower()}", _value(reason)) if word]
            return f"{_name(type(message))}({', '.join(words)})"


def _value(reason: Any) -> str | None:
    return None if reason is None else str(reason.value)


def _push(net: _Watched) -> None:
    p, d = net.pair()
    net.engine(d, expose(1, 2))
    net.engine(p, Claim("t", Mode.PUSH))
    net.engine(p, stage(5, tokens=8, last=False))
    net.engine(p, stage(6, first=1, tokens=8))
    net.end(p)


def _pull(net: _Watched) -> None:
    p, d = net.pair()
    net.engine(p, expose(1, 2, mode=Mode.PULL))
    net.note("the ticket travels in the answer of P's server, through the router, into D's request")
    paper = ticket_of(p, 1, 2)
    net.engine(d, Claim("t", Mode.PULL, paper))
    net.engine(d, stage(8, 9, mode=Mode.PULL, with_=paper))
    net.end(d)


def _abort(net: _Watched) -> None:
    p, d = net.pair()
    net.engine(d, expose(1, 2))
    net.engine(p, stage(5, 6))
    net.engine(d, Abort("t"))
    net.end(p, ok=False)


def _restart(net: _Watched) -> None:
    p, d = net.pair()
    net.engine(d, expose(1, 2))
    net.engine(p, stage(5, 6))
    net.note("P's process is killed while it writes; its connections break")
    net.kill(p)
    reborn = net.node("p")
    net.note("the same instance starts again, with another epoch; D dials as it did before")
    net.advance(1)
    net.note("quarantine_s after the proof that the writer is gone")
    net.advance(net.limits.quarantine_s)
    assert reborn.news == []


SCENES: dict[str, Callable[[_Watched], None]] = {
    "Push: blocks leave while P still computes": _push,
    "Pull: D reads with a ticket": _pull,
    "Abort by D while P writes, over a transport that cannot forbid": _abort,
    "P dies while it writes and starts again, over a transport that cannot forbid": _restart,
}


def sequences() -> str:
    """One mermaid diagram for each scene."""
    parts = []
    for title, scene in SCENES.items():
        net = _Watched()
        scene(net)
        lines = ["participant P as P (producer)", "participant D as D (consumer)", *net.lines]
        body = "\n".join(f"    {line}" for line in lines)
        parts.append(f"### {title}\n\n```mermaid\nsequenceDiagram\n{body}\n```")
    return "\n\n".join(parts) + "\n"
