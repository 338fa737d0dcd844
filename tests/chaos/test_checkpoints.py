"""Checkpoints under every misfortune: killed at each boundary, a full disk, damaged files; and clocks that are wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.conftest import Record, Started
from tests.chaos.processes import Cluster, Plan
from tests.chaos.test_servers import PS_TARGET_S

pytestmark = pytest.mark.timeout(200)
MANIFEST = "MANIFEST.json"


def whole(cluster: Cluster) -> list[Path]:
    """Directories of the whole checkpoints, the oldest first."""
    return sorted(path.parent for path in cluster.checkpoints.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(".incomplete"))


@pytest.mark.parametrize(
    "failpoint", ["ps.save.before_write", "ps.save.mid_file", "ps.save.before_fsync", "ps.save.before_ack", "ps.restore.mid"]
)
def test_a_parameter_server_killed_at_any_point_of_a_save_leaves_the_older_checkpoints_whole(
    start: Started, record: Record, failpoint: str
) -> None:
    """F20."""
    cluster = start(Plan(failpoints={"ps 1": f"{failpoint}=kill@3"}))
    if failpoint == "ps.restore.mid":
        cluster.await_step(12)
        cluster.kill("ps 1")
        cluster.start_one("ps 1", failpoints=f"{failpoint}=kill@1")
    died_at = cluster.await_death("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    record(f"ps killed at {failpoint}", standstill_s=cluster.standstill_s(died_at), target_s=PS_TARGET_S)
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("failpoint", ["chief.manifest.before_write", "chief.manifest.before_rename", "chief.manifest.after_rename"])
def test_a_chief_killed_at_any_point_of_a_manifest_leaves_a_whole_checkpoint_or_none(start: Started, failpoint: str) -> None:
    """F20: and everything else is killed with it, so that the disk alone decides."""
    cluster = start(Plan(failpoints={"chief": f"{failpoint}=kill@3"}))
    cluster.await_death("chief")
    names = [*cluster.roles, *(f"worker {index}" for index in range(cluster.plan.num_workers))]
    for name in names:
        cluster.kill(name)
    for name in names:
        cluster.restart(name)
    cluster.await_end()
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("failure", ["error:enospc", "error:eio"])
@pytest.mark.parametrize("where", ["ps.save.mid_file", "ps.save.before_fsync"])
def test_a_disk_that_is_full_or_broken_is_told_and_training_goes_on(start: Started, where: str, failure: str) -> None:
    """F19: the old checkpoints stay, the next interval tries again."""
    cluster = start(Plan(failpoints={"ps 1": f"{where}={failure}@2"}))
    cluster.await_end()
    assert "checkpoint" in cluster.text_of("chief").lower()
    assert len(whole(cluster)) >= 1
    cluster.assert_as_without_faults()


def _flip_a_bit(newest: Path, older: Path) -> None:
    path = sorted(newest.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x10
    path.write_bytes(content)


def _truncate(newest: Path, older: Path) -> None:
    path = sorted(newest.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-40])


def _lose_a_file(newest: Path, older: Path) -> None:
    sorted(newest.glob("*.safetensors"))[0].unlink()


def _swap_files(newest: Path, older: Path) -> None:
    first, second = sorted(newest.glob("*.safetensors"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _take_the_older_file(newest: Path, older: Path) -> None:
    name = sorted(newest.glob("*.safetensors"))[0].name
    shutil.copy(older / name, newest / name)


def _tear_the_manifest(newest: Path, older: Path) -> None:
    path = newest / MANIFEST
    path.write_bytes(path.read_bytes()[:100])


def _lose_the_manifest(newest: Path, older: Path) -> None:
    (newest / MANIFEST).unlink()


def _take_another_jobs_manifest(newest: Path, older: Path) -> None:
    content = json.loads((newest / MANIFEST).read_text())
    text = json.dumps(content).replace('"lockstep"', '"somebody-elses"')
    (newest / MANIFEST).write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        *(_flip_a_bit, _truncate, _lose_a_file, _swap_files, _take_the_older_file),
        *(_tear_the_manifest, _lose_the_manifest, _take_another_jobs_manifest),
    ],
)
def test_a_damaged_checkpoint_is_skipped_loudly_and_the_one_before_it_taken(start: Started, damage: Callable[[Path, Path], None]) -> None:
    """F21."""
    cluster = start(Plan())
    cluster.await_(lambda: len(whole(cluster)) >= 2 and cluster.reached() >= 12, what="there are two checkpoints")
    names = [*cluster.roles, *(f"worker {index}" for index in range(cluster.plan.num_workers))]
    for name in names:
        cluster.kill(name)
    *_, older, newest = whole(cluster)
    damage(newest, older)
    for name in names:
        cluster.restart(name)
    cluster.await_end()
    assert newest.name in cluster.text_of("chief").rpartition("--- life")[2], "the chief says which one it skipped"
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("num_ps", [1, 3, 5])
def test_a_checkpoint_of_two_servers_is_restored_into_another_number(start: Started, num_ps: int) -> None:
    """F23."""
    cluster = start(Plan())
    cluster.await_(lambda: cluster.reached() >= 14 and len(whole(cluster)) >= 2, what="there are checkpoints")
    for name in [*cluster.roles, *(f"worker {index}" for index in range(cluster.plan.num_workers))]:
        cluster.kill(name)
    larger = start(replace(cluster.plan, num_ps=num_ps))
    larger.await_end()
    begun = [event["step"] for event in larger.events() if event["event"] == "joined"]
    assert max(begun) >= 5, "it went on from a checkpoint"
    larger.assert_as_without_faults()


def test_checkpoints_while_steps_run_are_of_one_step_each(start: Started) -> None:
    """F22: saving as fast as it goes, and the servers are lost again and again."""
    cluster = start(Plan(num_steps=80, checkpoint_steps=1, pace_s=0.01))
    for step in (15, 30, 45, 60):
        cluster.await_step(step)
        name = f"ps {step // 15 % 2}"
        cluster.kill(name)
        cluster.restart(name)
    cluster.await_end()
    cluster.assert_as_without_faults()


def test_clocks_that_differ_and_jump_decide_nothing(start: Started) -> None:
    """F24: leases and waits go by monotonic clocks; the newest checkpoint is that of the highest epoch and step."""
    wrapper = {name: ["tests.chaos.wrong_clock", offset] for name, offset in (("ps 0", "3600"), ("chief", "-3600"), ("worker 1", "86400"))}
    cluster = start(Plan(wrapper=wrapper))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    cluster.assert_as_without_faults()
