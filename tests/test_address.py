from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvx.address import MAX_LENGTH, format_address, is_loopback, is_wildcard, parse_address
from kvx.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:5700", ("127.0.0.1", 5700)),
        ("[::1]:0", ("::1", 0)),
        ("p-0.prefill.svc:65535", ("p-0.prefill.svc", 65535)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_is_parsed_and_written_back(text: str, parts: tuple[str, int]) -> None:
    assert parse_address(text) == parts
    assert format_address(*parts) == text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("5700", "HOST:PORT"),
        (":5700", "HOST:PORT"),
        ("host", "HOST:PORT"),
        ("::1:5700", "square brackets"),
        ("[host]:5700", "IPv6"),
        ("host:65536", "65536"),
        ("host:-1", "-1"),
        ("host:5700\n", "not a port"),
        ("host:٣", "not a port"),
        ("999.1.1.1:5700", "IPv4"),
        ("a b:5700", "host name"),
        ("-a:5700", "host name"),
        ("user@host:5700", "host name"),
        ("h" * MAX_LENGTH + ":1", "longer than any address"),
    ],
)
def test_what_is_wrong_is_said(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_address(text)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ConfigError:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "loopback"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_wildcards_are_those_that_cannot_be_dialled() -> None:
    assert is_wildcard("0.0.0.0")
    assert is_wildcard("::")
    assert is_wildcard("::ffff:0.0.0.0")
    assert not is_wildcard("10.0.0.1")
    assert not is_wildcard("localhost")
