"""TF_CONFIG as cluster engines write it, and the errors for a wrong one."""

import json
import re

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.process.tf_config import TfConfig, parse_tf_config

CLUSTER = {"chief": ["c:1"], "ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}


def _parse(**config: object) -> TfConfig:
    parsed = parse_tf_config(json.dumps(config))
    assert parsed is not None
    return parsed


def test_whole_configuration_is_read() -> None:
    assert _parse(cluster=CLUSTER, task={"type": "worker", "index": 2}) == TfConfig(
        chief="c:1", ps=("p0:1", "p1:1"), workers=("w0:1", "w1:1", "w2:1"), task_type="worker", task_index=2
    )


@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_blank_tf_config_counts_as_absent(text: str) -> None:
    assert parse_tf_config(text) is None


def test_fields_that_other_engines_add_to_tf_config_are_ignored() -> None:
    config = _parse(
        cluster={**CLUSTER, "evaluator": ["e:1"]}, task={"type": "evaluator", "index": 0}, environment="cloud", rpc_layer="grpc"
    )
    assert (config.task_type, config.chief) == ("evaluator", "c:1")


def test_master_is_the_old_name_of_the_chief() -> None:
    config = _parse(cluster={"master": ["m:1"]}, task={"type": "master", "index": 0})
    assert (config.chief, config.task_type, config.bind_address) == ("m:1", "chief", "0.0.0.0:1")


def test_an_empty_object_names_no_address() -> None:
    assert _parse() == TfConfig(chief=None, ps=(), workers=(), task_type="", task_index=0)


def test_index_may_be_a_string_of_digits() -> None:
    assert _parse(cluster=CLUSTER, task={"type": "ps", "index": "1"}).task_index == 1


def test_addresses_may_be_an_object_by_index() -> None:
    assert _parse(cluster={"ps": {"1": "b:1", "0": "a:1"}}).ps == ("a:1", "b:1")


@pytest.mark.parametrize(
    ("address", "bind_address"),
    [
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("localhost:7", "localhost:7"),
        ("unix:/tmp/x", "unix:/tmp/x"),
        ("ps-0.training.svc:2222", "0.0.0.0:2222"),
    ],
)
def test_task_listens_at_its_port(address: str, bind_address: str) -> None:
    assert _parse(cluster={"ps": [address]}, task={"type": "ps"}).bind_address == bind_address


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"cluster": {**CLUSTER, "parameter_server": ["p:1"]}},
            "cluster.parameter_server: there is no such job; want chief, master, ps, worker",
        ),
        ({"cluster": {**CLUSTER, "chief": ["c:1", "d:1"]}}, "cluster.chief has 2 addresses, want one"),
        ({"cluster": CLUSTER, "task": {"type": "trainer", "index": 0}}, "task.type is 'trainer', want one of chief, master, ps, worker"),
    ],
)
def test_rule_82_a_cluster_has_known_jobs_and_at_most_one_chief_and_a_task_a_known_type(config: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(said)):
        _parse(**config)


def test_worker_listens_nowhere() -> None:
    assert _parse(cluster=CLUSTER, task={"type": "worker", "index": 0}).bind_address is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "TF_CONFIG is not JSON: "),
        ("[" * 100_000, "TF_CONFIG is not JSON: "),
        ("[]", "TF_CONFIG: got a list, want an object"),
        ('{"cluster": 3}', "TF_CONFIG: cluster is a number, want an object"),
        ('{"task": "ps"}', "TF_CONFIG: task is a string, want an object"),
        ('{"task": {"type": 1}}', "task.type is a number, want a string"),
        ('{"task": {"type": "ps", "index": -1}}', "task.index is -1, want an integer from 0"),
        ('{"task": {"type": "ps", "index": true}}', "task.index is True"),
        ('{"cluster": {"ps": "a:1"}}', "cluster.ps is a string, want a list of addresses"),
        ('{"cluster": {"ps": [null]}}', "cluster.ps[0] is null, want an address"),
        ('{"cluster": {"ps": ["a:1", "a"]}}', "cluster.ps[1]: address 'a': "),
        ('{"cluster": {"ps": {"0": "a:1", "2": "c:1"}}}', "cluster.ps has the indices 0, 2, want 0 to 1"),
        ('{"cluster": {"chief": ["a:1", "b:1"]}}', "cluster.chief has 2 addresses, want one"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 1}}', "task is ps 1, but cluster.ps has 1 addresses"),
    ],
)
def test_the_refusal_of_a_tf_config_names_the_wrong_part(text: str, said: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_tf_config(text)
    assert said in caught.value.message
