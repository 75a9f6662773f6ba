"""Program: a producer without an engine, which pushes its whole cache to whoever grants that many blocks."""

from __future__ import annotations

import select
from typing import cast

from kvx import plugins
from kvx.bench.cache import new_cache, pattern
from kvx.bench.callbacks import HasSteps, Shape, options_of
from kvx.bench.child import Lines
from kvx.core.model import Mode, Offered, Part
from kvx.engine import Claim, EngineInstance, Stage
from kvx.instance import open_instance

POLL_S = 0.0005


def main() -> None:
    """Serve until standard input ends."""
    lines = Lines()
    setup = lines.first()
    shape = Shape(*setup["shape"])
    cache = new_cache(shape.layers, shape.pool, shape.block_bytes)
    for layer in range(shape.layers):
        cache[layer, : shape.blocks] = pattern(layer, shape.blocks, shape.block_bytes, 0)
    driver = cast(HasSteps, plugins.load().driver(setup["engine"]))
    steps = driver.steps(cache)
    instance = open_instance(options_of("bench-producer"), steps.layout, steps.regions, epoch=1)
    lines.write({"address": instance.info.address})
    try:
        while True:
            if select.select([0], [], [], POLL_S)[0]:
                lines.read()
            _serve(instance, shape.blocks)
    except EOFError:
        instance.close()


def _serve(instance: EngineInstance, blocks: int) -> None:
    for news in instance.news():
        if isinstance(news, Offered) and len(news.grant.blocks.groups[0]) == blocks:
            grant = news.grant
            part = Part(None, grant.first, grant.blocks)
            stage = Stage(grant.transfer, Mode.PUSH, part, True, grant.tokens)
            instance.put([Claim(grant.transfer, Mode.PUSH), stage])


if __name__ == "__main__":
    main()
