"""The fuzzer finds what it is there to find, and a short run of each target finds nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random

import attrs
import pytest

from kvx.core import wire
from kvx.core.errors import RemoteProtocolError
from kvx.core.messages import KINDS, Envelope, Hello
from kvx_conformance import fuzz
from kvx_conformance.fuzz_inputs import Maker, Mutator


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_a_short_run_finds_nothing(name: str) -> None:
    result, findings = fuzz.run(name, 300, seed=7)
    assert errors(findings) == []
    assert (result.inputs, result.checks) == (300, fuzz.CHECKS)


def errors(findings: list[fuzz.Finding]) -> list[str]:
    """Without the measure of memory: this process has run other tests, whose memory comes and goes."""
    return [finding.error for finding in findings if "memory has grown" not in finding.error]


@attrs.define
class Planted:
    """A target with a fault of each kind."""

    feeding: Callable[[], bool]
    checking: Callable[[], None] = lambda: None
    closed: int = 0

    def feed(self) -> bool:
        return self.feeding()

    def check(self) -> None:
        self.checking()

    def close(self) -> None:
        self.closed += 1


def broken() -> bool:
    raise ValueError("not the typed one")


def unwell() -> None:
    raise AssertionError("an honest user is not served")


@pytest.mark.parametrize(
    ("target", "text"),
    [(Planted(broken), "not the typed one"), (Planted(lambda: True, unwell), "an honest user")],
)
def test_what_must_not_happen_is_found(monkeypatch: pytest.MonkeyPatch, target: Planted, text: str) -> None:
    monkeypatch.setattr(fuzz, "TARGETS", {"planted": (1.0, lambda random: target)})
    _, findings = fuzz.run("planted", 100, seed=1)
    assert len(errors(findings)) == 5
    assert all(text in error for error in errors(findings))
    assert fuzz.main(["--inputs", "10"]) == 1


def test_memory_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytearray] = []

    def hoard() -> bool:
        kept.append(bytearray(b"x" * (2 << 20)))
        return True

    monkeypatch.setattr(fuzz, "TARGETS", {"planted": (1.0, lambda random: Planted(hoard))})
    _, (finding,) = fuzz.run("planted", 60, seed=1)
    assert "memory has grown" in finding.error


def test_the_same_seed_gives_the_same_inputs() -> None:
    def inputs(seed: int) -> list[object]:
        random = Random(seed)  # noqa: S311 - inputs of a test
        maker, mutator = Maker(random), Mutator(random)
        return [maker.message() for _ in range(20)] + [mutator.changed(bytes(40), b"other") for _ in range(20)]

    assert inputs(1) == inputs(1) != inputs(2)


def test_made_messages_are_of_every_kind_and_mostly_right() -> None:
    maker = Maker(Random(1))  # noqa: S311 - inputs of a test
    made = [maker.message() for _ in range(400)]
    assert {type(message) for message in made} == set(KINDS.values()) - {Hello}
    good = 0
    for message in made:
        with contextlib.suppress(RemoteProtocolError):
            wire.decode(wire.encode(Envelope(1, 1, 2, message)))
            good += 1
    assert good > 200
