"""Standstill: the waiting workers can never step, since the workers that they wait for have ended."""

import dataclasses

from lockstep.launcher.watch import GRACE_S, Standstill, cannot_step
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantStatus
from tests.support.chief.cluster_status import cluster_status, worker_status


def report(*workers: ParticipantStatus, num_contributions: int = 1, step: int = 10, required: int = 2) -> ClusterStatus:
    return cluster_status(
        *workers, num_contributions=num_contributions, global_step=step, replicas_to_aggregate=required, total_num_replicas=required
    )


def test_a_worker_that_waits_without_the_lost_one_stands_still() -> None:
    assert cannot_step(report(worker_status(0, is_waiting=True), worker_status(1, is_waiting=False, state="left")), gone_s={1: 3.0})


def test_a_worker_that_computes_may_still_complete_the_step() -> None:
    both = worker_status(0, is_waiting=True), worker_status(1, is_waiting=False)
    assert not cannot_step(report(*both), gone_s={})
    assert cannot_step(report(*both, required=3), gone_s={})
    assert not cannot_step(report(*both, required=3, num_contributions=2), gone_s={})


def test_a_lost_worker_that_no_other_waits_for_is_no_standstill() -> None:
    assert not cannot_step(report(worker_status(0, is_waiting=False), num_contributions=0), gone_s={1: 3.0})


def test_a_process_that_took_the_place_of_one_that_ended_counts() -> None:
    waits = worker_status(0, is_waiting=True)
    assert cannot_step(report(waits, worker_status(1, is_waiting=False, seen_ago_s=3.5)), gone_s={1: 3.0})
    assert not cannot_step(report(waits, worker_status(1, is_waiting=False, seen_ago_s=0.5)), gone_s={1: 3.0})


def test_a_training_that_is_finished_or_failed_is_no_standstill() -> None:
    for state in (ClusterState.FINISHED, ClusterState.FAILED, ClusterState.WAITING_FOR_MODEL):
        assert not cannot_step(dataclasses.replace(report(worker_status(0, is_waiting=True)), state=state), gone_s={})


def test_a_standstill_is_one_only_after_the_grace_without_a_break() -> None:
    waits, goes_on = report(worker_status(0, is_waiting=True)), report(worker_status(0, is_waiting=False), step=10)
    standstill = Standstill()
    assert not standstill.see(waits, now=0.0, gone_s={})
    assert not standstill.see(waits, now=GRACE_S - 0.1, gone_s={})
    assert not standstill.see(goes_on, now=GRACE_S, gone_s={})
    assert not standstill.see(waits, now=GRACE_S + 1.0, gone_s={})
    later = dataclasses.replace(waits, global_step=11)
    assert not standstill.see(later, now=2 * GRACE_S + 1.0, gone_s={}), "a step was made meanwhile"
    assert standstill.see(later, now=3 * GRACE_S + 1.0, gone_s={})
