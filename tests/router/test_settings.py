from __future__ import annotations

from pathlib import Path

import pytest

from kvx.core.errors import ConfigError
from kvx.core.model import Mode
from kvx.router.settings import Listing, check_exposure


@pytest.mark.parametrize(
    ("mode", "text", "address", "probing"),
    [
        (Mode.PUSH, "http://p:8100", None, True),
        (None, "http://p:8100/", None, True),
        (Mode.PULL, "http://p:8100", None, False),  # its tickets say where it is
        (Mode.PUSH, "https://p:8100/a=10.0.0.1:5700", "10.0.0.1:5700", False),
        (Mode.PUSH, "http://[::1]:8100=[::1]:5700", "[::1]:5700", False),
    ],
)
def test_a_prefill_instance_is_asked_for_what_the_operator_did_not_say(
    mode: Mode | None, text: str, address: str | None, probing: bool
) -> None:
    (prefill,), (decode,) = Listing([text], ["http://d"]).instances(mode)
    assert (prefill.address, prefill.probing) == (address, probing)
    assert prefill.url == text.partition("=")[0].rstrip("/")
    assert not decode.probing


@pytest.mark.parametrize(
    "text",
    ["", "p", "p:8100", "ftp://p", "http://", "http://p:0", "http://p:x", "http://p?q", "http://u:w@p", "http://p#f"],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        Listing(["http://p"], [text])


def test_beyond_loopback_needs_a_key_or_the_operator_s_word(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    assert check_exposure("127.0.0.1", None, insecure=False) == ""
    assert check_exposure("192.0.2.1", str(key), insecure=False) == "0123456789abcdef"
    assert check_exposure("192.0.2.1", None, insecure=True) == ""
    for host in ("192.0.2.1", "0.0.0.0", "::", "router.example"):
        with pytest.raises(ConfigError, match="beyond loopback"):
            check_exposure(host, None, insecure=False)


@pytest.mark.parametrize("content", ["short", "two words are no key at all", "ümlaut-ümlaut-ümlaut", ""])
def test_a_key_that_cannot_be_one_is_refused(tmp_path: Path, content: str) -> None:
    key = tmp_path / "key"
    key.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        check_exposure("127.0.0.1", str(key), insecure=False)
