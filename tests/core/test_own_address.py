"""Where a chief says that it is."""

import pytest

from chief.config import parse_config
from chief.serving.server import reachable, towards
from ps_protocol.errors import InvalidSpec


@pytest.mark.parametrize("address", ["host-a:5001", "127.0.0.1:5001", "unix:/run/chief.sock", "[::1]:5001"])
def test_a_chief_that_listens_under_a_name_says_that_one(address: str) -> None:
    assert reachable(address) == address


@pytest.mark.parametrize("address", ["0.0.0.0:5001", "[::]:5001"])
def test_one_that_listens_everywhere_says_the_address_that_it_has_towards_its_servers(address: str) -> None:
    assert reachable(address) == ""
    assert towards(address, ("127.0.0.1:5000",)) == "127.0.0.1:5001"
    assert towards(address, ("unix:/run/ps.sock",)) == "127.0.0.1:5001"


def test_a_server_whose_name_nobody_knows_is_passed_over() -> None:
    assert towards("0.0.0.0:5001", ("no-such-host.invalid:5000", "127.0.0.1:5000")) == "127.0.0.1:5001"
    assert towards("0.0.0.0:5001", ("no-such-host.invalid:5000",)) == ""


def test_what_is_advertised_comes_from_the_flag_or_else_the_environment_and_is_checked() -> None:
    environment = {"LOCKSTEP_PS": "a:1", "LOCKSTEP_ADVERTISE": "chief.example:0"}
    assert parse_config([], environment=environment).advertise == "chief.example:0"
    assert parse_config(["--advertise", "other:5001"], environment=environment).advertise == "other:5001"
    with pytest.raises(InvalidSpec, match="no host and port"):
        parse_config(["--advertise", "chief"], environment=environment)
