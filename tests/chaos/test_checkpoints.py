"""Checkpoints under faults: a kill at each boundary, a full disk, damaged files, wrong clocks."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lockstep.__main__ import main
from lockstep.checkpoint_changes import Changes
from ps_protocol.checkpoint.catalog import list_checkpoints, verify_checkpoint
from ps_protocol.checkpoint.storage import LocalStorage
from tests.chaos import claims, table_worker
from tests.chaos.cluster import Cluster, Event
from tests.chaos.conftest import Record, Started, filled
from tests.chaos.plan import ENDLESS, Plan
from tests.chaos.test_servers import PS_TARGET_S
from tests.unit.lockstep.cli.test_checkpoint import read_npz, read_safetensors
from tests.unit.lockstep.test_deltas import serve

pytestmark = pytest.mark.timeout(200)
MANIFEST = "MANIFEST.json"


def whole(cluster: Cluster) -> list[Path]:
    """Directories of the whole checkpoints, the oldest first."""
    return sorted(path.parent for path in cluster.checkpoints.glob(f"*/{MANIFEST}") if not path.parent.name.endswith(".incomplete"))


@pytest.mark.parametrize("failpoint", ["ps.save.before_write", "ps.save.mid_file", "ps.save.before_fsync", "ps.save.before_ack"])
@pytest.mark.shows("F20")
def test_a_parameter_server_killed_at_any_point_of_a_save_leaves_the_older_checkpoints_whole(
    start: Started, record: Record, failpoint: str
) -> None:
    """The third save, of step 10, is never finished, so that all goes back to step 5."""
    cluster = start(Plan(failpoints={"ps 1": f"{failpoint}=kill@3"}))
    died_at = cluster.await_death("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    record(f"ps killed at {failpoint}", standstill_s=cluster.standstill_s(died_at), target_s=PS_TARGET_S)
    assert _goes_on_at(cluster, died_at) == 5
    cluster.assert_as_without_faults()


@pytest.mark.parametrize(
    ("failpoint", "step"), [("chief.manifest.before_write", 5), ("chief.manifest.before_rename", 5), ("chief.manifest.after_rename", 10)]
)
@pytest.mark.shows("F20")
def test_a_chief_killed_at_any_point_of_a_manifest_leaves_a_whole_checkpoint_or_none(start: Started, failpoint: str, step: int) -> None:
    """And everything else is killed with it, so that the disk alone decides."""
    cluster = start(Plan(failpoints={"chief": f"{failpoint}=kill@3"}))
    died_at = cluster.await_death("chief")
    cluster.kill(*cluster.everybody)
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    assert _goes_on_at(cluster, died_at) == step
    cluster.assert_as_without_faults()


DELTAS = Plan(program=("-m", "tests.chaos.table_worker"), chief_flags=("--full-every", "4"))


@pytest.mark.parametrize("failpoint", ["ps.save.before_write", "ps.save.mid_file", "ps.save.before_fsync", "ps.save.before_ack"])
@pytest.mark.shows("F20")
def test_a_parameter_server_killed_at_any_point_of_a_delta_goes_back_to_the_delta_before(start: Started, failpoint: str) -> None:
    """The first save is full; the second, of step 5, is a delta on it, and the third is never finished."""
    cluster = start(replace(DELTAS, failpoints={"ps 1": f"{failpoint}=kill@3"}))
    died_at = cluster.await_death("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    assert _goes_on_at(cluster, died_at) == 5
    _assert_deltas_lost_nothing(cluster)


@pytest.mark.parametrize(
    ("failpoint", "step"), [("chief.manifest.before_write", 5), ("chief.manifest.before_rename", 5), ("chief.manifest.after_rename", 10)]
)
@pytest.mark.shows("F20")
def test_a_chief_killed_at_any_point_of_a_deltas_manifest_leaves_a_whole_delta_or_none(start: Started, failpoint: str, step: int) -> None:
    cluster = start(replace(DELTAS, failpoints={"chief": f"{failpoint}=kill@3"}))
    died_at = cluster.await_death("chief")
    cluster.kill(*cluster.everybody)
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    assert _goes_on_at(cluster, died_at) == step
    _assert_deltas_lost_nothing(cluster)


def _assert_deltas_lost_nothing(cluster: Cluster) -> None:
    claims.assert_each_step_once(cluster.events())
    cluster.assert_values(table_worker.reference(num_steps=cluster.plan.max_steps, num_workers=cluster.plan.num_workers))
    kept, _ = list_checkpoints(LocalStorage(cluster.checkpoints))
    assert any(one.checkpoint.bases for one in kept) and kept[-1].checkpoint.step == cluster.plan.max_steps
    for one in kept:
        verify_checkpoint(LocalStorage(cluster.checkpoints), one.checkpoint)


# With --durability step there is a checkpoint of each step, and as many are kept as are made while nobody takes them.
EACH_STEP = replace(DELTAS, durability="step", checkpoint_steps=None, chief_flags=(*DELTAS.chief_flags, "--keep-checkpoints", "100"))


@pytest.mark.parametrize("plan", [DELTAS, replace(DELTAS, has_standbys=True), EACH_STEP], ids=["rolled back", "with standbys", "each step"])
def test_who_takes_the_changes_has_what_an_export_has_although_chief_server_and_who_writes_them_are_killed(
    start: Started, tmp_path: Path, plan: Plan
) -> None:
    """A standby that takes over writes all of its rows, among the changes of others."""
    cluster, out = start(replace(plan, max_steps=ENDLESS, pace_s=0.1)), tmp_path / "out"
    place = ("--checkpoint-dir", str(cluster.checkpoints))
    command = [sys.executable, "-m", "lockstep", "checkpoint", "changes", str(out), "--follow", *place]

    def await_more() -> None:
        before = len(list(out.glob("*.safetensors")))
        cluster.await_(lambda: len(list(out.glob("*.safetensors"))) > before + 1, what="changes are written")

    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        await_more()
        for name in ("chief", "ps 1"):
            cluster.kill(name)
            cluster.restart(name)
            await_more()
        first.kill()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as second:
        await_more()
        second.kill()
    last = cluster.finish()
    assert main(["checkpoint", "changes", str(out), *place]) == 0
    served, since, num_deltas, steps = dict[str, Any](), "", 0, list[int]()
    for path in sorted(out.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns):
        with safe_open(path, "numpy") as file:
            about = file.metadata()
            assert about.get("since", since) == since, "none is missing"
            one = Changes(
                tag=about["tag"],
                step=int(about["step"]),
                cluster=about["cluster"],
                since=about.get("since", ""),
                arrays=read_safetensors(path),
            )
        serve(served, one)
        since, num_deltas = one.tag, num_deltas + bool(one.since)
        # A rollback begins a step again, in another epoch, with all rows.
        assert plan.durability != "step" or not steps or one.step == steps[-1] + 1 or (one.step <= steps[-1] and not one.since)
        steps.append(one.step)
    assert num_deltas >= 4 and one.step == last
    assert main(["checkpoint", "export", str(tmp_path / "all.npz"), *place]) == 0
    exported = read_npz(tmp_path / "all.npz")
    keyed = dict(zip(exported.pop("keyed@row keys").tolist(), exported.pop("keyed").tolist(), strict=True))
    assert served.pop("keyed") == keyed
    assert {name: values.tobytes() for name, values in served.items()} == {name: values.tobytes() for name, values in exported.items()}


@pytest.mark.parametrize("failure", ["error:enospc", "error:eio"])
@pytest.mark.parametrize("where", ["ps.save.mid_file", "ps.save.before_fsync"])
@pytest.mark.shows("F19")
def test_a_disk_that_fails_once_is_reported_and_training_continues(start: Started, where: str, failure: str) -> None:
    """The old checkpoints stay, the next interval tries again."""
    cluster = start(Plan(failpoints={"ps 1": f"{where}={failure}@2"}))
    cluster.await_end()
    _assert_told_of_a_failed_save(cluster, "No space left on device" if failure == "error:enospc" else "Input/output error")
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()
    steps = claims.assert_checkpoints_are_of_one_step_each(cluster.checkpoints, num_workers=3, scratch=cluster.directory)
    assert steps[-1] == cluster.plan.max_steps, "later ones were saved"


@pytest.mark.shows("F19")
def test_a_full_or_read_only_disk_is_reported_and_used_again_as_soon_as_possible(start: Started, disk: Path) -> None:
    """With a file system that really is so."""
    cluster = start(Plan(max_steps=ENDLESS))
    cluster.await_(lambda: len(whole(cluster)) >= 2, what="there are checkpoints")
    filler = filled(disk)
    cluster.await_(lambda: "checkpoint" in _failed_saves(cluster), what="the chief says that it cannot save")
    intact = [path.name for path in whole(cluster)]
    assert intact
    at = cluster.reached()
    cluster.await_step(at + 10)
    assert [path.name for path in whole(cluster)] == intact
    filler.unlink()
    cluster.await_(lambda: _newest_step(cluster) > at, what="it saves again once there is room")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    at = cluster.reached()
    cluster.await_(lambda: "Read-only file system" in cluster.text_of("chief"), what="the chief says that it cannot write")
    cluster.await_step(at + 10)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    cluster.await_(lambda: _newest_step(cluster) > at, what="it saves again once it may")
    cluster.kill("ps 0")
    cluster.restart("ps 0")
    cluster.await_step(cluster.reached() + 10)
    cluster.assert_as_without_faults(num_steps=cluster.finish())


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
    text = (newest / MANIFEST).read_text()
    assert '"lockstep"' in text
    (newest / MANIFEST).write_text(text.replace('"lockstep"', '"somebody-elses"'))


@pytest.mark.parametrize(
    "damage",
    [
        *(_flip_a_bit, _truncate, _lose_a_file, _swap_files, _take_the_older_file),
        *(_tear_the_manifest, _lose_the_manifest, _take_another_jobs_manifest),
    ],
)
@pytest.mark.shows("F21")
def test_a_damaged_checkpoint_is_skipped_loudly_and_the_one_before_it_taken(start: Started, damage: Callable[[Path, Path], None]) -> None:
    cluster = start(Plan())
    cluster.await_(lambda: len(whole(cluster)) >= 2 and cluster.reached() >= 12, what="there are two checkpoints")
    cluster.kill(*cluster.everybody)
    *_, older, newest = whole(cluster)
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    damage(newest, older)
    assert {path.name: path.read_bytes() for path in newest.iterdir()} != before
    damaged_at = time.monotonic()
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    told = [line for line in cluster.text_of("chief").rpartition("--- life")[2].splitlines() if newest.name in line]
    assert any(re.search(r" WARNING .* is (skipped|damaged)", line) for line in told), cluster.logs()
    assert _goes_on_at(cluster, damaged_at) == int(older.name.removeprefix("step-"))
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("num_ps", [1, 3, 5])
@pytest.mark.shows("F23")
def test_a_checkpoint_of_two_servers_is_restored_into_another_number(start: Started, num_ps: int) -> None:
    cluster = start(Plan())
    cluster.await_(lambda: cluster.reached() >= 14 and len(whole(cluster)) >= 2, what="there are checkpoints")
    cluster.kill(*cluster.everybody)
    saved = int(whole(cluster)[-1].name.removeprefix("step-"))
    killed_at = time.monotonic()
    larger = start(replace(cluster.plan, num_ps=num_ps))
    larger.await_end()
    assert _goes_on_at(larger, killed_at) == saved >= 5
    larger.assert_as_without_faults()


@pytest.mark.shows("F23")
def test_a_worker_with_another_model_than_the_checkpoint_is_refused_and_disturbs_no_other(start: Started) -> None:
    cluster = start(Plan())
    cluster.await_(lambda: cluster.reached() >= 14 and len(whole(cluster)) >= 2, what="there are checkpoints")
    killed_at = cluster.kill(*cluster.everybody)
    for name in cluster.roles:
        cluster.restart(name)
    cluster.start_one("worker 0", flags=["--failure", "model"])
    cluster.await_death("worker 0", code=1)
    assert re.search(r"ModelMismatch.*'extra'", cluster.text_of("worker 0")), cluster.logs()
    for index in range(3):
        cluster.restart(f"worker {index}")
    cluster.await_end()
    assert _goes_on_at(cluster, killed_at) >= 5
    cluster.assert_as_without_faults()


@pytest.mark.shows("F22")
def test_checkpoints_while_steps_run_are_of_one_step_each(start: Started) -> None:
    """Saving as fast as it goes, and the servers are lost again and again."""
    cluster = start(Plan(max_steps=80, checkpoint_steps=1, pace_s=0.01))
    for step in (15, 30, 45, 60):
        cluster.await_step(step)
        name = f"ps {step // 15 % 2}"
        cluster.kill(name)
        cluster.restart(name)
    cluster.await_end()
    assert {event["epoch"] for event in cluster.events() if event["event"] == "step"} == {1, 2, 3, 4, 5}
    cluster.assert_as_without_faults()
    steps = claims.assert_checkpoints_are_of_one_step_each(cluster.checkpoints, num_workers=3, scratch=cluster.directory)
    assert len(steps) >= 2


@pytest.mark.shows("F24")
def test_clocks_that_differ_and_jump_decide_nothing(start: Started) -> None:
    """Leases and waits go by monotonic clocks; the newest checkpoint is that of the highest epoch and step."""
    wrapper = {name: ["tests.chaos.wrong_clock", offset] for name, offset in (("ps 0", "3600"), ("chief", "-3600"), ("worker 1", "86400"))}
    cluster = start(Plan(wrapper=wrapper))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    assert cluster.rollbacks() > 0
    hours = {name: (_clock_of(cluster, name) - _clock_of(cluster, "ps 1")).total_seconds() / 3600 for name in wrapper}
    assert hours == {"ps 0": pytest.approx(1.5, abs=0.6), "chief": pytest.approx(-0.5, abs=0.6), "worker 1": pytest.approx(24.5, abs=0.6)}
    cluster.assert_as_without_faults()


def _goes_on_at(cluster: Cluster, since: float) -> int:
    """The first step that a worker contributed to after a loss, and that counted."""
    steps = [event["step"] for event in cluster.events() if event["event"] == "step" and event["at"] > since and _counts(event)]
    return int(min(steps))


def _counts(event: Event) -> bool:
    return bool(event["outcome"] == "ACCEPTED" and event["epoch"] > 1)


def _newest_step(cluster: Cluster) -> int:
    return int(whole(cluster)[-1].name.removeprefix("step-"))


def _failed_saves(cluster: Cluster) -> str:
    """What the chief said of saves that failed."""
    lines = cluster.text_of("chief").splitlines()
    return "\n".join(line for line in lines if "WARNING" in line and "checkpoint" in line)


def _assert_told_of_a_failed_save(cluster: Cluster, cause: str) -> None:
    assert cause in _failed_saves(cluster), cluster.logs()


def _clock_of(cluster: Cluster, name: str) -> datetime:
    """What time a process thought it was at its first line."""
    found = re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", cluster.text_of(name), re.MULTILINE)
    assert found is not None, cluster.logs()
    return datetime.fromisoformat(found[0])
