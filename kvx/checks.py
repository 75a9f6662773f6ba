"""What `kvx doctor` reports, by kvx itself and by plugins."""

from __future__ import annotations

from attrs import frozen


@frozen
class Check:
    """One line of the report. `fix` is empty where there is nothing to do."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
