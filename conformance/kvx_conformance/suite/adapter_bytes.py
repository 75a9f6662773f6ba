"""Cases of an adapter that look past the tokens: caches that are cut in unlike ways, and the bytes themselves."""

from __future__ import annotations

from functools import partial

from kvx.core.model import Mode, Role
from kvx_conformance.suite.adapter import each_mode
from kvx_conformance.suite.case import Context, NotExercised
from kvx_conformance.suite.servers import Servers, control, servers, until
from kvx_conformance.suite.subject import Feature


def _unlike(cut: Role, mode: Mode, context: Context) -> None:
    with servers(context, mode, cut=cut) as bench:
        block = bench.place.small.block_size
        prompts = bench.prompts([1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 5 * block + 3])
        for prompt in prompts:
            moved, alone = bench.through(prompt), bench.alone(prompt)
            context.check(moved == alone, f"a prompt of {len(prompt)} tokens: {moved} instead of {alone}")
        _all_received(context, bench, len(prompts))


for _role, _name in ((Role.PRODUCER, "prefill"), (Role.CONSUMER, "decode")):
    each_mode(
        "KVX-ADP-009",
        f"unlike-{_name}",
        f"The cache of the {_name} server is cut in another way than the other one's (block size or ranks): prompts "
        "around both borders have the tokens of a single instance, each by a good transfer.",
        needs=[Feature.CUT],
    )(partial(_unlike, _role))


@each_mode(
    "KVX-ADP-010",
    "bytes",
    "Prompts of some blocks and a few tokens: in whole blocks the decode server has afterwards what the prefill server "
    "has, byte by byte; where a transport drops the bytes, it has not.",
    needs=[Feature.RAW],
)
def same_bytes(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        block = bench.place.small.block_size
        # Not of whole blocks alone: an engine computes the last token of a prompt again.
        prompts = bench.prompts([2 * block + 1, 3 * block + 2, 14 * block + block // 2])
        node, dropping = control(bench)
        differs = 0
        for prompt in prompts:
            bench.through(prompt)
            bench.through(prompt, dropping)
            first, second, third = (bench.raw_kv(one, prompt) for one in (bench.prefill, bench.decode, node))
            context.check(first, f"the prefill server has no block of a prompt of {len(prompt)} tokens")
            place = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
            context.check(
                len(first) == len(second) and place is None,
                f"a prompt of {len(prompt)} tokens: {len(second)} bytes for {len(first)}, unlike from {place} on",
            )
            differs += third != first
        _all_received(context, bench, len(prompts))
        if not differs:
            raise NotExercised("Bytes are equal even where a transport drops all of them: equal ones prove nothing.")


def _all_received(context: Context, bench: Servers, due: int) -> None:
    came = until(lambda: bench.received() == due, bench.bound_s("an abort"))
    context.check(came, f"{bench.received()} of {due} transfers are good: the others were computed again")
