"""A parameter server's configuration from flags, LOCKSTEP_* and TF_CONFIG."""

import json
from pathlib import Path

import pytest

from ps_protocol.errors import InvalidSpec
from ps_server.config import ParameterServerConfig, default_apply_threads, machine_memory_bytes, parse_config

TF_CONFIG = json.dumps({"cluster": {"ps": ["127.0.0.1:7001", "127.0.0.1:7002"]}, "task": {"type": "ps", "index": 1}})


def test_flags_give_the_whole_server_configuration() -> None:
    flags = "--index 2 --address unix:/tmp/x --cluster job-a --announce /tmp/a --max-memory-bytes 4096 --allow-insecure-network"
    assert parse_config(flags.split(), environment={}) == ParameterServerConfig(
        index=2, address="unix:/tmp/x", cluster="job-a", announce=Path("/tmp/a"), max_memory_bytes=4096, allow_insecure_network=True
    )


def test_a_parameter_server_can_start_with_an_index_alone() -> None:
    assert parse_config(["--index", "0"], environment={}) == ParameterServerConfig(index=0, address="127.0.0.1:0", cluster="lockstep")


def test_the_environment_gives_the_whole_server_configuration() -> None:
    environment = {
        "LOCKSTEP_PS_INDEX": "3",
        "LOCKSTEP_ADDRESS": "0.0.0.0:5000",
        "LOCKSTEP_CLUSTER": "job-b",
        "LOCKSTEP_MAX_MEMORY_BYTES": "8192",
        "LOCKSTEP_ALLOW_INSECURE_NETWORK": "1",
    }
    assert parse_config([], environment=environment) == ParameterServerConfig(
        index=3, address="0.0.0.0:5000", cluster="job-b", max_memory_bytes=8192, allow_insecure_network=True
    )


def test_rows_in_files_need_a_directory_that_can_be_written_to(tmp_path: Path) -> None:
    assert parse_config(["--index", "0", "--table-dir", str(tmp_path)], environment={}).table_dir == tmp_path
    with pytest.raises(InvalidSpec, match=r"--table-dir: .*gone is no directory that this process may write to; make it, on a local disk"):
        parse_config(["--index", "0"], environment={"LOCKSTEP_TABLE_DIR": str(tmp_path / "gone")})


def test_flags_come_before_the_environment_and_that_before_tf_config() -> None:
    environment = {"LOCKSTEP_PS_INDEX": "3", "LOCKSTEP_CLUSTER": "job-b", "TF_CONFIG": TF_CONFIG}
    config = parse_config(["--cluster", "job-c"], environment=environment)
    assert (config.index, config.address, config.cluster) == (3, "127.0.0.1:7002", "job-c")


def test_apply_threads_are_those_asked_for_else_the_processors_that_it_may_use() -> None:
    assert parse_config(["--index", "0", "--apply-threads", "3"], environment={"LOCKSTEP_APPLY_THREADS": "5"}).apply_threads == 3
    assert parse_config(["--index", "0"], environment={"LOCKSTEP_APPLY_THREADS": "5"}).apply_threads == 5
    assert parse_config(["--index", "0"], environment={}).apply_threads is None
    assert 1 <= default_apply_threads() <= 8


def test_the_tf_config_of_another_task_is_not_used() -> None:
    with pytest.raises(InvalidSpec, match="which parameter server is this"):
        parse_config([], environment={"TF_CONFIG": TF_CONFIG.replace('"type": "ps"', '"type": "worker"')})


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ("", {}, "which parameter server is this? give --index I"),
        ("--index x", {}, "--index: got 'x', want a whole number from 0"),
        ("--index -1", {}, "--index"),
        ("", {"LOCKSTEP_PS_INDEX": "one"}, "LOCKSTEP_PS_INDEX: got 'one'"),
        ("--index 4294967296", {}, "--index: got '4294967296', want a whole number from 0 to 4294967295"),
        ("--index 0 --address 5000", {}, "address '5000': no host and port in it; want host:port or unix:/path"),
        ("--index 0 --address 0.0.0.0:5000", {}, "address 0.0.0.0:5000: others than this machine can reach it"),
        ("--index 0 --address ps-0:5000", {}, "--allow-insecure-network"),
        ("--index 0 --apply-threads 0", {}, "--apply-threads: got '0', want a whole number from 1 to 256"),
        ("--index 0", {"LOCKSTEP_APPLY_THREADS": "all"}, "LOCKSTEP_APPLY_THREADS: got 'all', want a whole number"),
        ("--index 0 --max-memory-bytes 0", {}, "--max-memory-bytes: got '0', want a whole number >= 1"),
        ("--index 0 --max-memory-bytes 8GiB", {}, "--max-memory-bytes: got '8GiB', want a whole number"),
        ("--index 0 --memory 1", {}, "no such argument: --memory 1; did you mean '--max-memory-bytes'? (see lockstep server --help)"),
        ("--index", {}, "expected one argument"),
        ("--index 0", {"LOCKSTEP_ALLOW_INSECURE_NETWORK": "maybe"}, "LOCKSTEP_ALLOW_INSECURE_NETWORK: got 'maybe', want 1 or 0"),
        ("--index 0", {"LOCKSTEP_CLUSTER": "a\nb"}, "--cluster: name 'a\\nb': has a control character"),
        ("--index 0 --cluster=", {}, "--cluster: the name is empty; give one, or leave the flag out"),
        ("--index 0 --cluster=", {"LOCKSTEP_CLUSTER": "job-b"}, "--cluster: the name is empty"),
        ("--index 0", {"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
    ],
)
def test_each_error_is_reported_in_one_line(arguments: str, environment: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_config(arguments.split(), environment=environment)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_the_memory_of_the_machine_can_be_read() -> None:
    assert machine_memory_bytes() > 1 << 24
