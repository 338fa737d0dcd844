"""The coordinator's rules one by one; whole situations are in test_coordinator_situations."""

import pytest

from chief import events as ev
from chief.coordination import CoordinationConfig
from ps_protocol.chief import (
    AgreedModel,
    ClusterState,
    CommitResult,
    ModelReply,
    ModelState,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    TokenResult,
)
from ps_protocol.errors import (
    InvalidSpec,
    LeaseExpired,
    ModelMismatch,
    NotInitialized,
    PushIdReused,
    StepAhead,
    Superseded,
    TrainingFailed,
)
from ps_protocol.shard import PushId
from tests.core.chief_driver import MODEL, Driver, Worker, model_of

ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


# -- options


@pytest.mark.parametrize("name", ["replicas_to_aggregate", "total_num_replicas", "max_steps"])
@pytest.mark.parametrize(
    ("value", "text"), [(0, "got 0, want >= 1"), (-3, "got -3, want >= 1"), (1.5, "got 1.5, want an"), (True, "got True")]
)
def test_counts_that_make_no_sense_are_refused_by_name(name: str, value: object, text: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{name}: {text}"):
        CoordinationConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("r", "t", "required", "extras"), [(None, None, 1, 0), (None, 3, 3, 0), (2, None, 2, 0), (3, 1, 3, 2), (2, 3, 2, 0)]
)
def test_counts_left_out_follow_from_each_other(r: int | None, t: int | None, required: int, extras: int) -> None:
    config = CoordinationConfig(replicas_to_aggregate=r, total_num_replicas=t)
    assert (config.num_required, config.num_extras) == (required, extras)


@pytest.mark.parametrize("lease_s", [0, -1, float("nan")])
def test_a_lease_that_makes_no_sense_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidSpec, match="lease: got"):
        CoordinationConfig(lease_s=lease_s)


# -- commits


def test_a_commit_completes_the_step_with_sorted_contributors() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, second = driver.train(0, 1)
    assert second.commit() == CommitResult(outcome=ACCEPTED, global_step=0)
    assert first.commit().outcome is ACCEPTED
    (applied,) = driver.applied
    assert (applied.epoch, applied.step, [push.worker for push in applied.contributors]) == (1, 0, [0, 1])
    assert driver.step == 1


def test_a_repeated_commit_has_its_effect_once_and_tells_the_first_outcome() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    push = first.next_push()
    assert first.commit(push_id=push).outcome is ACCEPTED
    assert first.commit(push_id=push) == CommitResult(outcome=DUPLICATE, global_step=0, first_outcome=ACCEPTED)
    assert driver.coordinator.status(driver.now).num_contributions == 1


def test_a_repeated_commit_is_recognised_after_its_step() -> None:
    driver = Driver(replicas_to_aggregate=1)
    (worker,) = driver.train(0)
    push = worker.next_push()
    worker.commit(push_id=push)
    assert worker.commit(step=0, push_id=push) == CommitResult(outcome=DUPLICATE, global_step=1, first_outcome=ACCEPTED)
    assert driver.coordinator.status(driver.now).num_accepted == 1


def test_a_push_id_for_another_step_is_refused() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    push = worker.next_push()
    worker.commit(push_id=push)
    with pytest.raises(PushIdReused, match="push 0/1/1 was for step 0, now for step 1"):
        worker.commit(step=1, push_id=push)


def test_a_push_id_that_was_passed_over_counts_for_nothing() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    abandoned = first.next_push()
    assert first.push() is ACCEPTED
    assert first.commit(push_id=abandoned).outcome is DUPLICATE
    assert driver.coordinator.status(driver.now).num_contributions == 1


def test_a_push_for_a_step_gone_by_is_stale_and_one_while_it_is_applied_is_late() -> None:
    driver = Driver(replicas_to_aggregate=1, applies_at_once=False)
    first, second, third = driver.train(0, 1, 2)
    assert first.push() is ACCEPTED
    assert second.push() is LATE
    driver.apply()
    assert third.push() is STALE
    status = driver.coordinator.status(driver.now, max_ledger_entries=1)
    assert (status.num_accepted, status.num_late, status.num_stale) == (1, 1, 1)
    assert (status.ledger[0].num_late, status.ledger[0].num_stale, status.ledger[0].last_worker) == (1, 1, 0)


def test_a_second_push_to_the_same_step_is_late_without_a_token() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    assert [first.push(), first.push()] == [ACCEPTED, LATE]


def test_a_push_that_a_shard_dropped_counts_as_stale() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    assert worker.commit(staged=False).outcome is STALE
    assert driver.applied == []


def test_a_push_ahead_of_the_cluster_is_refused_and_changes_nothing() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    push = worker.next_push()
    with pytest.raises(StepAhead, match="local_step 12 is ahead of global_step 0; read again"):
        worker.commit(step=12, push_id=push)
    assert worker.commit(step=0, push_id=push).outcome is ACCEPTED


@pytest.mark.parametrize("step", [-1, (1 << 62) + 1])
def test_a_step_that_no_cluster_can_have_is_refused(step: int) -> None:
    (worker,) = Driver().train(0)
    with pytest.raises(InvalidSpec, match="local_step"):
        worker.commit(step=step)


def test_a_push_id_of_somebody_else_is_refused() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, second = driver.train(0, 1)
    for push in (second.next_push(), PushId(worker=0, incarnation=2, sequence=1), PushId(worker=0, incarnation=1, sequence=0)):
        with pytest.raises(InvalidSpec, match=r"push id .* want worker 0, incarnation 1"):
            first.commit(push_id=push)


def test_a_push_before_initialisation_is_refused_in_words() -> None:
    driver = Driver()
    worker = Worker(driver)
    with pytest.raises(NotInitialized, match="no values yet: none of the 1 live workers has registered a model yet"):
        worker.commit()


def test_dedupe_memory_is_bounded() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    for step in range(200):
        worker.commit(step=step)
    outcomes = driver.coordinator._cluster.membership.check(worker.participant, now=driver.now).outcomes
    assert len(outcomes._recent) <= 16
    assert worker.commit(step=3, push_id=PushId(worker=0, incarnation=1, sequence=4)).outcome is DUPLICATE


# -- waiting for a token


def test_a_waiting_worker_is_told_after_its_slice_what_it_waits_for() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    call = first.ask(max_wait_s=2.0)
    driver.pass_time(1.9)
    assert call not in driver.answers
    driver.pass_time(0.2)
    reply = first.answer(call)
    assert (reply.result, reply.step) == (TokenResult.WAIT, 0)
    assert "missing: worker 1 (last seen 2.0 s ago" in reply.waiting_for
    assert second.heartbeat() is False


def test_no_slice_is_longer_than_twenty_seconds() -> None:
    driver = Driver(total_num_replicas=2, lease_s=100.0)
    first, _ = driver.train(0, 1)
    call = first.ask(max_wait_s=1e9)
    driver.pass_time(20.0)
    assert first.answer(call).result is TokenResult.WAIT


@pytest.mark.parametrize("max_wait_s", [0.0, -1.0, float("nan")])
def test_without_time_to_wait_the_answer_is_immediate(max_wait_s: float) -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    assert first.answer(first.ask(max_wait_s=max_wait_s)).result is TokenResult.WAIT


def test_all_who_wait_are_released_by_the_step() -> None:
    driver = Driver(total_num_replicas=3)
    workers = driver.train(0, 1, 2)
    calls = []
    for worker in workers:
        worker.push()
        calls.append(worker.ask())
    assert [worker.has_token(call) for worker, call in zip(workers, calls, strict=True)] == [True] * 3
    assert [worker.local_step for worker in workers] == [1, 1, 1]


def test_a_commit_that_rides_along_is_answered_with_the_token() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    call = worker.ask(commit=_commit(worker))
    assert call not in driver.answers
    driver.apply()
    reply = worker.answer(call)
    assert (reply.result, reply.step, reply.commit) == (TokenResult.TOKEN, 1, CommitResult(outcome=ACCEPTED, global_step=0))


def test_a_call_that_is_refused_has_not_counted_its_commit() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    first.local_step = 5
    with pytest.raises(StepAhead):
        first.ask(commit=_commit(first, step=0))
    assert driver.coordinator.status(driver.now).num_contributions == 0


def test_a_caller_that_goes_away_loses_no_token() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    call = worker.ask()
    driver.send(ev.CallCancelled(call=call))
    driver.apply()
    assert call not in driver.answers
    assert worker.has_token(worker.ask(repeat=True))
    assert worker.local_step == 1


def test_a_repeated_call_takes_the_place_of_the_lost_one() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    lost = first.ask()
    repeated = first.ask(repeat=True)
    assert first.answer(lost).result is TokenResult.WAIT
    second.push()
    assert first.has_token(repeated)


def test_observers_get_no_tokens_and_contribute_nothing() -> None:
    driver = Driver()
    driver.train(0)
    observer = Worker(driver, kind=ParticipantKind.OBSERVER)
    for attempt in (observer.ask, observer.commit, lambda: driver.ask_model(observer)):
        with pytest.raises(InvalidSpec, match="an observer cannot"):
            attempt()


# -- registration


def test_a_repeated_registration_gets_the_same_answer() -> None:
    driver = Driver()
    assert driver.register(request_id=42) == driver.register(request_id=42)
    assert len(driver.coordinator.status(driver.now).participants) == 1


def test_a_newcomer_learns_step_and_addresses() -> None:
    driver = Driver(num_shards=2, replicas_to_aggregate=1)
    (worker,) = driver.train(0)
    worker.push()
    registration = driver.register()
    assert registration.shard_addresses == ("host-p:5000", "host-p:5001")
    assert (registration.global_step, registration.may_contribute, registration.lease_s) == (1, True, 10.0)


def test_a_lease_lives_on_heartbeats_and_on_calls_and_ends_without() -> None:
    driver = Driver(lease_s=10.0)
    (worker,) = driver.train(0)
    for _ in range(3):
        driver.pass_time(9.0)
        assert worker.heartbeat() is False
    driver.pass_time(9.0)
    worker.push()
    driver.pass_time(9.9)
    assert driver.coordinator.status(driver.now).participants[0].state == "live"
    driver.pass_time(0.2)
    assert driver.coordinator.status(driver.now).participants[0].state == "lapsed"
    with pytest.raises(LeaseExpired, match="lease ended"):
        worker.heartbeat()


def test_a_blocked_call_does_not_keep_a_lease_alive_and_is_refused_when_it_ends() -> None:
    driver = Driver(total_num_replicas=2, lease_s=5.0)
    first, _ = driver.train(0, 1)
    call = first.ask()
    driver.pass_time(5.1)
    assert isinstance(first.error(call), LeaseExpired)


def test_a_superseded_worker_is_refused_in_its_blocked_call_and_ever_after() -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    call = first.ask()
    newer = Worker(driver, 0, takeover=True, pid=913)
    assert isinstance(first.error(call), Superseded)
    with pytest.raises(Superseded, match="replaced by incarnation 2 on host-b pid 913"):
        first.commit()
    with pytest.raises(Superseded):
        first.leave()
    assert newer.push() is ACCEPTED


def test_leaving_twice_is_leaving_once() -> None:
    driver = Driver()
    first, _ = driver.train(0, 1)
    first.leave()
    first.leave()
    assert driver.coordinator.state is ClusterState.TRAINING


# -- model


def test_the_waiting_workers_learn_when_the_model_is_ready() -> None:
    driver = Driver(num_shards=2)
    first, second = Worker(driver, 0), Worker(driver, 1)
    initialise, wait = driver.ask_model(first), driver.ask_model(second)
    know = driver.call()
    driver.send(ev.GetModel(call=know, max_wait_s=20.0))
    reply = driver.answers[initialise]
    assert (reply.state, reply.attempt, reply.max_staged_per_worker) == (ModelState.INITIALIZE, 1, 2)
    assert {wait, know}.isdisjoint(driver.answers)
    first.complete(1)
    assert driver.answers[wait] == ModelReply(
        state=ModelState.READY, placement=reply.placement, attempt=1, max_staged_per_worker=2, global_step=0
    )
    assert driver.answers[know] == AgreedModel(state=ModelState.READY, model=MODEL, placement=reply.placement, global_step=0)
    assert driver.coordinator.state is ClusterState.TRAINING


def test_a_worker_that_waits_for_the_model_is_told_for_whom() -> None:
    driver = Driver()
    first, second = Worker(driver, 0), Worker(driver, 1)
    driver.ask_model(first)
    call = driver.ask_model(second, max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[call].state is ModelState.WAIT
    assert driver.answers[call].waiting_for.startswith("worker 0 (last seen 2.0 s ago")


def test_the_next_waiting_worker_takes_over_when_the_initialiser_is_silent() -> None:
    driver = Driver(lease_s=10.0)
    first, second, third = Worker(driver, 0), Worker(driver, 1), Worker(driver, 2)
    driver.ask_model(first)
    driver.pass_time(5.0)
    taken_over, waiting = driver.ask_model(second), driver.ask_model(third)
    driver.pass_time(5.0)
    reply = driver.answers[taken_over]
    assert (reply.state, reply.attempt) == (ModelState.INITIALIZE, 2)
    assert waiting not in driver.answers
    second.complete(2)
    assert driver.answers[waiting].state is ModelState.READY


def test_a_replaced_initialiser_hands_over_too() -> None:
    driver = Driver()
    first, second = Worker(driver, 0), Worker(driver, 1)
    driver.ask_model(first)
    call = driver.ask_model(second)
    Worker(driver, 0, takeover=True)
    assert driver.answers[call].state is ModelState.INITIALIZE


def test_another_model_is_refused_also_while_one_waits() -> None:
    driver = Driver(adopt=False)
    first, second = Worker(driver, 0), Worker(driver, 1)
    agreed, other = driver.ask_model(first), driver.ask_model(second, model_of(4))
    assert {agreed, other}.isdisjoint(driver.answers)
    driver.send(ev.ShardAdopted(shard=0, process_incarnation=1))
    assert driver.answers[agreed].state is ModelState.INITIALIZE
    assert isinstance(driver.answers[other], ModelMismatch)


def test_while_shards_are_not_reached_workers_are_told_so() -> None:
    driver = Driver(adopt=False)
    worker = Worker(driver)
    call = driver.ask_model(worker, max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[call].state is ModelState.ABSENT
    assert "ps 0 at host-p:5000 unreachable for 2.0 s" in driver.answers[call].waiting_for


# -- the end


def test_finishing_releases_all_and_ends_the_processes_when_all_have_left() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    observer = Worker(driver, kind=ParticipantKind.OBSERVER)
    call = first.ask()
    finish = driver.call()
    driver.send(ev.FinishTraining(call=finish, reason="enough"))
    assert driver.answers[finish] == 0
    assert first.answer(call).result is TokenResult.FINISHED
    assert second.heartbeat() is True
    assert second.push() is LATE
    assert second.answer(second.ask()).result is TokenResult.FINISHED
    for participant in (first, second):
        participant.leave()
    assert driver.ended == []
    observer.leave()
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="enough")]


def test_the_last_step_finishes_training() -> None:
    driver = Driver(max_steps=2)
    (worker,) = driver.train(0)
    worker.push()
    assert worker.has_token(worker.ask())
    worker.push()
    reply = worker.answer(worker.ask())
    assert (reply.result, reply.step) == (TokenResult.FINISHED, 2)
    assert driver.coordinator.status(driver.now).reason == "max_steps 2 reached"


def test_finishing_while_a_step_is_applied_waits_for_it() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    finish = driver.call()
    driver.send(ev.FinishTraining(call=finish, reason=""))
    assert finish not in driver.answers
    driver.apply()
    assert driver.answers[finish] == 1
    assert driver.coordinator.state is ClusterState.FINISHED


def test_finishing_does_not_wait_long_for_a_step_that_cannot_be_applied() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    finish = driver.call()
    driver.send(ev.FinishTraining(call=finish, reason=""))
    driver.pass_time(1.0)
    assert driver.answers[finish] == 0
    driver.apply()
    assert driver.step == 1


def test_lapsed_participants_do_not_hold_up_the_end() -> None:
    driver = Driver(lease_s=10.0)
    driver.train(0)
    driver.send(ev.FinishTraining(call=None, reason="enough"))
    driver.pass_time(10.0)
    assert len(driver.ended) == 1


def test_training_is_finished_when_the_last_worker_leaves_in_peace() -> None:
    driver = Driver()
    first, second = driver.train(0, 1)
    first.leave()
    assert driver.coordinator.state is ClusterState.TRAINING
    second.leave()
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="all workers have left")]


def test_training_waits_for_a_replacement_when_the_last_worker_failed() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.leave(failure="boom")
    assert driver.coordinator.state is ClusterState.TRAINING
    assert "worker 0 (failed 0.0 s ago: boom" in driver.coordinator.explain(driver.now)
    assert Worker(driver, 0).push() is ACCEPTED


def test_a_worker_that_looks_in_and_leaves_before_there_is_a_model_ends_nothing() -> None:
    driver = Driver()
    Worker(driver).leave()
    assert driver.coordinator.state is ClusterState.WAITING_FOR_MODEL


def test_a_worker_woken_after_the_end_learns_that_training_is_finished() -> None:
    driver = Driver(lease_s=10.0)
    sleeper, _ = driver.train(0, 1)
    driver.pass_time(11.0)
    driver.send(ev.FinishTraining(call=None, reason="enough"))
    assert sleeper.answer(sleeper.ask()).result is TokenResult.FINISHED
    assert sleeper.heartbeat() is True


def test_nobody_joins_once_the_processes_end() -> None:
    driver = Driver()
    driver.send(ev.FinishTraining(call=None, reason="enough"))
    with pytest.raises(Exception, match="the chief is shutting down: enough"):
        driver.register()


# -- shards


def test_a_shard_that_lost_its_variables_fails_the_training_for_all() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    call = first.ask()
    driver.send(ev.ShardSeen(shard=0, process_incarnation=8))
    text = r"ps 0 at host-p:5000 was restarted and has lost its variables \(global_step 0\)"
    assert isinstance(first.error(call), TrainingFailed)
    for attempt in (first.heartbeat, first.commit, first.ask, driver.register, lambda: driver.ask_model(second)):
        with pytest.raises(TrainingFailed, match=text):
            attempt()
    assert driver.coordinator.status(driver.now).state is ClusterState.FAILED
    first.leave()
    second.leave()
    assert [end.exit_code for end in driver.ended] == [1]


def test_a_shard_restarted_before_there_is_a_model_is_adopted_again() -> None:
    driver = Driver(num_shards=2)
    driver.send(ev.ShardSeen(shard=1, process_incarnation=8))
    assert driver.adoptions == [1]
    assert driver.coordinator.explain(driver.now).startswith("1 of 2 parameter servers not reached yet: ps 1")
    driver.send(ev.ShardAdopted(shard=1, process_incarnation=8))
    assert driver.coordinator.state is ClusterState.WAITING_FOR_MODEL


def test_a_shard_that_refuses_a_step_fails_the_training_with_its_words() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    call = worker.ask(commit=_commit(worker))
    driver.send(ev.ShardFailed(shard=0, why="push 0/1/1 is not staged"))
    assert str(worker.error(call)) == "ps 0 at host-p:5000: push 0/1/1 is not staged"


def test_a_step_reported_twice_is_applied_once() -> None:
    driver = Driver(replicas_to_aggregate=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(ev.StepApplied(step=0))
    driver.send(ev.StepApplied(step=1))
    assert driver.step == 1


def _commit(worker: Worker, *, step: int | None = None) -> PushCommit:
    return PushCommit(push_id=worker.next_push(), step=worker.local_step if step is None else step, staged=True)
