"""What `lockstep up` restarts, how often, and which arguments its flags give the roles."""

import argparse

import pytest

from lockstep.launcher.failures import SOUND_LIFE_S, RestartLimit
from lockstep.launcher.spec import ClusterSpec, flags_of
from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.process.options import DURABILITIES, UP, add_options, options_of
from ps_protocol.roles.checkpoint import Durability


def parsed(*words: str) -> ClusterSpec:
    parser = argparse.ArgumentParser()
    add_options(parser, options_of(UP))
    return ClusterSpec(**flags_of(parser.parse_args(words)))


def test_the_first_restart_is_immediate_and_the_next_ones_come_after_growing_pauses() -> None:
    limit = RestartLimit(4)
    assert [limit.pause_s("ps 0", lived_s=1.0) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, None]
    assert limit.num_in_a_row("ps 0") == 5


def test_a_process_that_fails_thousands_of_times_is_restarted_every_8_s() -> None:
    limit = RestartLimit(10**9)
    assert {limit.pause_s("worker 0", lived_s=1.0) for _ in range(3000)} == {0.0, 0.5, 1.0, 2.0, 4.0, 8.0}


def test_a_process_that_ran_for_long_has_its_restart_count_reset() -> None:
    limit = RestartLimit(1)
    for _ in range(10):
        assert limit.pause_s("ps 0", lived_s=SOUND_LIFE_S) == 0.0


def test_each_process_has_its_own_count() -> None:
    limit = RestartLimit(1)
    assert limit.pause_s("ps 0", lived_s=1.0) == 0.0
    assert limit.pause_s("chief", lived_s=1.0) == 0.0
    assert limit.pause_s("ps 0", lived_s=1.0) is None


def test_a_limit_of_zero_restarts_restarts_nothing() -> None:
    assert RestartLimit(0).pause_s("chief", lived_s=1e9) is None


def test_the_words_of_durability_are_those_of_the_protocol() -> None:
    assert {one.value for one in Durability} == set(DURABILITIES)


def test_the_roles_are_told_what_the_launcher_was_told_and_nothing_else() -> None:
    assert parsed().told == {"LOCKSTEP_NUM_WORKERS": "1"}
    words = (
        "--workers 3 --ps 2 --backup-workers 1 --lease 2.50 --reject-nonfinite --checkpoint-dir /c --restore step-000000005 --history /h"
    )
    assert parsed(*words.split(), "--history", "/h", "--max-restarts", "3").told == {
        "LOCKSTEP_NUM_WORKERS": "3",
        "LOCKSTEP_BACKUP_WORKERS": "1",
        "LOCKSTEP_LEASE": "2.50",
        "LOCKSTEP_REJECT_NONFINITE": "1",
        "LOCKSTEP_CHECKPOINT_DIR": "/c",
        "LOCKSTEP_RESTORE": "step-000000005",
        "LOCKSTEP_HISTORY": "/h",
    }


def test_a_flag_that_a_cluster_does_not_have_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="num_ps"):
        ClusterSpec(num_ps=2)


def test_a_number_that_is_0_was_given_and_a_switch_that_is_off_was_not() -> None:
    with pytest.raises(LaunchFailed, match="--workers: got '0', want a whole number from 1 to 100000"):
        ClusterSpec(workers=0)
    assert ClusterSpec(backup_workers=0, reject_nonfinite=False, max_steps=None).told == {
        "LOCKSTEP_NUM_WORKERS": "1",
        "LOCKSTEP_BACKUP_WORKERS": "0",
    }


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--durability step", "--durability"),
        ("--checkpoint-steps 5", "--checkpoint-steps"),
        ("--restore latest", "--restore"),
        ("--checkpoint-dir /c --restore ../x", "--restore"),
        ("--checkpoint-dir /c --checkpoint-interval 0", "--checkpoint-interval"),
        ("--checkpoint-dir /c --checkpoint-interval nan", "--checkpoint-interval"),
        ("--min-replicas 0", "--min-replicas"),
        ("--max-restarts -1", "--max-restarts"),
        ("--restart-workers -1", "--restart-workers"),
    ],
)
def test_recovery_options_that_make_no_sense_are_refused_with_the_flag(words: str, flag: str) -> None:
    with pytest.raises(LaunchFailed) as caught:
        parsed(*words.split())
    assert str(caught.value).startswith(f"{flag}: ")
    assert caught.value.exit_code == 2
