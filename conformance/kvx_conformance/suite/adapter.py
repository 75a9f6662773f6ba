"""Cases of an adapter: an engine's real servers, and the question whether a client can tell that there are two."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

from kvx.core.model import Mode
from kvx.up import Node
from kvx_conformance.suite.case import Context, NotExercised, case
from kvx_conformance.suite.servers import SEEN_S, Client, Servers, control, servers, until
from kvx_conformance.suite.subject import Feature

LIMIT_S = 900.0
"""Three cold starts of a real engine on a machine that is busy."""

Run = Callable[[Mode, Context], None]


def each_mode(
    rule: str, name: str, title: str, *, needs: Sequence[Feature] = (), lacks: Sequence[Feature] = ()
) -> Callable[[Run], None]:
    """Two cases, one for each mode that the engine's servers and the transport can."""

    def add(run: Run) -> None:
        for mode, can in ((Mode.PUSH, (Feature.PUSH, Feature.WRITE)), (Mode.PULL, (Feature.PULL, Feature.READ))):
            needed = [*needs, *can]
            case(rule, f"{name}-{mode.value}", title, needs=needed, lacks=lacks, limit_s=LIMIT_S)(partial(run, mode))

    return add


@each_mode(
    "KVX-ADP-001",
    "tokens",
    "Prompts of one token and around each of two block borders, through the router: the tokens of a single instance; "
    "where a transport drops the bytes, other tokens.",
)
def tokens(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        block = bench.place.small.block_size
        prompts = bench.prompts([1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1])
        _, dropping = control(bench)
        differs = 0
        for prompt in prompts:
            moved = bench.through(prompt)
            dropped = bench.through(prompt, dropping)
            alone = bench.alone(prompt)
            differs += dropped != alone
            context.check(moved == alone, f"a prompt of {len(prompt)} tokens: {moved} instead of {alone}")
        context.check(
            until(lambda: bench.received() == len(prompts), bench.bound_s("an abort")),
            f"{bench.received()} of {len(prompts)} transfers are good: the other tokens were computed again",
        )
        if not differs:
            raise NotExercised("Tokens are equal even where every byte was dropped: equal ones prove nothing.")


@each_mode(
    "KVX-ADP-002",
    "client-leaves",
    "A client leaves while its bytes are under way: both instances come to hold nothing and serve the next request.",
)
def client_leaves(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        left, later = bench.prompts([4 * bench.place.small.block_size] * 2)
        client = _held(bench, left)
        client.leave()
        for node in (bench.prefill, bench.decode):
            limit = bench.bound_s("an abort of an initiator whose operations do not end")
            free = until(partial(_nothing, bench, node), limit)
            context.check(free, f"{node.child.name} still holds {bench.open(node)} after {limit:g} s")
        serves(context, bench, later)


@each_mode(
    "KVX-ADP-003",
    "prefill-killed",
    "The prefill server is killed while bytes are under way: the client is answered in time, with right tokens or an "
    "error, and the decode server goes on.",
)
def prefill_killed(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        (prompt,) = bench.prompts([4 * bench.place.small.block_size])
        client = _held(bench, prompt)
        bench.kill(bench.prefill)
        bench.gate.unlink()
        status, tokens = client.answer(bench.bound_s("the peer dies or stops in mid-transfer"))
        wanted = bench.alone(prompt)
        context.check(status != 200 or tokens == wanted, f"it answers {tokens} instead of {wanted}")
        context.check(bench.decode.child.running, "the decode server has ended")
        bench.open(bench.decode)


@each_mode(
    "KVX-ADP-004",
    "prefill-restarted",
    "The prefill server is killed and starts again at its addresses: the same decode server takes its blocks.",
)
def prefill_restarted(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        first, second = bench.prompts([3 * bench.place.small.block_size + 1] * 2)
        serves(context, bench, first)
        bench.kill(bench.prefill)
        bench.replace_prefill()
        _found_again(context, bench, [*first, *second])
        serves(context, bench, second)
        context.check(bench.decode.child.running, "the decode server has ended")


@each_mode(
    "KVX-ADP-004",
    "decode-restarted",
    "The decode server is killed while bytes are under way and starts again at its addresses: the same prefill server "
    "comes to hold nothing, and the next request is served by a transfer.",
)
def decode_restarted(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        first, second = bench.prompts([3 * bench.place.small.block_size + 1] * 2)
        client = _held(bench, first)
        bench.kill(bench.decode)
        bench.gate.unlink()
        client.leave()
        comes_to_hold_nothing(context, bench, bench.prefill, bench.bound_s("the peer dies or stops in mid-transfer"))
        bench.replace_decode()
        _found_again(context, bench, [*first, *second])
        serves(context, bench, second)
        context.check(bench.prefill.child.running, "the prefill server has ended")


@each_mode(
    "KVX-ADP-002",
    "client-leaves-early",
    "A client leaves while one side has handed over its blocks and the other one, which stands still, has not heard of "
    "the request: both instances come to hold nothing, have all their blocks back (where the driver counts them) and "
    "serve the next request.",
)
def client_leaves_early(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        first, left, later = bench.prompts([3 * bench.place.small.block_size] * 3)
        serves(context, bench, first)
        target, other = (bench.decode, bench.prefill) if mode is Mode.PUSH else (bench.prefill, bench.decode)
        with keeps_nothing(context, bench), bench.standing_still(other):
            client = bench.start(left)
            if not until(lambda: bench.open(target), SEEN_S * context.pace):
                raise NotExercised(f"{target.child.name} has handed over nothing.")
            client.leave()
        serves(context, bench, later)


@contextmanager
def keeps_nothing(context: Context, bench: Servers, failure: str = "an abort") -> Generator[None, None, None]:
    """What happens inside of the block leaves no transfer open, and each block free that was free before.

    `failure`: whose bound says by when.
    """
    both = (bench.prefill, bench.decode)
    limit_s = bench.bound_s(failure)
    for node in both:
        until(partial(_nothing, bench, node), bench.bound_s("an abort"))
    counted = both if Feature.BLOCKS in context.features else ()
    before = [bench.free_blocks(node) for node in counted]
    yield
    for node in both:
        comes_to_hold_nothing(context, bench, node, limit_s)
    for node, due in zip(counted, before, strict=True):
        has_its_blocks_back(context, bench, node, due, limit_s)


def _held(bench: Servers, prompt: list[int]) -> Client:
    """A client whose transfer is open on both sides, with no byte moved yet."""
    bench.gate.touch()
    client = bench.start(prompt)
    bench.begun()
    return client


def _nothing(bench: Servers, node: Node) -> bool:
    return not bench.open(node)


def comes_to_hold_nothing(context: Context, bench: Servers, node: Node, limit_s: float) -> None:
    free = until(partial(_nothing, bench, node), limit_s)
    context.check(free, f"{node.child.name} still holds {bench.open(node)} after {limit_s:g} s")


def has_its_blocks_back(context: Context, bench: Servers, node: Node, due: int, limit_s: float) -> None:
    """As many free blocks as before: `due`."""
    came = until(partial(_has, bench, node, due), limit_s)
    context.check(came, f"{node.child.name} has {bench.free_blocks(node)} free blocks after {limit_s:g} s, not {due}")


def _has(bench: Servers, node: Node, due: int) -> bool:
    return bench.free_blocks(node) == due


def _found_again(context: Context, bench: Servers, prompt: list[int]) -> None:
    """A router takes a while to ask a server again that was gone."""
    found = until(lambda: bench.start(prompt).answer(SEEN_S)[0] == 200, SEEN_S * context.pace)
    context.check(found, "no request gets to the server that has started again")


def serves(context: Context, bench: Servers, prompt: list[int]) -> None:
    """The next request is served by a transfer."""
    bench.gate.unlink(missing_ok=True)
    before = bench.received()
    moved = bench.through(prompt)
    alone = bench.alone(prompt)
    context.check(moved == alone, f"the next request has {moved} instead of {alone}")
    came = until(lambda: bench.received() > before, bench.bound_s("an abort"))
    context.check(came, "the next request was served without a good transfer: its tokens were computed again")
