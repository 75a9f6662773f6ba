"""The two operations, and cases that are run with each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

from kvx.core.model import Descriptors, Op
from kvx_conformance.suite.case import Context, Profile, case
from kvx_conformance.suite.subject import Feature

NEEDS = {Op.WRITE: Feature.WRITE, Op.READ: Feature.READ}


def piece(offset: int, length: int, region: int = 0) -> Descriptors:
    return Descriptors.of([(region, offset, length)])


def some_op(context: Context) -> Op:
    """WRITE where it is declared, else READ."""
    return Op.WRITE if Feature.WRITE in context.features else Op.READ


def declared_ops(context: Context) -> list[Op]:
    return [op for op in Op if NEEDS[op] in context.features]


def each_op(
    rule: str,
    name: str,
    title: str,
    *,
    profile: Profile = Profile.CORE,
    needs: Sequence[Feature] = (),
    lacks: Sequence[Feature] = (),
    limit_s: float = 20.0,
) -> Callable[[Callable[[Context, Op], None]], Callable[[Context, Op], None]]:
    """Two cases, one for each operation; `{op}` in the title is its name."""

    def add(run: Callable[[Context, Op], None]) -> Callable[[Context, Op], None]:
        for op in (Op.WRITE, Op.READ):
            needed = [NEEDS[op], *needs]
            text = title.format(op=op.value.upper())
            one = f"{name}-{op.value}"
            register = case(rule, one, text, profile=profile, needs=needed, lacks=lacks, limit_s=limit_s)
            register(_with(run, op))
        return run

    return add


def _with(run: Callable[[Context, Op], None], op: Op) -> Callable[[Context], None]:
    @wraps(run)  # the standard list knows a case by the name of its function
    def one(context: Context) -> None:
        run(context, op)

    return one
