"""Cases of an adapter: clients that leave while their requests wait in a queue, and while tokens are made of what came.

Those that leave before a transfer and in its midst are in `kvx_conformance.suite.adapter`.
"""

from __future__ import annotations

from kvx.core.model import Mode
from kvx_conformance.suite.adapter import each_mode, keeps_nothing, serves
from kvx_conformance.suite.adapter_many import ANSWER_S, AT_ONCE, UNLIKE
from kvx_conformance.suite.case import Context, NotExercised
from kvx_conformance.suite.servers import SEEN_S, servers, until

_BLOCKS = 12
"""How many blocks of tokens a client asks for that leaves after the first one."""


@each_mode(
    "KVX-ADP-002",
    "client-leaves-queued",
    f"{AT_ONCE} requests at once while no byte moves, and each second client leaves: the others have the tokens of a "
    "single instance, and both instances come to hold nothing, a ticket that nobody hears of until its lease ends.",
)
def client_leaves_queued(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        block = bench.place.small.block_size
        first, later, *prompts = bench.prompts([2 * block + at % 5 for at in range(AT_ONCE + 2)])
        serves(context, bench, first)
        # A prompt that ends in the moment in which its client leaves makes a ticket that nobody hears of.
        failure = "an abort" if mode is Mode.PUSH else "the reader of a ticket dies or never comes"
        with keeps_nothing(context, bench, failure):
            bench.gate.touch()
            clients = [bench.start(prompt) for prompt in prompts]
            bench.begun()
            for client in clients[1::2]:
                client.leave()
            bench.gate.unlink()
            answers = [client.answer(ANSWER_S * context.pace) for client in clients[::2]]
            context.check(all(status == 200 for status, _ in answers), f"they end as {[one for one, _ in answers]}")
        unlike = sum(tokens != bench.alone(prompt) for prompt, (_, tokens) in zip(prompts[::2], answers, strict=True))
        context.check(unlike <= UNLIKE, f"{unlike} of {len(answers)} answers are not those of a single instance")
        serves(context, bench, later)


@each_mode(
    "KVX-ADP-002",
    "client-leaves-decoding",
    "A client leaves while tokens are made of what has come: both instances come to hold nothing, have all their "
    "blocks back (where the driver counts them) and serve the next request.",
)
def client_leaves_decoding(mode: Mode, context: Context) -> None:
    with servers(context, mode) as bench:
        block = bench.place.small.block_size
        first, left, later = bench.prompts([3 * block] * 3)
        serves(context, bench, first)
        with keeps_nothing(context, bench):
            before = bench.received()
            client = bench.start(left, max_tokens=_BLOCKS * block, stream=True)
            told = client.first_event(ANSWER_S * context.pace)
            client.leave()
            context.check(told.startswith("data: "), f"a stream begins with {told[:200]!r}")
            if not until(lambda: bench.received() > before, SEEN_S * context.pace):
                raise NotExercised("No good transfer came before the client left.")
        serves(context, bench, later)
