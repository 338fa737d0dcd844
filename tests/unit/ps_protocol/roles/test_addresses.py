"""Forms of addresses."""

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.identity import is_loopback, parse_address


@pytest.mark.parametrize("text", ["127.0.0.1:5000", "localhost:1", "ps-0.train.svc:65535", "[::1]:5000", "unix:/run/ps.sock"])
def test_address_is_read_and_written_alike(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host and port"),
        ("host", "no host and port"),
        (":5000", "no host and port"),
        ("http://host:5000", "it has no scheme; leave out 'http://'"),
        ("ho st:5000", "no host and port"),
        ("::1:5000", "IPv6 host needs brackets"),
        ("host:port", "port 'port' is not a number"),
        ("host:", "port '' is not a number"),
        ("host:²", "is not a number"),
        ("host:-1", "is not a number"),
        ("host:0", "port 0, want 1 to 65535"),
        ("host:65536", "port 65536, want 1 to 65535"),
        ("unix:run/ps.sock", "must begin with /"),
        ("unix:/" + "x" * 107, "at most 107 bytes"),
    ],
)
def test_any_other_address_is_refused_with_both_valid_forms(text: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words) as caught:
        parse_address(text)
    assert "want host:port or unix:/path" in caught.value.message


def test_port_0_is_for_servers() -> None:
    assert parse_address("127.0.0.1:0", is_bind=True).port == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/a", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("[::]:1", False),
        ("ps-0:1", False),
    ],
)
def test_loopback_is_what_only_this_machine_can_reach(text: str, expected: bool) -> None:
    assert is_loopback(text) is expected
