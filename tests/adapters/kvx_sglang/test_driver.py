"""SGLang's command line, its environment, and its two legs; no SGLang is needed."""

from __future__ import annotations

from typing import Any

import pytest

from kvx.cli import main
from kvx.config import Options
from kvx.core.errors import ConfigError, KvxError
from kvx.core.model import Mode, Role
from kvx.driver import Server
from kvx_sglang.dialect import SglangDialect, room_of
from kvx_sglang.driver import SglangDriver, variables

BODY = {"model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room_of("t")}


def server(role: Role | None, **options: Any) -> Server:
    return Server("m", 8100, options=options, role=role, meeting_port=8998 if role is Role.PRODUCER else None)


def word_after(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_prefill_server_is_met_at_its_own_port() -> None:
    launch = SglangDriver().launch(server(Role.PRODUCER, listen="127.0.0.1:5701"))
    assert word_after(launch.command, "--disaggregation-mode") == "prefill"
    assert word_after(launch.command, "--disaggregation-transfer-backend") == "kvx"
    assert word_after(launch.command, "--disaggregation-bootstrap-port") == "8998"
    assert launch.address == "127.0.0.1:8998"
    assert launch.env["KVX_LISTEN"] == "127.0.0.1:5701"


def test_a_decode_server_is_met_nowhere() -> None:
    launch = SglangDriver().launch(server(Role.CONSUMER))
    assert word_after(launch.command, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in launch.command
    assert launch.address == ""


def test_without_kvx_it_is_sglang_alone() -> None:
    launch = SglangDriver().launch(Server("m", 8100))
    assert not [word for word in launch.command if word.startswith("--disaggregation")]
    assert not [name for name in launch.env if name.startswith("KVX_")]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Server("m", 1, options={}), "whether it prefills or decodes"),
        (Server("m", 1, options={}, role=Role.PRODUCER), "a port for its bootstrap server"),
        (Server("m", 1, options={"lease_s": -1}, role=Role.CONSUMER), "lease_s"),
        (Server("m", 1, options={"peers": [""]}, role=Role.CONSUMER), "peers"),
    ],
)
def test_what_cannot_work_is_said_before_a_process_starts(wrong: Server, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SglangDriver().launch(wrong)


def test_options_go_through_the_environment_unchanged() -> None:
    factory = "some_package.module:factory"
    given = {
        "lease_s": 12.5,
        "insecure": True,
        "peers": ["10.0.0.0/8", "10.1.1.1"],
        "transports": ["tcp", "nixl-ucx", factory],
        "tcp": {"streams": 3},
        "nixl-ucx": {"devices": "lo"},
        factory: {"regions": 6},
    }
    assert Options.load({}, env=variables(given)) == Options.load(given, env={})


def test_what_no_variable_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="peers"):
        variables({"peers": ["a,b"]})


def test_both_legs_meet_in_one_room_and_leave_the_body_as_it_was() -> None:
    dialect, before = SglangDialect(), dict(BODY)
    prefill = dialect.prefill_leg(BODY, Mode.PUSH, "t", prefill_address="127.0.0.1:8998")
    decode = dialect.decode_leg(BODY, Mode.PUSH, "t", prefill_address="127.0.0.1:8998")
    assert prefill == {"model": "m", "prompt": [5, 6], "max_tokens": 9, "stream": False, **MEETING}
    assert decode == {**BODY, **MEETING}
    assert before == BODY


def test_rooms_are_63_bits_and_differ() -> None:
    rooms = {room_of(str(number)) for number in range(1000)}
    assert len(rooms) == 1000
    assert all(0 < room < 2**63 for room in rooms)


def test_what_sglang_cannot_do_is_said() -> None:
    dialect = SglangDialect()
    with pytest.raises(KvxError, match="push only"):
        dialect.decode_leg(BODY, Mode.PULL, "t", prefill_address="127.0.0.1:8998")
    with pytest.raises(KvxError, match="--prefill URL=HOST:PORT"):
        dialect.prefill_leg(BODY, Mode.PUSH, "t")
    with pytest.raises(KvxError, match="--prefill URL=HOST:PORT"):
        dialect.probe_request("m")
    assert SglangDriver().modes == {Mode.PUSH}
    assert dialect.can_withdraw is False


def test_a_demo_of_pull_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--engine", "sglang", "--mode", "pull"]) == 2
    assert capsys.readouterr().err == "kvx: engine 'sglang' cannot pull, only push\n"
