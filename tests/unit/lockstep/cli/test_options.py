"""The flags of policies: the policies they make, the chief's arguments for them, and combinations that are refused. No process."""

import argparse
import dataclasses

import pytest

from chief.config import parse_config
from lockstep.cli.clusters.change import change_of
from lockstep.cli.clusters.demo import spec_of
from lockstep.launcher.engines.engine import Engine
from lockstep.launcher.spec import ClusterSpec, flags_of
from lockstep.launcher.supervisor import LaunchFailed
from lockstep.launcher.watch import needs_of
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.process.options import MAX_STEPS, UP, add_options, options_of
from ps_protocol.roles.chief import HyperparameterChange
from tests.support.chief.chief_driver import Driver

SSP = PolicySpec(name=PolicyName.SSP, staleness=2, max_staleness=4, too_stale=TooStale.SCALE)
UNLOCKED = PolicySpec(name=PolicyName.ASYNC, use_locking=False)
FIFO = PolicySpec(tokens=TokenMode.FIFO, num_tokens=3)


def parsed(words: str) -> ClusterSpec:
    parser = argparse.ArgumentParser()
    add_options(parser, options_of(UP))
    return ClusterSpec(**flags_of(parser.parse_args(f"--workers 3 {words}".split())))


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("", PolicySpec()),
        ("--tokens fifo --num-tokens 3", FIFO),
        ("--policy ssp --staleness 2 --max-staleness 4 --too-stale scale", SSP),
        ("--policy async --no-locking", UNLOCKED),
    ],
)
def test_flags_name_a_policy_and_the_chief_is_given_the_same_one(words: str, policy: PolicySpec) -> None:
    spec = parsed(words)
    assert spec.policy == policy
    config = parse_config(["--ps", "127.0.0.1:1"], environment=spec.told)
    assert config.coordination.policy == policy


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--staleness 2", "--staleness: it is for the policy ssp, not sync"),
        ("--policy async --tokens fifo", "--tokens: it is for the policy sync, not async"),
        ("--policy ssp --no-locking", "--no-locking: it is for the policy async, not ssp"),
        ("--max-staleness 3", "--max-staleness: it is for the policy async, outer and ssp, not sync"),
        ("--num-tokens 3", "--num-tokens: only --tokens fifo has it"),
        ("--policy async --too-stale drop", "--too-stale: give --max-staleness"),
        ("--policy async --no-locking --max-staleness 3", "max_staleness: async without locking applies before"),
    ],
)
def test_a_number_that_the_policy_has_no_use_for_is_refused(words: str, complaint: str) -> None:
    with pytest.raises(LaunchFailed, match=complaint):
        parsed(words)


@pytest.mark.parametrize(
    ("flags", "backups", "max_steps"),
    [
        ({}, 1, "400"),
        ({"workers": "1"}, 0, "400"),
        ({"workers": "2:5"}, 1, "400"),
        ({"replicas_to_aggregate": "2"}, 0, "400"),
        ({"policy": "async"}, 0, "800"),
        ({"policy": "async", "max_steps": "7"}, 0, "7"),
    ],
)
def test_the_demo_takes_defaults_by_its_policy_and_asks_its_engine_once(
    flags: dict[str, object], backups: int, max_steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def engine_of(name: str, environment: object) -> Engine:
        asked.append(name)
        return Engine(hosts=())

    monkeypatch.setattr("lockstep.launcher.spec.engine_of", engine_of)
    spec = spec_of({"engine": "ray", **flags})
    assert (spec.num_backups, spec.told[MAX_STEPS.variable], asked) == (backups, max_steps, ["ray"])


def test_policy_changes_are_parsed_as_names_and_numbers() -> None:
    assert change_of(["learning_rate=0.01", "use_nesterov=true"], variable="w") == HyperparameterChange(
        variable="w", learning_rate=constant(0.01), hyperparameters={"use_nesterov": 1.0}
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["learning_rate"], "want NAME=VALUE"),
        (["=1"], "want NAME=VALUE"),
        (["momentum=much"], "momentum: got 'much', want a finite number, true or false"),
        (["momentum=inf"], "momentum: got 'inf'"),
        (["momentum=1", "momentum=2"], "momentum is given twice"),
    ],
)
def test_malformed_policy_changes_are_refused_with_a_reason(words: list[str], complaint: str) -> None:
    with pytest.raises(InvalidSpec, match=complaint):
        change_of(words)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--backup-workers 1", 2),
        ("--replicas-to-aggregate 5", 3),
        ("--replicas-to-aggregate 1", 1),
        ("--min-replicas 2", 2),
        ("--tokens fifo", 1),
        ("--policy ssp --staleness 2", 1),
    ],
)
def test_training_continues_with_as_many_workers_as_its_policy_needs(words: str, needed: int) -> None:
    assert parsed(words).num_workers_needed == needed


@pytest.mark.parametrize(
    ("policy", "num_required", "num_places", "needed", "text"),
    [
        (PolicySpec(), 2, 3, 2, "a step needs 2"),
        (PolicySpec(), 5, 3, 3, "a step needs 5"),
        (PolicySpec(), 5, 2, 2, "a step needs 5"),
        (PolicySpec(), 2, 0, 2, "a step needs 2"),
        (FIFO, 3, 3, 1, "policy sync, fifo tokens: a step needs 3"),
        (SSP, 1, 3, 1, "policy ssp(2), scales beyond staleness 4: every contribution is a step"),
    ],
)
def test_the_workers_that_a_step_needs_follow_from_the_chiefs_current_policy(
    policy: PolicySpec, num_required: int, num_places: int, needed: int, text: str
) -> None:
    driver = Driver()
    status = dataclasses.replace(
        driver.coordinator.status(driver.now), policy=policy, replicas_to_aggregate=num_required, total_num_replicas=num_places
    )
    needs = needs_of(status, spec=ClusterSpec(workers=3))
    assert (needs.num_workers, needs.text) == (needed, text)


def test_with_min_replicas_a_cluster_continues_without_the_other_workers() -> None:
    driver = Driver(total_num_replicas=3, min_replicas=1)
    status = driver.coordinator.status(driver.now)
    needs = needs_of(status, spec=ClusterSpec(workers=3))
    assert (needs.num_workers, needs.text) == (1, "a step needs 3, or what is left of them, 1 at least")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--backup-workers 1 --replicas-to-aggregate 2", "--backup-workers and --replicas-to-aggregate say the same in two ways"),
        ("--backup-workers 3", "--backup-workers: got 3, want 0 to 2"),
        ("--policy ssp --backup-workers 1", "--backup-workers: only sync and outer have steps of several contributions, not ssp"),
        ("--policy async --no-locking --replicas-to-aggregate 2", "--replicas-to-aggregate: only sync and outer"),
        ("--min-replicas 9", "--min-replicas: got 9, want 1 to 3, which a step needs when no worker is lost"),
        ("--policy async --min-replicas 1", "--min-replicas: got 1, want the policy sync"),
    ],
)
def test_numbers_of_sync_that_contradict_others_are_refused_by_launcher_and_chief_alike(words: str, complaint: str) -> None:
    with pytest.raises(LaunchFailed, match=complaint):
        parsed(words)
    with pytest.raises(InvalidSpec, match=complaint):
        parse_config(["--ps", "127.0.0.1:1", "--workers", "3", *words.split()], environment={})
