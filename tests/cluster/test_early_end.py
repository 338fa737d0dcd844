"""Workers that end with exit code 0 before the others: training goes on if it can, and else ends with words, not in a silent wait."""

import dataclasses
from pathlib import Path

import pytest

from lockstep.standstill import GRACE_S, Standstill, cannot_step
from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind, ParticipantStatus
from tests.cluster.launching import IDLE, TRAIN, are_gone, descendants, read_until, run_up, up

# What worker 1 does, put before and into the training of both.
LEAVES = {
    "before it joins": ("if is_first_to_go: sys.exit(0)", ""),
    "at step 10": ("if is_first_to_go: sys.argv[1:] = ['10']", ""),
    "at step 10, by sys.exit": ("", "if is_first_to_go and session.local_step == 10: sys.exit(0)"),
    "at step 10, without a goodbye": ("", "if is_first_to_go and session.local_step == 10: os._exit(0)"),
}


def leaving(how: str) -> str:
    before, within = LEAVES[how]
    head = f"import os, sys\nis_first_to_go = os.environ['LOCKSTEP_WORKER_INDEX'] == '1'\n{before}\n"
    return head + TRAIN.replace("        print(", f"        {within}\n        print(", 1)


@pytest.mark.parametrize("how", LEAVES)
def test_training_is_ended_when_a_worker_leaves_too_few_behind(tmp_path: Path, how: str) -> None:
    # The lease is long: nobody shall have to wait for its end.
    code, out = run_up("--workers", "2", "--lease", "300", "--max-steps", "50", worker=leaving(how), run_dir=tmp_path / "run")
    step = 0 if how == "before it joins" else 10
    assert code == 1, out
    assert "[lockstep] worker 1 ended with exit code 0 while 1 of 2 workers still run; a step needs 2" in out
    assert f"[lockstep] training ended early at step {step}: too few workers are left" in out
    assert f"[worker 0] value {-step / 2}" in out, "the worker that waited was released, and ended by itself"
    assert "training finished" not in out


def test_a_worker_that_leaves_within_the_backups_does_not_end_the_training(tmp_path: Path) -> None:
    arguments = ("--workers", "3", "--backup-workers", "1", "--max-steps", "50")
    # Nobody begins before all three have joined: two of them would be done before a slow third one comes.
    everybody = "    while sum(p.state == 'live' for p in session.status().participants) < 3: threading.Event().wait(0.01)\n"
    worker = "import threading\n" + leaving("at step 10").replace("    while not", f"{everybody}    while not", 1)
    code, out = run_up(*arguments, worker=worker, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "[worker 0] value -25.0" in out
    assert "[lockstep] training finished" in out


def test_a_released_worker_that_does_not_end_is_ended(tmp_path: Path) -> None:
    worker = f"{leaving('before it joins')}\n{IDLE}"
    with up("--workers", "2", worker=worker, run_dir=tmp_path / "run") as process:
        read_until(process, "idle")
        everybody = descendants(process)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 1, out
    assert "training ended early at step 0" in out
    assert are_gone(everybody)


def worker(index: int, *, is_waiting: bool, state: str = "live", seen_ago_s: float = 0.1) -> ParticipantStatus:
    return ParticipantStatus(
        kind=ParticipantKind.WORKER,
        index=index,
        incarnation=1,
        host="here",
        pid=101 + index,
        state=state,
        seen_ago_s=seen_ago_s,
        num_accepted=0,
        num_stale=0,
        num_late=0,
        is_waiting=is_waiting,
        failure="",
    )


def report(*workers: ParticipantStatus, num_contributions: int = 1, step: int = 10, required: int = 2) -> ClusterStatus:
    return ClusterStatus(
        cluster="digits",
        epoch=1,
        state=ClusterState.TRAINING,
        reason="",
        global_step=step,
        max_steps=None,
        policy="sync",
        replicas_to_aggregate=required,
        total_num_replicas=required,
        num_contributions=num_contributions,
        waiting_for="",
        step_age_s=100.0,
        participants=workers,
        shards=(),
        ledger=(),
        num_accepted=0,
        num_stale=0,
        num_late=0,
    )


def test_one_that_waits_alone_cannot_step() -> None:
    assert cannot_step(report(worker(0, is_waiting=True), worker(1, is_waiting=False, state="left")), gone_s={1: 3.0})


def test_one_that_computes_may_still_complete_the_step() -> None:
    both = worker(0, is_waiting=True), worker(1, is_waiting=False)
    assert not cannot_step(report(*both), gone_s={})
    assert cannot_step(report(*both, required=3), gone_s={})
    assert not cannot_step(report(*both, required=3, num_contributions=2), gone_s={})


def test_one_that_nobody_waits_for_is_left_alone() -> None:
    assert not cannot_step(report(worker(0, is_waiting=False), num_contributions=0), gone_s={1: 3.0})


def test_a_process_that_took_the_place_of_one_that_ended_counts() -> None:
    waits = worker(0, is_waiting=True)
    assert cannot_step(report(waits, worker(1, is_waiting=False, seen_ago_s=3.5)), gone_s={1: 3.0})
    assert not cannot_step(report(waits, worker(1, is_waiting=False, seen_ago_s=0.5)), gone_s={1: 3.0})


def test_training_that_is_finished_or_has_failed_stands_still_rightly() -> None:
    for state in (ClusterState.FINISHED, ClusterState.FAILED, ClusterState.WAITING_FOR_MODEL):
        assert not cannot_step(dataclasses.replace(report(worker(0, is_waiting=True)), state=state), gone_s={})


def test_a_standstill_is_one_only_after_the_grace_without_a_break() -> None:
    waits, goes_on = report(worker(0, is_waiting=True)), report(worker(0, is_waiting=False), step=10)
    standstill = Standstill()
    assert not standstill.see(waits, now=0.0, gone_s={})
    assert not standstill.see(waits, now=GRACE_S - 0.1, gone_s={})
    assert not standstill.see(goes_on, now=GRACE_S, gone_s={})
    assert not standstill.see(waits, now=GRACE_S + 1.0, gone_s={})
    later = dataclasses.replace(waits, global_step=11)
    assert not standstill.see(later, now=2 * GRACE_S + 1.0, gone_s={}), "a step was made meanwhile"
    assert standstill.see(later, now=3 * GRACE_S + 1.0, gone_s={})
