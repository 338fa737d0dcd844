"""The chief's options: workers, contributions, leases, checkpoints and its own address."""

import json
import re

import pytest

from chief.config import ChiefConfig, parse_config
from chief.options import CheckpointConfig, CoordinationConfig
from chief.serving.server import reachable, towards
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.merging import merge_of
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import PushOutcome

TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["127.0.0.1:7000"], "ps": ["a:1", "b:2"], "worker": ["c:3", "d:4", "e:5"]},
        "task": {"type": "chief", "index": 0},
    }
)


CHIEF = ("--ps", "a:1", "--workers", "2")


def parse(*flags: str, **environment: str) -> ChiefConfig:
    return parse_config(flags, environment=environment)


def test_a_range_of_workers_is_its_end_of_which_a_step_needs_the_begin() -> None:
    coordination = parse("--ps", "a:1", "--workers", "2:8").coordination
    assert (coordination.total_num_replicas, coordination.min_replicas) == (8, 2)
    with pytest.raises(InvalidSpec, match="--workers 2:8 and --min-replicas say the same in two ways"):
        parse("--ps", "a:1", "--workers", "2:8", "--min-replicas", "2")


def test_flags_give_the_whole_configuration() -> None:
    config = parse(
        *("--ps", "a:1, b:2", "--address", "unix:/tmp/c", "--cluster", "job", "--replicas-to-aggregate", "2"),
        *("--workers", "3", "--max-steps", "9", "--lease", "2.5", "--announce", "/tmp/f"),
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
        LOCKSTEP_NUM_WORKERS="3",
        LOCKSTEP_MAX_STEPS="",
        LOCKSTEP_LEASE="5",
        LOCKSTEP_CLUSTER="job",
        LOCKSTEP_ADDRESS="127.0.0.1:7000",
    )
    coordination = config.coordination
    assert (config.ps, config.address, coordination.cluster) == (("a:1",), "127.0.0.1:7000", "job")
    assert (coordination.num_required, coordination.num_extras, coordination.max_steps, coordination.lease_s) == (4, 1, None, 5.0)


def test_a_chief_is_told_how_many_contributions_make_a_step_else_one_would_and_the_rest_were_dropped() -> None:
    with pytest.raises(InvalidSpec, match="how many workers take part\\? give --workers N, or --replicas-to-aggregate R"):
        parse("--ps", "a:1")
    assert parse("--ps", "a:1", "--policy", "async").coordination.policy.name is PolicyName.ASYNC
    assert parse("--ps", "a:1", "--replicas-to-aggregate", "3").coordination.num_required == 3
    assert parse(TF_CONFIG=TF_CONFIG).coordination.num_required == 3


def test_backup_workers_are_those_that_a_step_does_not_wait_for() -> None:
    coordination = parse("--ps", "a:1", "--workers", "5", "--backup-workers", "2").coordination
    assert (coordination.num_required, coordination.total_num_replicas) == (3, 5)
    assert parse(LOCKSTEP_PS="a:1", LOCKSTEP_NUM_WORKERS="4", LOCKSTEP_BACKUP_WORKERS="1").coordination.num_required == 3


def test_standbys_are_given_by_index_and_may_have_gaps() -> None:
    assert parse("--ps", "a:1,b:1,c:1", "--workers", "2", "--standbys", ", d:1").standbys == ("", "d:1")
    assert parse(*CHIEF, LOCKSTEP_STANDBYS="b:1").standbys == ("b:1",)
    assert parse(*CHIEF).standbys == ()


def test_tf_config_gives_the_rest() -> None:
    config = parse(TF_CONFIG=TF_CONFIG)
    assert (config.ps, config.address) == (("a:1", "b:2"), "127.0.0.1:7000")
    assert (config.coordination.total_num_replicas, config.coordination.num_required) == (3, 3)


def test_rule_82_a_cluster_has_at_least_one_parameter_server_and_one_worker() -> None:
    whole = {"chief": ["127.0.0.1:7000"], "ps": ["a:1"], "worker": ["c:3"]}
    for job, said in (("ps", "which parameter servers"), ("worker", "how many workers take part")):
        cluster = {name: addresses for name, addresses in whole.items() if name != job}
        with pytest.raises(InvalidSpec, match=said):
            parse(TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))


@pytest.mark.parametrize("value", ["0", "-3", "two", "1.5", ""])
@pytest.mark.parametrize("flag", ["--replicas-to-aggregate", "--workers", "--max-steps"])
def test_an_invalid_count_is_refused_by_its_flag(flag: str, value: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{flag}: got '{value}', want a whole number (>= 1|from 1 to 100000)"):
        parse("--ps", "a:1", flag, value)


@pytest.mark.parametrize("value", ["100001", "9" * 19, "9" * 400])
@pytest.mark.parametrize("flag", ["--replicas-to-aggregate", "--workers"])
def test_a_count_beyond_the_limit_is_refused_with_the_limit(flag: str, value: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{flag}: got '{value[:40]}', want a whole number from 1 to 100000"):
        parse("--ps", "a:1", flag, value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], r"which parameter servers\? give --ps"),
        (["--ps", "a:1,b"], "address 'b'"),
        (["--ps", "a:1,a:1"], "a:1 occurs twice, as ps 0 and ps 1"),
        (["--ps", "a:1", "--standbys", "b:1,c:1"], "--standbys: 2 for 1 parameter servers"),
        (["--ps", "a:1", "--standbys", "a:1"], "--standbys: a:1 .of ps 0. occurs twice"),
        (["--ps", "a:1,b:1", "--standbys", "c:1,c:1"], "--standbys: c:1 .of ps 0. occurs twice"),
        (["--ps", "a:1", "--address", "0.0.0.0:0"], "--allow-insecure-network"),
        (["--ps", "a:1", "--what"], "--what"),
        (["--ps", "a:1", "--max-steps", "9" * 400], r"--max-steps: got '9{40}', want a whole number >= 1, of 20 digits at most"),
        (["--ps", "a:1", "--lease", "soon"], "--lease: got"),
        (["--ps", "a:1", "--lease", "nan"], "--lease: got"),
        (["--ps", "a:1", "--cluster", " job"], "cluster name"),
        (["--ps", "a:1", "--cluster", ""], "cluster name: got ''"),
        (["--ps", "a:1", "--backup-workers", "1"], "--backup-workers: of how many workers"),
    ],
)
def test_chief_options_that_cannot_work_are_refused_with_a_reason(flags: list[str], text: str) -> None:
    with pytest.raises(InvalidSpec, match=text):
        parse(*flags)


def test_listening_for_others_takes_an_explicit_flag() -> None:
    assert parse(*CHIEF, "--address", "0.0.0.0:0", "--allow-insecure-network").address == "0.0.0.0:0"
    assert parse(*CHIEF, LOCKSTEP_ADDRESS="0.0.0.0:0", LOCKSTEP_ALLOW_INSECURE_NETWORK="1").allow_insecure_network


def test_the_default_policy_is_strict_sync() -> None:
    assert parse(*CHIEF).coordination.policy == PolicySpec()


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        (("--policy", "sync", "--tokens", "fifo"), PolicySpec(tokens=TokenMode.FIFO)),
        (("--tokens", "fifo", "--num-tokens", "-1"), PolicySpec(tokens=TokenMode.FIFO)),
        (("--tokens", "FIFO", "--num-tokens", "0"), PolicySpec(tokens=TokenMode.FIFO, num_tokens=0)),
        (("--policy", "ssp", "--staleness", "3"), PolicySpec(name=PolicyName.SSP, staleness=3)),
        (("--merge", "trimmed_mean:0.25"), PolicySpec(merge=merge_of("trimmed_mean:0.25"))),
        (("--policy", "async", "--no-locking"), PolicySpec(name=PolicyName.ASYNC, use_locking=False)),
        (
            ("--policy", "async", "--max-staleness", "0", "--too-stale", "scale"),
            PolicySpec(name=PolicyName.ASYNC, max_staleness=0, too_stale=TooStale.SCALE),
        ),
    ],
)
def test_flags_give_the_policy(flags: tuple[str, ...], policy: PolicySpec) -> None:
    assert parse(*CHIEF, *flags).coordination.policy == policy


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--policy", "bsp"), "--policy: got 'bsp', want sync or ssp or async"),
        (("--tokens", "lifo"), "--tokens: got 'lifo', want strict or fifo"),
        (("--too-stale", ""), "--too-stale: got '', want drop or scale"),
        (("--merge", "median"), "--merge: got 'median', want a way to merge .merge: got 'median', want one of mean, trimmed_mean"),
        (("--num-tokens", "-2"), "--num-tokens: got '-2', want a whole number from -1 to 1001000"),
        (("--tokens", "fifo", "--num-tokens", "2147483648"), "--num-tokens: got '2147483648', want a whole number from -1 to 1001000"),
        (("--tokens", "fifo", "--num-tokens", "1021", "--workers", "2"), "num_tokens: got 1021, want at most 1020 where a step queues 2"),
        (("--staleness", "-1"), "--staleness: got '-1', want a whole number >= 0"),
        (("--max-staleness", "x"), "--max-staleness: got 'x', want a whole number >= 0"),
        (("--no-locking",), "--no-locking: it is for the policy async, not sync"),
        (("--policy", "ssp", "--tokens", "fifo"), "--tokens: it is for the policy sync, not ssp"),
        (("--max-staleness", "3"), "--max-staleness: it is for the policy async, outer and ssp, not sync"),
        (("--staleness", "2"), "--staleness: it is for the policy ssp, not sync"),
        (("--num-tokens", "4"), "--num-tokens: only --tokens fifo has it"),
        (("--policy", "async", "--too-stale", "scale"), "--too-stale: give --max-staleness"),
        (
            ("--tokens", "fifo", "--num-tokens", "1", "--replicas-to-aggregate", "5", "--workers", "3"),
            r"Too few tokens to finish the first step: 1 \(given\) vs 2 \(needed\)",
        ),
    ],
)
def test_an_impossible_policy_is_refused(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidSpec, match=text):
        parse("--ps", "a:1", *flags)


@pytest.mark.parametrize("option", ["STALENESS", "NUM_TOKENS"])
def test_a_variable_that_would_do_nothing_is_named_as_it_was_given(option: str) -> None:
    with pytest.raises(InvalidSpec, match=f"^LOCKSTEP_{option}: "):
        parse_config(["--ps", "a:1"], environment={f"LOCKSTEP_{option}": "3"})


def test_flags_give_where_and_when_checkpoints_are_saved() -> None:
    flags = [*CHIEF, "--checkpoint-dir", "/ckpt", "--durability", "step", "--checkpoint-interval", "2.5", "--checkpoint-steps", "7"]
    config = parse_config([*flags, "--keep-checkpoints", "2", "--restore", "step-000000003", "--min-replicas", "2"], environment={})
    expected = CheckpointConfig(durability=Durability.STEP, interval_s=2.5, every_steps=7, keep=2, restore="step-000000003")
    assert (config.checkpoint_dir, config.coordination.checkpoints, config.coordination.min_replicas) == ("/ckpt", expected, 2)


def test_without_a_place_there_are_no_checkpoints() -> None:
    config = parse_config([*CHIEF, "--durability", "none"], environment={"LOCKSTEP_CHECKPOINT_STEPS": "7"})
    assert (config.checkpoint_dir, config.coordination.checkpoints) == ("", None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--durability", "step"], "--durability: where do checkpoints lie"),
        (["--restore", "latest"], "--restore: where do checkpoints lie"),
        (["--checkpoint-dir", "/c", "--durability", "often"], "--durability: got 'often', want none or interval or step"),
        (["--checkpoint-dir", "/c", "--restore", "../x"], "checkpoint tag '../x'"),
        (["--checkpoint-dir", "/c", "--checkpoint-steps", "0"], "--checkpoint-steps: got '0'"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(words)):
        parse_config(["--ps", "a:1", *flags], environment={})


# What a chief may be told of workers, contributions and leases.


ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


@pytest.mark.parametrize("name", ["replicas_to_aggregate", "total_num_replicas", "max_steps"])
@pytest.mark.parametrize(
    ("value", "text"), [(0, "got 0, want >= 1"), (-3, "got -3, want >= 1"), (1.5, "got 1.5, want an"), (True, "got True")]
)
def test_counts_that_make_no_sense_are_refused_by_name(name: str, value: object, text: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{name}: {text}"):
        CoordinationConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("r", "t", "required", "extras"), [(None, None, 1, 0), (None, 3, 3, 0), (2, None, 2, 0), (3, 1, 3, 2), (2, 3, 2, 0)]
)
def test_counts_left_out_follow_from_each_other(r: int | None, t: int | None, required: int, extras: int) -> None:
    config = CoordinationConfig(replicas_to_aggregate=r, total_num_replicas=t)
    assert (config.num_required, config.num_extras) == (required, extras)


@pytest.mark.parametrize(
    ("r", "t", "required", "extras", "tokens_per_step", "num_workers"),
    [(None, None, 2, 0, 3, 3), (1, None, 1, 0, 3, 3), (5, None, 5, 2, 5, 3), (None, 1, 2, 1, 2, 1), (3, 4, 3, 0, 4, 4)],
)
def test_counts_of_the_policy_hold_before_those_of_the_start(
    r: int | None, t: int | None, required: int, extras: int, tokens_per_step: int, num_workers: int
) -> None:
    started = CoordinationConfig(replicas_to_aggregate=2, total_num_replicas=3)
    config = started.with_policy(PolicySpec(replicas_to_aggregate=r, total_num_replicas=t))
    assert (config.num_required, config.num_extras) == (required, extras)
    assert (config.tokens_per_step, config.num_workers) == (tokens_per_step, num_workers)
    assert config.with_policy(PolicySpec()) == started


def test_the_fifo_queue_begins_with_as_many_tokens_as_contributions_unless_told() -> None:
    tokens = [
        CoordinationConfig(replicas_to_aggregate=2, policy=PolicySpec(tokens=TokenMode.FIFO, num_tokens=number)).num_initial_tokens
        for number in (-1, 0, 7)
    ]
    assert tokens == [2, 0, 7]


# Where a chief says that it is.


@pytest.mark.parametrize("address", ["host-a:5001", "127.0.0.1:5001", "unix:/run/chief.sock", "[::1]:5001"])
def test_a_chief_that_listens_at_a_name_advertises_that_name(address: str) -> None:
    assert reachable(address) == address


@pytest.mark.parametrize("address", ["0.0.0.0:5001", "[::]:5001"])
def test_a_chief_that_listens_everywhere_advertises_its_address_towards_its_servers(address: str) -> None:
    assert reachable(address) == ""
    assert towards(address, ("127.0.0.1:5000",)) == "127.0.0.1:5001"
    assert towards(address, ("unix:/run/ps.sock",)) == "127.0.0.1:5001"


def test_a_server_with_an_unknown_name_is_passed_over() -> None:
    assert towards("0.0.0.0:5001", ("no-such-host.invalid:5000", "127.0.0.1:5000")) == "127.0.0.1:5001"
    assert towards("0.0.0.0:5001", ("no-such-host.invalid:5000",)) == ""


def test_the_advertised_address_comes_from_the_flag_or_else_the_environment_and_is_checked() -> None:
    environment = {"LOCKSTEP_PS": "a:1", "LOCKSTEP_NUM_WORKERS": "2", "LOCKSTEP_ADVERTISE": "chief.example:0"}
    assert parse_config([], environment=environment).advertise == "chief.example:0"
    assert parse_config(["--advertise", "other:5001"], environment=environment).advertise == "other:5001"
    with pytest.raises(InvalidSpec, match="no host and port"):
        parse_config(["--advertise", "chief"], environment=environment)
