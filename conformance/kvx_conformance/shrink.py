"""Makes a failing world small: the fewest of its elements that still fail in the same way, and what then happens.

An element is a request, an abort, a fault, or a kind of bad luck (`sim.World.elements`). Each has
chance of its own, so leaving one out leaves the others as they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from attrs import define, field, frozen

from kvx.core.events import (
    Abort,
    Cancel,
    Claim,
    Expose,
    Fence,
    Fenced,
    Forbid,
    Forbidden,
    Introduce,
    OpDone,
    OpFailed,
    PeerLost,
    Post,
    Received,
    Report,
    Send,
    Stage,
)
from kvx.core.messages import Ack, Command, Done, GrantMessage, Hello, Message, Renew, Revoke, Stopped
from kvx.core.model import BlockTable, Offered, Outcome, Released
from kvx_conformance.fabric import about
from kvx_conformance.oneside import Landed
from kvx_conformance.room import Note
from kvx_conformance.sim import Summary, World, run_world

TRANSFER = re.compile(r"\bt\d+\+?(?!\w)")
NUMBERS = re.compile(r"(?<=READ )\d+|(?<=WRITE )\d+|\[[^]]*\]")
"""What may differ between sentences that are alike."""
ENDS = 2
"""Of sentences that are alike a story has so many of the first and of the last ones."""


@frozen
class Shrunk:
    """The smallest world found. `elements`: id -> what it is; `left_out`: how many others there were."""

    summary: Summary
    elements: dict[str, str]
    left_out: int
    story: tuple[str, ...]

    @property
    def command(self) -> str:
        """What replays it."""
        return f"kvx sim --seed {self.summary.seed} --only {','.join(self.elements)}"


def kind_of(violation: str) -> str:
    """What is wrong, without who, when and how much: the same in a smaller world."""
    sentence = re.split(r": |[{\[]", violation.partition(": ")[2])[0]
    return re.sub(r"\b(red|blue|green)\b\S*|\S*\d\S*", "_", sentence).strip()


def shrink(seed: int, only: Sequence[str] | None = None) -> Shrunk | None:
    """The smallest world of this seed (and of `only` these elements) that fails as it does; None if it holds."""
    full = run_world(seed, only=only)
    if not full.violations:
        return None
    kind = kind_of(full.violations[0])
    known = World(seed).elements
    kept = _fewest(list(only or known), lambda some: kind in map(kind_of, run_world(seed, only=some).violations))
    notes: list[Note] = []
    summary = World(seed, notes.append, kept).run()
    elements = {name: known[name] for name in known if name in kept}
    return Shrunk(summary, elements, len(known) - len(kept), tuple(tell(notes, summary.violations)))


def _fewest(kept: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """Leave out halves, quarters, ... and single ones, until none can be missed."""
    size = len(kept)
    while True:
        at, smaller = 0, False
        while at < len(kept):
            without = kept[:at] + kept[at + size :]
            if fails(without):
                kept, smaller = without, True
            else:
                at += size
        if size > 1:
            size //= 2
        elif not smaller:
            return kept


# ----------------------------------------------------------------------- the story


def tell(notes: Sequence[Note], violations: Sequence[str]) -> Iterator[str]:
    """Who said and moved what when, of the transfers that the violations name (of all if they name none)."""
    concerned = {name for text in violations for name in TRANSFER.findall(text)}
    teller, told, alike = _Teller(), list[tuple[Note, str]](), dict[tuple[str, str], list[int]]()
    for note in notes:
        sentence, transfers = teller.sentence(note)
        if sentence and (not concerned or transfers is None or concerned & transfers):
            alike.setdefault((note.who, NUMBERS.sub("", sentence)), []).append(len(told))
            told.append((note, sentence))
    shown = {place for places in alike.values() for place in (*places[:ENDS], *places[-ENDS:])}
    for place in sorted(shown):
        note, sentence = told[place]
        yield f"{note.moment:9.3f} {note.who + ' ' if note.who else ''}{sentence}"
    if len(shown) < len(told):
        yield f"({len(told) - len(shown)} more, each like one before and one behind it)"


@define
class _Teller:
    """Puts notes into words; knows who is at the other end of each connection and what each operation is of."""

    _links: dict[tuple[str, int], str] = field(factory=dict)
    _ops: dict[tuple[str, int], Post] = field(factory=dict)

    def sentence(self, note: Note) -> tuple[str, set[str] | None]:
        """The words, and of which transfers they are (None: of all); no words where nothing is to be told."""
        who, what = note.who, note.what
        match what:
            case str():
                return what, None
            case Introduce(info=info, link=link):
                self._links[who, link] = str(info.peer)
                return f"knows {info.peer}, epoch {info.epoch % 1000:03d}", None
            case PeerLost(link=link, detail=detail) if (who, link) in self._links:
                return f"has lost a connection to {self._links[who, link]}: {detail}", None
            case Send(link=link, envelope=envelope):
                return self._said(who, link, envelope.message, "says {} to {}")
            case Received(link=link, envelope=envelope):
                return self._said(who, link, envelope.message, "hears {} of {}")
            case Post(op_id=op_id, stamp=stamp):
                self._ops[who, op_id] = what
                size = f"{what.local.nbytes} bytes, generation {stamp.generation}"
                return f"posts {what.op.name} {op_id} of {stamp.transfer} to {what.peer}, {size}", {stamp.transfer}
            case Landed(op=op, op_id=op_id, transfer=transfer, blocks=blocks):
                return f"has bytes of {op.name} {op_id} of {transfer} land in its blocks {list(blocks)}", {transfer}
            case OpDone(op_id=op_id):
                return self._ended(who, op_id, "learns of the end of")
            case OpFailed(op_id=op_id, reason=reason, detail=detail):
                return self._ended(who, op_id, f"learns of the failure ({reason.value}: {detail}) of")
            case Cancel(op_id=op_id):
                return self._ended(who, op_id, "cancels")
            case Expose(blocks=blocks, lease_s=lease_s):
                return f"is given {_blocks(blocks)} to expose for {what.transfer}, lease {lease_s:.1f} s", {
                    what.transfer
                }
            case Stage(part=part, last=last):
                end = ", the last part" if last else ""
                layers = "" if part.layers is None else f" in layers {', '.join(part.layers)}"
                return f"is given {_blocks(part.blocks)}{layers} to stage for {what.transfer}{end}", {what.transfer}
            case Claim(transfer=transfer):
                return f"is told of {transfer}, blocks come later (Claim)", {transfer}
            case Abort(transfer=transfer, reason=reason):
                return f"is to abort {transfer} ({reason.value})", {transfer}
            case Forbid(transfer=transfer) | Forbidden(transfer=transfer):
                return f"{'wants' if isinstance(what, Forbid) else 'has'} {transfer} forbidden", {transfer}
            case Fence(peer=peer, generation=generation) | Fenced(peer=peer, generation=generation):
                return f"{type(what).__name__.lower()}s {peer} below generation {generation}", None
            case Report(news=Outcome(transfer=transfer, ok=ok, reason=reason, detail=detail)):
                end = "ok" if ok or reason is None else f"failed ({reason.value}: {detail})"
                return f"tells its engine that {transfer} is {end}", {transfer}
            case Report(news=Released(transfer=transfer)):
                return f"releases the blocks of {transfer}", {transfer}
            case Report(news=Offered(grant=grant)):
                return f"offers {grant.transfer} to its engine", {grant.transfer}
            case _:
                return "", None

    def _said(self, who: str, link: int, message: Message, frame: str) -> tuple[str, set[str] | None]:
        words = _words(message)
        other = self._links.get((who, link), "somebody")
        return (frame.format(words, other) if words else "", set(about(message).split()))

    def _ended(self, who: str, op_id: int, verb: str) -> tuple[str, set[str] | None]:
        post = self._ops[who, op_id]
        return f"{verb} {post.op.name} {op_id} of {post.stamp.transfer}", {post.stamp.transfer}


def _words(message: Message) -> str:
    match message:
        case GrantMessage(grant=grant):
            return f"Grant({grant.transfer}, {_blocks(grant.blocks)}, generation {grant.generation})"
        case Renew(transfers=transfers):
            return f"Renew({', '.join(transfers)})" if transfers else ""
        case Done(transfer=transfer):
            return f"Done({transfer})"
        case Ack(transfer=transfer, ok=ok, reason=reason):
            return f"Ack({transfer}, {'ok' if ok or reason is None else reason.value})"
        case Revoke(transfer=transfer, reason=reason) | Stopped(transfer=transfer, reason=reason):
            return f"{type(message).__name__}({transfer}, {reason.value})"
        case Hello() | Command():
            return ""


def _blocks(table: BlockTable) -> str:
    return "blocks " + " and ".join(str(list(ids)) for ids in table.groups)
