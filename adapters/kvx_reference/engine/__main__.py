"""`python -m kvx_reference.engine`: serve a model folder, or a model of random weights."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvx_reference.engine.connector import ConnectorFactory


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 after a signal, 2 where the command line or the model cannot work."""
    given = _parser().parse_args(arguments)
    # Before numpy is imported: matrices as small as these lose by threads, badly so where servers share cores.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    from kvx_reference.engine.config import TINY, ModelError
    from kvx_reference.engine.connector import ConnectorError
    from kvx_reference.engine.engine import Engine, Settings, load_model, random_model
    from kvx_reference.engine.folder import save_random_model
    from kvx_reference.engine.tokenizer import WordTokenizer, load_tokenizer, vocabulary
    from kvx_reference.engine.worker import Worker

    try:
        if given.save is not None:
            save_random_model(given.save, TINY, given.random)
            return 0
        if given.model is None:
            model, name = random_model(TINY, given.random), f"random-{given.random}"
            tokenizer: Any = WordTokenizer(vocabulary(TINY.vocab_size))
        else:
            model, name = load_model(given.model), str(given.model)
            tokenizer = load_tokenizer(given.model, model.config.vocab_size)
        settings = Settings(
            blocks=given.blocks,
            block_size=given.block_size,
            step_tokens=given.step_tokens,
            max_running=given.max_running,
            prefix_caching=not given.no_prefix_caching,
            recompute=given.load_failure == "recompute",
        )
        engine = Engine(model, settings, _connector(given.connector), given.connector_options)
    except (ModelError, ConnectorError, OSError) as error:
        sys.stderr.write(f"kvx_reference.engine: {error}\n")
        return 2
    from kvx_reference.engine.server import Server, serve

    serve(Server(Worker(engine), tokenizer, given.served_model_name or name), given.host, given.port)
    return 0


def _connector(name: str | None) -> ConnectorFactory | None:
    if name is None:
        return None
    from kvx_reference.engine.connector import ConnectorError

    module, _, factory = name.partition(":")
    try:
        found: ConnectorFactory = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ConnectorError(f"connector {name}: {error}") from error
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvx_reference.engine", description=__doc__)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="FOLDER", help="a Llama in Hugging Face's format")
    model.add_argument("--random", type=int, metavar="SEED", help="a tiny model of random weights")
    add("--save", type=Path, metavar="FOLDER", help="write the random model there, and end")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the folder, or random-SEED)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--blocks", type=_positive, default=512, help="size of the KV cache (default: %(default)s blocks)")
    add("--block-size", type=_positive, default=16, metavar="TOKENS", help="default: %(default)s")
    add("--step-tokens", type=_positive, default=256, metavar="N", help="tokens computed at most in a step")
    add("--max-running", type=_positive, default=32, metavar="N", help="requests computed at most in a step")
    add("--no-prefix-caching", action="store_true")
    add("--connector", metavar="MODULE:FACTORY", help="who moves KV cache to and from other instances")
    add("--connector-options", type=_object, default={}, metavar="JSON")
    add("--load-failure", choices=("recompute", "fail"), default="recompute", help="when a connector cannot load")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is needed")
    return value


if __name__ == "__main__":
    sys.exit(main())
