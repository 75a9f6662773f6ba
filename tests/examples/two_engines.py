"""A program: each of two engines prefills for itself and for the other one; prints what came of it as JSON.

`two_engines.py FIRST SECOND`, both named as `kvx doctor` shows them. Each has its own small model.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from kvx.core.model import Mode
from kvx.up import Node, Site, site

PROMPT = [5 + at * 7 % 1000 for at in range(100)]
LIMIT_S = 60.0


def ask(node: Node, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 - a server that this program has started
        f"{node.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
        told: dict[str, Any] = json.load(answer)
        return told


def serve(mode: Mode, producer: tuple[Site, Node], consumer: tuple[Site, Node], transfer: str) -> dict[str, Any]:
    """Both legs of one request, as a router puts them."""
    (there, prefill), (here, decode) = producer, consumer
    fixed = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{**fixed, "model": place.model} for place in (there, here)]
    first = there.driver.dialect.prefill_leg(bodies[0], mode, transfer, prefill_address=prefill.control)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, prefill, first)
        come = answer.result() if mode is Mode.PULL else None
        leg = here.driver.dialect.decode_leg(
            bodies[1], mode, transfer, prefill_answer=come, prefill_address=prefill.control
        )
        told = ask(decode, leg)
        answer.result()
    alone = ask(decode, bodies[1])
    kvx = told["kv_transfer_params"]["kvx"]
    equal = told["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    return {"equal": equal, **{key: kvx.get(key) for key in ("ok", "reason", "detail")}}


def main() -> None:
    names = sys.argv[1:]
    with ExitStack() as stack:
        places = {name: stack.enter_context(site(name, "", (), lambda line: None)) for name in names}
        shared = {"secret_file": str(places[names[0]].secret_file), "event_log": ""}
        nodes = {
            (name, side): place.engine(f"{name}-{side}", **shared)
            for name, place in places.items()
            for side in ("prefill", "decode")
        }
        for place in places.values():
            place.wait_ready()
        rows = []
        for mode in Mode:
            for one in names:
                for other in names:
                    pair = (places[one], nodes[one, "prefill"]), (places[other], nodes[other, "decode"])
                    came = serve(mode, *pair, f"{one}-{other}-{mode.value}")
                    rows.append({"prefill": one, "decode": other, "mode": mode.value, **came})
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
