"""What `lockstep up` restarts, how often, and which arguments its flags give the roles."""

import argparse
from pathlib import Path

import pytest

from lockstep.launcher.failures import SOUND_LIFE_S, RestartLimit
from lockstep.launcher.spec import ClusterSpec, spec_of
from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.process.options import CHIEF, DURABILITIES, SERVER, UP, Given, add_options, options_of
from ps_protocol.roles.checkpoint import Durability


def parsed(*words: str) -> ClusterSpec:
    parser = argparse.ArgumentParser()
    add_options(parser, options_of(UP))
    return spec_of(Given(vars(parser.parse_args(words)), {}), num_backups=0)


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


def test_without_flags_the_launcher_passes_no_recovery_options_to_the_roles() -> None:
    assert parsed().words(SERVER) == []
    assert parsed().words(CHIEF) == ["--workers", "1"]


def test_the_launcher_passes_all_recovery_options_to_the_chief_and_the_directories_to_servers() -> None:
    words = "--checkpoint-dir /c --durability step --checkpoint-steps 5 --keep-checkpoints 2 --restore step-000000005 --min-replicas 1"
    spec = parsed(*words.split(), "--history", "/h")
    assert sorted(spec.words(SERVER)) == sorted(["--checkpoint-dir", "/c", "--history", "/h"])
    assert sorted(spec.words(CHIEF)) == sorted([*words.split(), "--history", "/h", "--workers", "1"])
    assert spec.recovery.history == Path("/h")


def test_the_launcher_passes_cluster_options_on_to_the_chief() -> None:
    words = "--workers 3 --backup-workers 1 --max-steps 7 --lease 2.5 --reject-nonfinite --checkpoint-dir /c --checkpoint-interval 0.5"
    assert sorted(parsed(*words.split()).words(CHIEF)) == sorted(words.split())


def test_an_address_of_an_object_store_is_no_directory_of_this_machine() -> None:
    assert parsed("--checkpoint-dir", "run/checkpoints").recovery.is_local
    remote = parsed("--checkpoint-dir", "s3://name:password@bucket/run")
    assert not remote.recovery.is_local
    assert "password" not in " ".join(remote.words(CHIEF)), "command lines are for everybody to see"
    assert remote.recovery.environment == {"LOCKSTEP_CHECKPOINT_DIR": "s3://name:password@bucket/run"}


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
