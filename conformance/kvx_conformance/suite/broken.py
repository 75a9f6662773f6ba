"""A subject that is broken on purpose: what the suite is tested with."""

from __future__ import annotations

from attrs import frozen

from kvx_conformance.suite.subject import Subject


@frozen
class Broken:
    """`cause` says in one sentence what is wrong with it."""

    subject: Subject
    cause: str
    found_by: tuple[str, ...]
    """Ids of cases, or their beginnings, of which one at least has to fail: those that name the cause."""
    proves: tuple[str, ...] = ()
    """Ids of further cases. Each of them has to fail: this is what shows that it can."""
