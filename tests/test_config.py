from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvx.config import Options, bounds, reference
from kvx.core.errors import ConfigError

SECRET = "0123456789abcdef"
BEYOND = {"listen": "10.0.0.7:5700", "secret": SECRET}


def load(settings: dict[str, Any] | None = None, **env: str) -> Options:
    return Options.load(settings, env)


def test_defaults_work_and_name_themselves() -> None:
    options = load()
    assert options == Options()
    assert options.listen == options.advertise == options.instance == "127.0.0.1:5700"


def test_an_engine_s_settings_become_options() -> None:
    options = load({"listen": "127.0.0.1:6000", "lease_s": 45, "transports": ["tcp"], "tcp": {"streams": 4}})
    assert (options.listen, options.lease_s) == ("127.0.0.1:6000", 45)
    assert options.sections == {"tcp": {"streams": 4}}


def test_variables_win_over_settings_and_settings_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvx.toml"
    file.write_text("lease_s = 41\npatience_s = 42\nlost_s = 5\n[tcp]\nstreams = 1\nport = 7\n")
    settings = {"config": str(file), "patience_s": 52, "lost_s": 5.5, "tcp": {"streams": 2}}
    options = load(settings, KVX_LOST_S="4.5", KVX_TCP__STREAMS="3")
    assert (options.lease_s, options.patience_s, options.lost_s) == (41, 52, 4.5)
    assert options.sections["tcp"] == {"streams": 3, "port": 7}


def test_variables_have_the_type_of_their_option() -> None:
    options = load(
        None,
        KVX_SECRET="1234567890123456",
        KVX_INSECURE="true",
        KVX_TRANSPORTS="nixl-ucx, tcp",
        KVX_PEERS="10.0.0.0/8,p-0",
        KVX_NIXL_UCX__DEVICE="mlx5_0",
    )
    assert options.secret == b"1234567890123456"
    assert options.insecure is True
    assert options.transports == ("nixl-ucx", "tcp")
    assert options.peers == ("10.0.0.0/8", "p-0")
    assert options.sections == {"nixl-ucx": {"device": "mlx5_0"}}


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "kvx.toml"
    file.write_text("lease_s = 44")
    assert load({"config": "/nowhere"}, KVX_CONFIG=str(file)).lease_s == 44


def test_variables_of_a_kubernetes_service_named_kvx_are_no_options() -> None:
    assert load(None, KVX_SERVICE_HOST="10.0.0.1", KVX_PORT="tcp://10.0.0.1:5700", KVX_PORT_5700_TCP="x") == Options()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease": 30}, "'lease'; did you mean 'lease_s'"),
        ({"pateince_s": 30}, "did you mean 'patience_s'"),
        ({"zzz": 1}, "docs/configuration.md"),
        ({"sections": {"tcp": {}}}, "no option 'sections'"),
        ({"nixl": {"x": 1}}, "'nixl', which is not in transports"),
        ({"tcp": 1}, "no option 'tcp'"),
        ({"lease_s": 30000}, "lease_s is 30000.*at most|lease_s is 30000.*milliseconds"),
        ({"lease_s": "30"}, "a number of seconds"),
        ({"lease_s": True}, "a number of seconds"),
        ({"lease_s": float("nan")}, "a number of seconds"),
        ({"lease_s": -1}, "between"),
        ({"max_held_fraction": 50}, "between 0.01 and 1$"),
        ({"insecure": "yes"}, "true or false"),
        ({"insecure": 1}, "true or false"),
        ({"mode": "both"}, "auto, push, pull"),
        ({"integrity": True}, "none, crc"),
        ({"transports": []}, "transports is empty"),
        ({"transports": ["tcp", "tcp"]}, "different texts"),
        ({"transports": [1]}, "different texts"),
        ({"transports": 1}, "different texts"),
        ({"peers": ["10.0.0.0/99"]}, "not a network"),
        ({"listen": "5700"}, "HOST:PORT"),
        ({"listen": 5700}, "HOST:PORT"),
        ({"listen": "127.0.0.1:0"}, "names no instance"),
        ({"listen": "0.0.0.0:5700", "secret": SECRET}, "advertise is '0.0.0.0:5700', which nobody can dial"),
        ({"listen": "[::]:5700", "secret": SECRET}, "nobody can dial"),
        ({"listen": "0.0.0.0:5700", "advertise": "127.0.0.1:5700", "secret": SECRET}, "would dial themselves"),
        ({"listen": "10.0.0.7:5700"}, "there is no secret"),
        ({"secret": "short"}, "5 bytes"),
        ({"secret": 17}, "secret"),
        ({"secret": SECRET, "secret_file": "x"}, "both set"),
        ({"secret_file": "/nowhere/secret"}, "cannot be read"),
        ({"config": "/nowhere/kvx.toml"}, "cannot be read"),
        ({"config": 3}, "path of a TOML file"),
        ({"tls_cert": "cert.pem"}, "no TLS yet"),
        ({"lease_s": 9, "lost_s": 6}, "lost_s = 6 set lease_s above 9"),
        ({"grace_s": 8, "drain_limit_s": 8}, "grace_s"),
        ({"keepalive_s": 4}, "keepalive_s"),
        ({"instance": "x" * 257}, "1 to 256"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load(settings)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"KVX_LEASE: there is no option 'lease'; did you mean 'lease_s'"):
        load(None, KVX_LEASE="30")


def test_a_number_in_a_variable_has_to_be_one() -> None:
    with pytest.raises(ConfigError, match="lease_s is 'soon', but has to be a number of seconds"):
        load(None, KVX_LEASE_S="soon")


def test_a_file_that_is_not_toml_or_has_an_unknown_key(tmp_path: Path) -> None:
    file = tmp_path / "kvx.toml"
    for text, said in [("lease_s 3", "is not TOML"), ("lesae_s = 3", "kvx.toml: there is no option 'lesae_s'")]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            load({"config": str(file)})


def test_the_secret_is_read_from_its_file_and_shown_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    options = load({"listen": "10.0.0.7:5700", "secret_file": str(file)})
    assert options.secret == SECRET.encode()
    assert SECRET not in repr(options)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        load({"secret_file": str(file)})


def test_beyond_loopback_needs_a_secret_or_a_clear_word() -> None:
    assert load({"listen": "10.0.0.7:5700", "insecure": True}).secret == b""
    assert load({"listen": "0.0.0.0:5700", "advertise": "p-0:5700", "secret": SECRET}).advertise == "p-0:5700"


def test_each_rank_has_its_own_ports_and_one_instance() -> None:
    options = load({**BEYOND, "listen": "[fd00::1]:5700"}).at_rank(3)
    assert options.listen == options.advertise == "[fd00::1]:5703"
    assert options.instance == "[fd00::1]:5700"
    with pytest.raises(ConfigError, match="no port for rank 1"):
        load({"listen": "127.0.0.1:65535"}).at_rank(1)


def test_any_free_port_is_for_one_rank_with_a_name() -> None:
    options = load({"listen": "127.0.0.1:0", "instance": "p"})
    assert options.at_rank(0) == options
    with pytest.raises(ConfigError, match="no port for rank 1"):
        options.at_rank(1)


def test_a_transport_s_section() -> None:
    options = load({**BEYOND, "tcp": {"streams": 4, "advertise_host": "10.9.0.7", "secret": "not this one"}})
    assert options.transport_section("tcp", 2) == {
        "streams": 4,
        "listen_host": "10.0.0.7",
        "advertise_host": "10.9.0.7",
        "secret": SECRET.encode(),
        "insecure": False,
        "peer": "10.0.0.7:5700#2",
    }


@pytest.mark.parametrize(
    ("settings", "address", "allowed"),
    [
        ({}, "127.0.0.1:9", True),
        ({}, "[::1]:9", True),
        ({}, "localhost:9", True),
        ({}, "10.0.0.8:9", False),
        ({}, "host.example:9", False),
        ({}, "nonsense", False),
        ({"peers": "any"}, "10.0.0.8:9", False),
        (BEYOND, "10.0.0.8:9", True),
        (BEYOND, "10.0.1.8:9", False),
        (BEYOND, "127.0.0.1:9", True),
        (BEYOND, "169.254.169.254:80", False),
        ({**BEYOND, "peers": "any"}, "169.254.169.254:80", True),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "10.1.200.1:9", True),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "[::ffff:10.1.200.1]:9", True),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "P-0:9", True),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "p-0.example:9", False),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "127.0.0.1:9", False),
        ({**BEYOND, "peers": "10.1.0.0/16,p-0"}, "10.0.0.8:9", False),
        ({**BEYOND, "listen": "[fd00::1]:5700"}, "[fd00::2]:9", True),
        ({**BEYOND, "listen": "[fd00::1]:5700"}, "[fd01::2]:9", False),
        ({**BEYOND, "listen": "p-1:5700"}, "p-1:9", True),
        ({**BEYOND, "listen": "p-1:5700"}, "p-2:9", False),
    ],
)
def test_whom_a_request_may_name(settings: dict[str, Any], address: str, allowed: bool) -> None:
    assert load(settings).may_dial(address) is allowed


def test_every_class_of_failure_has_a_bound() -> None:
    assert all(0 < seconds < 86400 for seconds in bounds(Options()).values())
    slower = bounds(load({"lost_s": 9}))
    assert slower["the peer dies or stops in mid-transfer"] == 19


def test_every_option_is_documented() -> None:
    text = reference()
    for name in ("listen", "lease_s", "max_held_fraction", "allow_untested_engine"):
        assert f"| `{name}` | `" in text
    assert "| as `listen` |" in text
