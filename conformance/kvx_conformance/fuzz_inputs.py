"""Inputs for the fuzzer: bytes that were nearly right, and messages that are right in type alone."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import attrs
import msgspec

from kvx.core import wire
from kvx.core.messages import KINDS, Envelope, Hello, Message

_EDGES = (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDC, 0xDD, 0xFE, 0xFF)
"""Byte values that mean something to msgpack, or are the ends of a range."""
_WIDE = (0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_LETTERS = "abcxyz019-_.:/#\x00é語\U0001f600"


class Mutator:
    """Arbitrary bytes, and good ones with some of them changed."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def noise(self, most: int = 96) -> bytes:
        return self._random.randbytes(self._random.randrange(most))

    def changed(self, data: bytes, other: bytes = b"") -> bytes:
        """`data` after one to four edits; `other` gives pieces to splice in."""
        random = self._random
        edited = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.randrange(len(edited) + 1)
            stop = at + random.choice((1, 2, 4, 8, 32))
            match random.randrange(8):
                case 0 if at < len(edited):
                    edited[at] ^= 1 << random.randrange(8)
                case 1 if at < len(edited):
                    edited[at] = random.choice(_EDGES)
                case 2:
                    edited[at:at] = self.noise(16)
                case 3:
                    del edited[at:stop]
                case 4:
                    del edited[at:]
                case 5:
                    edited[at:at] = edited[at:stop] * random.choice((1, 2, 30))
                case 6:
                    size = random.choice((1, 2, 4, 8))
                    number = random.choice(_WIDE) % (1 << 8 * size)
                    edited[at : at + size] = number.to_bytes(size, random.choice(("big", "little")))
                case _:
                    start = random.randrange(len(other) + 1)
                    edited[at:stop] = other[start : start + random.choice((4, 16, 64))]
        return bytes(edited)


class Maker:
    """Values of a type, read off its annotations: in range, and otherwise anything.

    `known` gives, by the name of a field, values that mean something to whoever gets them; one of
    them is taken most of the time, so that messages meet transfers and not only refusals.
    """

    def __init__(self, random: Random, known: dict[str, Callable[[], Any]] | None = None) -> None:
        self._random = random
        self._known = known or {}
        self._fields: dict[type, list[tuple[str, Any]]] = {}

    def message(self) -> Message:
        """Any kind but Hello."""
        kinds = [kind for kind in KINDS.values() if kind is not Hello]
        made = self.value(self._random.choice(kinds))
        return typing.cast("Message", made)

    def envelope(self) -> Envelope:
        """Any kind, any epochs."""
        epochs = self._random.getrandbits(63), self._random.getrandbits(63)
        return Envelope(wire.VERSION, *epochs, self.value(self._random.choice(list(KINDS.values()))))

    def value(self, kind: Any) -> Any:
        """A value of this type. Raises TypeError for a type that no message has."""
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._limited(arguments[0], next(m for m in arguments[1:] if isinstance(m, msgspec.Meta)))
        if origin is tuple:
            return tuple(self.value(arguments[0]) for _ in range(self._size()))
        if origin is dict:
            return {self.value(arguments[0]): self.value(arguments[1]) for _ in range(self._size())}
        if origin in (typing.Union, types.UnionType):
            nothing = msgspec.UNSET if msgspec.UnsetType in arguments else None
            return nothing if self._random.random() < 0.3 else self.value(arguments[0])
        if attrs.has(kind):
            return kind(**{name: self._field(name, hint) for name, hint in self._hints(kind)})
        if issubclass(kind, Enum):
            return self._random.choice(list(kind))
        return self._limited(kind, msgspec.Meta())

    def _hints(self, kind: type) -> list[tuple[str, Any]]:
        if kind not in self._fields:
            hints = get_type_hints(kind, include_extras=True)
            self._fields[kind] = [(field.name, hints[field.name]) for field in attrs.fields(kind)]
        return self._fields[kind]

    def _field(self, name: str, hint: Any) -> Any:
        known = self._known.get(name)
        return known() if known is not None and self._random.random() < 0.8 else self.value(hint)

    def _size(self) -> int:
        return self._random.choice((0, 1, 1, 1, 2, 3))

    def _limited(self, kind: type, meta: msgspec.Meta) -> Any:
        random = self._random
        if kind is bool:
            return random.random() < 0.5
        if kind is int:
            low, high = int(meta.ge or 0), int(2**63 - 1 if meta.le is None else meta.le)
            return random.choice((low, high, min(high, low + random.randrange(6)), random.randint(low, high)))
        if kind is float:
            floor, ceiling = float(meta.ge or 0), float(1e9 if meta.le is None else meta.le)
            return random.choice((floor, ceiling, 30.0, random.uniform(floor, ceiling)))
        least, most = meta.min_length or 0, meta.max_length or 64
        size = random.choice((least, min(most, 1024), random.randint(least, min(most, 64)), max(least, min(most, 16))))
        if kind is str:
            return "".join(random.choices(_LETTERS, k=size))
        if kind is bytes:
            return random.randbytes(size)
        raise TypeError(f"no message has a field of type {kind}")


def good_frames(random: Random) -> Sequence[bytes]:
    """Envelopes that decode, some of each kind."""
    maker = Maker(random)
    return [wire.encode(maker.envelope()) for _ in range(400)]
