"""Cases of an adapter: shared beginnings, a long queue, a drain, and what becomes of the blocks of all that ended."""

from __future__ import annotations

import time

from kvx.core.model import Mode
from kvx.up import Node
from kvx_conformance.suite.adapter import LIMIT_S, comes_to_hold_nothing, each_mode, has_its_blocks_back
from kvx_conformance.suite.case import Context, case
from kvx_conformance.suite.servers import UNSTOPPABLE, Client, Servers, servers, until
from kvx_conformance.suite.subject import Feature

AT_ONCE = 24
UNLIKE = AT_ONCE // 10
"""Engines compute alike, not bit for bit, when requests are batched in another way: so many may differ."""
LEAST = AT_ONCE // 2
"""Transfers that have to be good. A producer may refuse the others: option `max_held_fraction`."""
SHUT_S = 2.0
"""How long nothing moves while requests queue up, seconds: below any deadline of an operation."""
ANSWER_S = 60.0


@each_mode(
    "KVX-ADP-001",
    "beginnings",
    "A prompt of 13 blocks and a half, the same again, and others that share its first tokens, up to a block's border, "
    "inside of a block, and to its last token: the tokens of a single instance each time.",
)
def beginnings(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        block = bench.place.small.block_size
        (long,) = bench.prompts([13 * block + block // 2])
        shared = [4 * block, 4 * block + 1, 6 * block + block // 2, len(long) - 1]
        others = [long[:count] + bench.prompts([block + 3])[0] for count in shared]
        for prompt in [long, long, *others, long[: 2 * block], long]:
            moved, alone = bench.through(prompt), bench.alone(prompt)
            context.check(moved == alone, f"a prompt of {len(prompt)} tokens: {moved} instead of {alone}")
        came = until(lambda: bench.received() > 0, bench.bound_s("an abort"))
        context.check(came, "no transfer is good: all tokens were computed again")


@each_mode(
    "KVX-ADP-005",
    "queue",
    f"{AT_ONCE} requests at once, while for two seconds no byte moves: each is answered with the tokens of a "
    "single instance, and half of them at least by a good transfer.",
)
def queue(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        prompts = _prompts(bench, AT_ONCE)
        bench.gate.touch()
        clients = [bench.start(prompt) for prompt in prompts]
        bench.begun()
        time.sleep(SHUT_S)
        bench.gate.unlink()
        answers = [client.answer(ANSWER_S * context.pace) for client in clients]
        context.check(all(status == 200 for status, _ in answers), f"they end as {[status for status, _ in answers]}")
        came = until(lambda: bench.received() >= LEAST, bench.bound_s("an abort"))
        context.check(came, f"only {bench.received()} of {AT_ONCE} transfers are good")
        unlike = sum(tokens != bench.alone(prompt) for prompt, (_, tokens) in zip(prompts, answers, strict=True))
        context.check(unlike <= UNLIKE, f"{unlike} of {AT_ONCE} answers are not those of a single instance")


@each_mode(
    "KVX-ADP-006",
    "mixed",
    "Clients that stay, leave at once, in the midst of a transfer and after its end, and at last a prefill server that "
    "is killed: each instance that lives comes to have as many free blocks as before.",
    needs=[Feature.BLOCKS],
)
def mixed(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        first, *rest = _prompts(bench, 13)
        bench.through(first)
        both = (bench.prefill, bench.decode)
        for node in both:
            until(lambda node=node: not bench.open(node), bench.bound_s("an abort"))  # type: ignore[misc]
        before = {node.child.name: bench.free_blocks(node) for node in both}
        leaving = [_left(bench, rest[at], at * 0.02) for at in range(3)]
        bench.gate.touch()
        clients = [bench.start(prompt) for prompt in rest[3:9]]
        bench.begun()
        leaving += clients[::2]
        for client in clients[::2]:
            client.leave()
        bench.gate.unlink()
        for client in clients[1::2]:
            status, _ = client.answer(ANSWER_S * context.pace)
            context.check(status == 200, f"beside clients that leave, one that stays is answered {status}")
        leaving += [_left(bench, rest[at], 0.3) for at in (9, 10)]
        for node in both:
            _whole(context, bench, node, before[node.child.name])
        bench.gate.touch()
        last = bench.start(rest[11])
        bench.begun()
        bench.kill(bench.prefill)
        bench.gate.unlink()
        last.answer(bench.bound_s("the peer dies or stops in mid-transfer"))
        _whole(context, bench, bench.decode, before[bench.decode.child.name])


@each_mode(
    "KVX-ADP-007",
    "drained",
    "The prefill instance is drained while bytes are under way: this request and the next one are answered with the "
    "tokens of a single instance, and it comes to hold nothing.",
    needs=[Feature.ALONE],
)
def drained(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        following = _drained_under_way(context, bench)
        after, alone = bench.through(following), bench.alone(following)
        context.check(after == alone, f"{after} instead of {alone} once it is drained")
        comes_to_hold_nothing(context, bench, bench.prefill, bench.bound_s("an abort"))


@each_mode(
    "KVX-ADP-007",
    "drained-roles",
    "The prefill instance of an engine whose servers have roles is drained while bytes are under way: this request has "
    "the tokens of a single instance, the next one has them too or an error, and it comes to hold nothing.",
    lacks=[Feature.ALONE],
)
def drained_with_roles(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        following = _drained_under_way(context, bench)
        status, tokens = bench.start(following).answer(ANSWER_S * context.pace)
        alone = bench.alone(following)
        context.check(status != 200 or tokens == alone, f"{tokens} instead of {alone} once it is drained")
        comes_to_hold_nothing(context, bench, bench.prefill, bench.bound_s("an abort"))


@case(
    "KVX-ADP-008",
    "late-write",
    "A push's client leaves while writes hang that nobody can stop: the decode instance gives no block of it away "
    "before they are over, and all of them afterwards.",
    needs=[Feature.BLOCKS, Feature.PUSH, Feature.WRITE],
    limit_s=LIMIT_S,
)
def late_write(context: Context) -> None:
    with servers(context, Mode.PUSH, UNSTOPPABLE) as bench:
        block = bench.place.small.block_size
        first, left = bench.prompts([block, 4 * block])
        bench.through(first)
        until(lambda: not bench.open(bench.decode), bench.bound_s("an abort"))
        before = bench.free_blocks(bench.decode)
        bench.gate.touch()
        client = bench.start(left)
        bench.begun()
        client.leave()
        end, most = time.monotonic() + SHUT_S, before - 4
        while time.monotonic() < end:
            now = bench.free_blocks(bench.decode)
            context.check(now <= most, f"{now} blocks are free while four may still be written; {before} were before")
            time.sleep(0.05)
        bench.gate.unlink()
        _whole(context, bench, bench.decode, before)


def _drained_under_way(context: Context, bench: Servers) -> list[int]:
    """The prefill instance is drained while a transfer is open; returns a prompt for the next request."""
    first, following = bench.prompts([3 * bench.place.small.block_size] * 2)
    bench.gate.touch()
    client = bench.start(first)
    bench.begun()
    bench.drain(bench.prefill)
    bench.gate.unlink()
    status, tokens = client.answer(ANSWER_S * context.pace)
    alone = bench.alone(first)
    context.check((status, tokens) == (200, alone), f"{status} {tokens} instead of {alone} while it is drained")
    return following


def _prompts(bench: Servers, count: int) -> list[list[int]]:
    block = bench.place.small.block_size
    return bench.prompts([(2 + at % 3) * block + at % 5 for at in range(count)])


def _left(bench: Servers, prompt: list[int], stay_s: float) -> Client:
    client = bench.start(prompt)
    time.sleep(stay_s)
    client.leave()
    return client


def _whole(context: Context, bench: Servers, node: Node, due: int) -> None:
    limit_s = bench.bound_s("the peer dies or stops in mid-transfer") + bench.bound_s("an abort")
    has_its_blocks_back(context, bench, node, due, limit_s)
