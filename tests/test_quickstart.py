"""The commands of README and quickstart, run with a curl and a server that only write down what they are told."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kvx import cli
from kvx.config import Options
from kvx.core.model import BlockTable, Mode
from kvx.instance import make_ticket, read_ticket
from kvx.params import Consume, Produce, read_params
from kvx.router.settings import Listing

ROOT = Path(__file__).parent.parent
FAKES = """
set -eu
curl() { for last; do :; done; printf '%s' "$last" >"$(mktemp "$OUT/request.XXXXXX")"; echo "$ANSWER"; }
serve() { for last; do :; done; printf '%s' "$last" >"$OUT/server.$1"; }
vllm() { serve "$4" "$@"; }
python() { if [ "$2" = vllm.entrypoints.openai.api_server ]; then serve "$6" "$@"; else command python3 "$@"; fi; }
"""


def commands(page: str) -> str:
    """The lines behind `$`, with the lines that go on from them."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    return re.sub(r"^\$ ", "", "".join(blocks), flags=re.MULTILINE)


def played(page: str, wanted: str, folder: Path, answer: object = None) -> dict[str, dict[str, object]]:
    """What the fakes were told by the page's commands from the first with `wanted` on, by the file's name."""
    script = FAKES + commands(page)[commands(page).index(wanted) :]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OUT": str(folder), "ANSWER": json.dumps(answer)}
    subprocess.run(["/bin/bash", "-c", script], check=True, env=env, timeout=30)
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("page", "first"), [("README.md", "vllm serve"), ("docs/quickstart.md", "python -m vllm")])
def test_both_servers_start_with_options_that_work_and_differ(page: str, first: str, tmp_path: Path) -> None:
    script = commands(page)
    servers = script[script.index(first) :].partition("kvx router")[0]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OUT": str(tmp_path)}
    subprocess.run(["/bin/bash", "-c", FAKES + servers], check=True, env=env, timeout=30)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(told) == 2
    assert {config["kv_connector"] for config in told} == {"KvxConnector"}
    addresses = [Options.load(config["kv_connector_extra_config"], {}).listen for config in told]
    assert addresses == ["127.0.0.1:5700", "127.0.0.1:5800"]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_router_is_put_in_front_of_both_servers(page: str) -> None:
    (line,) = re.findall(r"^kvx (router .*)$", commands(page), re.MULTILINE)
    given = cli._parser(()).parse_args(shlex.split(line))
    prefill, decode = Listing(given.prefill, given.decode).instances(Mode(given.mode))
    assert [instance.url for instance in (*prefill, *decode)] == ["http://127.0.0.1:8100", "http://127.0.0.1:8200"]
    assert all(f"--port {instance.url[-4:]}" in commands(page) for instance in (*prefill, *decode))
    assert given.port == 8000


def test_the_quickstart_s_requests_ask_for_what_it_says(tmp_path: Path) -> None:
    options = Options()
    text = make_ticket(options, epoch=1, transfer="t", first=(0,), blocks=BlockTable.of([1]), tokens=7, lease_s=30.0)
    answer = {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "kvx": {"ticket": text}}}
    bodies = list(played("docs/quickstart.md", "PARAMS=", tmp_path, answer).values())
    assert len(bodies) == 4
    assert len({json.dumps(body["prompt"]) for body in bodies}) == 1

    def ask(body: dict[str, object]) -> object:
        wish = read_params(
            body["kv_transfer_params"], "auto", lambda text: read_ticket(options, text), options.may_dial
        )
        return wish.produce or wish.consume

    asked = [ask(body) for body in bodies]
    assert Produce(Mode.PULL) in asked
    readers = [wish for wish in asked if isinstance(wish, Consume) and wish.mode is Mode.PULL]
    assert [wish.transfer for wish in readers] == ["t"]
    (writer,) = [wish for wish in asked if isinstance(wish, Produce) and wish.mode is Mode.PUSH]
    (written,) = [wish for wish in asked if isinstance(wish, Consume) and wish.mode is Mode.PUSH]
    assert writer.transfer == written.transfer
    assert written.address == "127.0.0.1:5700"
    producers = [body for body, wish in zip(bodies, asked, strict=True) if isinstance(wish, Produce)]
    assert [body["max_tokens"] for body in producers] == [1, 1]
