import json

import pytest

from chief.config import ChiefConfig, parse_config
from ps_protocol.errors import InvalidSpec

TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["127.0.0.1:7000"], "ps": ["a:1", "b:2"], "worker": ["c:3", "d:4", "e:5"]},
        "task": {"type": "chief", "index": 0},
    }
)


def parse(*flags: str, **environment: str) -> ChiefConfig:
    return parse_config(flags, environment=environment)


def test_flags_give_the_whole_configuration() -> None:
    config = parse(
        *("--ps", "a:1, b:2", "--address", "unix:/tmp/c", "--cluster", "job", "--replicas-to-aggregate", "2"),
        *("--total-num-replicas", "3", "--max-steps", "9", "--lease", "2.5", "--announce", "/tmp/f"),
    )
    assert (config.ps, config.address, str(config.announce)) == (("a:1", "b:2"), "unix:/tmp/c", "/tmp/f")
    coordination = config.coordination
    assert (coordination.cluster, coordination.num_required, coordination.total_num_replicas) == ("job", 2, 3)
    assert (coordination.max_steps, coordination.lease_s) == (9, 2.5)


def test_the_environment_gives_what_flags_leave_out() -> None:
    config = parse(
        "--replicas-to-aggregate",
        "4",
        LOCKSTEP_PS="a:1",
        LOCKSTEP_REPLICAS_TO_AGGREGATE="2",
        LOCKSTEP_TOTAL_NUM_REPLICAS="3",
        LOCKSTEP_MAX_STEPS="",
        LOCKSTEP_LEASE_S="5",
        LOCKSTEP_CLUSTER="job",
        LOCKSTEP_ADDRESS="127.0.0.1:7000",
    )
    coordination = config.coordination
    assert (config.ps, config.address, coordination.cluster) == (("a:1",), "127.0.0.1:7000", "job")
    assert (coordination.num_required, coordination.num_extras, coordination.max_steps, coordination.lease_s) == (4, 1, None, 5.0)


def test_tf_config_gives_the_rest() -> None:
    config = parse(TF_CONFIG=TF_CONFIG)
    assert (config.ps, config.address) == (("a:1", "b:2"), "127.0.0.1:7000")
    assert (config.coordination.total_num_replicas, config.coordination.num_required) == (3, 3)


@pytest.mark.parametrize("value", ["0", "-3", "two", "1.5", ""])
@pytest.mark.parametrize("flag", ["--replicas-to-aggregate", "--total-num-replicas", "--max-steps"])
def test_a_count_that_is_none_is_refused_by_its_flag(flag: str, value: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{flag}: got '{value}', want a whole number >= 1"):
        parse("--ps", "a:1", flag, value)


def test_a_count_that_is_none_is_refused_by_its_variable() -> None:
    with pytest.raises(InvalidSpec, match="LOCKSTEP_MAX_STEPS: got 'many'"):
        parse("--ps", "a:1", LOCKSTEP_MAX_STEPS="many")


@pytest.mark.parametrize("value", ["0", "nan", "inf", "soon"])
def test_a_lease_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidSpec, match="--lease: got"):
        parse("--ps", "a:1", "--lease", value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], r"which parameter servers\? give --ps"),
        (["--ps", "a:1,b"], "address 'b'"),
        (["--ps", "a:1,a:1"], "a:1 occurs twice, as ps 0 and ps 1"),
        (["--ps", "a:1", "--address", "0.0.0.0:0"], "--allow-insecure-network"),
        (["--ps", "a:1", "--what"], "--what"),
        (["--ps", "a:1", "--cluster", " job"], "cluster name"),
        (["--ps", "a:1", "--cluster", ""], "cluster name: got ''"),
    ],
)
def test_what_cannot_work_is_refused_in_words(flags: list[str], text: str) -> None:
    with pytest.raises(InvalidSpec, match=text):
        parse(*flags)


def test_listening_for_others_takes_an_explicit_flag() -> None:
    assert parse("--ps", "a:1", "--address", "0.0.0.0:0", "--allow-insecure-network").address == "0.0.0.0:0"
    assert parse("--ps", "a:1", LOCKSTEP_ADDRESS="0.0.0.0:0", LOCKSTEP_ALLOW_INSECURE_NETWORK="1").allow_insecure_network
