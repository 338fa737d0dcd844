"""Where the processes of a cluster go among its hosts, and what one that runs elsewhere is told. Starts nothing."""

import base64
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.launcher.hosts import Host, Hosts, parse_hosts
from lockstep.launcher.remote import EXIT_HOST_LOST
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import LaunchFailed, Process, ProcessSpec
from ps_protocol.errors import InvalidSpec


def three() -> Hosts:
    return Hosts(parse_hosts("a,b=10.0.0.2,me@c"), python="", cwd="")


def ended(name: str, returncode: int) -> Process:
    return cast(Process, type("Ended", (), {"name": name, "returncode": returncode})())


def test_hosts_are_named_as_ssh_knows_them_and_addressed_as_the_others_reach_them() -> None:
    assert [(host.name, host.address) for host in three()] == [("a", "a"), ("b", "10.0.0.2"), ("me@c", "c")]
    assert parse_hosts("") == ()


@pytest.mark.parametrize("text", ["a,,b", "a,a", "-oProxyCommand=x", "a=", "a:22", "a=10.0.0.1:22"])
def test_a_text_that_names_no_hosts_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="--hosts: "):
        parse_hosts(text)


def test_processes_take_turns_and_a_standby_is_not_beside_its_twin() -> None:
    hosts = three()
    names = ["chief", "ps 0", "ps 1", "ps 3", "standby 0", "standby 2", "worker 4"]
    assert [hosts.of(name).name for name in names] == ["a", "a", "b", "a", "b", "a", "b"]


def test_workers_go_where_an_engine_has_placed_them_and_the_others_take_turns() -> None:
    a, b, c = three()
    hosts = Hosts([a, b, c], python="", cwd="", places=[b, b, a])
    names = ["worker 0", "worker 1", "worker 2", "ps 0", "ps 2"]
    assert [hosts.of(name).name for name in names] == [host.name for host in (b, b, a, a, c)]
    assert hosts.see_end(ended("worker 0", EXIT_HOST_LOST)) and hosts.of("worker 1") is not b


def test_a_process_moves_only_when_its_host_is_lost_and_nothing_begins_there_any_more() -> None:
    hosts = three()
    assert [hosts.of(name).name for name in ("chief", "ps 0", "ps 1", "worker 1")] == ["a", "a", "b", "b"]
    assert not hosts.see_end(ended("ps 0", 1)) and hosts.of("ps 0").name == "a"
    assert hosts.see_end(ended("ps 0", EXIT_HOST_LOST)) and hosts.of("ps 0").name == "b"
    assert hosts.see_end(ended("chief", EXIT_HOST_LOST)) and hosts.of("chief").name == "b", "it was on the lost host, too"
    assert hosts.of("ps 1").name == "b" and hosts.of("ps 3").name != "a"
    assert not hosts.see_end(ended("worker 1", -9)) and hosts.of("worker 1").name == "b"


def test_a_process_is_on_a_lost_host_until_it_has_been_seen_to_end_there() -> None:
    hosts = three()
    for name in (names := ("chief", "ps 0", "ps 1")):
        hosts.of(name)
    assert hosts.see_end(ended("chief", EXIT_HOST_LOST))
    assert [hosts.has_lost(name) for name in names] == [False, True, False]
    assert hosts.see_end(ended("ps 0", EXIT_HOST_LOST))
    assert not any(map(hosts.has_lost, names))


def test_where_every_host_is_lost_each_is_tried_again() -> None:
    hosts = Hosts([Host(name="a", address="a", reach=("ssh", "a"))], python="", cwd="")
    assert hosts.of("ps 0").name == "a"
    assert not hosts.see_end(ended("ps 0", EXIT_HOST_LOST)) and hosts.of("ps 0").name == "a"
    assert not hosts.has_lost("ps 0"), "nobody waits for it to move"


def test_a_process_elsewhere_gets_its_own_files_and_nothing_of_the_launchers_environment(tmp_path: Path) -> None:
    (tmp_path / "worker.token").write_text("worker 123")
    (tmp_path / "ps.key").write_text("secret")
    spec = ProcessSpec(name="worker 1", command=[sys.executable, "train.py"], environment={"LOCKSTEP_CHIEF": "a:1"}, pause_s=0.5)
    host = parse_hosts("a")[0]
    carried = three().carried(spec, host=host, private=tmp_path, files=["worker.token"], returns=["x.address"])
    (path,) = tmp_path.glob("*.task")
    told: dict[str, Any] = json.loads(path.read_text())
    assert path.stat().st_mode & 0o077 == 0, "it holds keys"
    assert carried.command[-1] == str(path) and carried.pause_s == 0.5
    assert told["reach"][:2] == ["ssh", "-o"] and told["reach"][-2] == "a" and told["command"] == [sys.executable, "train.py"]
    assert {name: base64.b64decode(content) for name, content in told["files"].items()} == {"worker.token": b"worker 123"}
    assert told["environment"] == {"LOCKSTEP_CHIEF": "a:1"} and told["returns"] == ["x.address"]


def test_on_several_hosts_the_chief_has_a_process_of_its_own() -> None:
    assert [host.name for host in ClusterSpec(hosts="a,b", host_env="A,B").hosts] == ["a", "b"]
    with pytest.raises(LaunchFailed, match="--chief-in-ps: on several hosts"):
        ClusterSpec(hosts="a,b", chief_in_ps=True)
    with pytest.raises(LaunchFailed, match="--hosts: got ''"):
        ClusterSpec(hosts="a,,b")
