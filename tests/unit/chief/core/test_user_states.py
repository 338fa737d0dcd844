"""States of workers' programs: those of the step, in checkpoints, after a rollback, under another chief. No process, no clock."""

import pytest

from chief.core import messages as ev
from chief.options import CheckpointConfig
from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import ModelReply, ModelState, PushOutcome
from ps_protocol.roles.contribution import MAX_USER_STATE_BYTES, MAX_USER_STATES_BYTES, UserState
from tests.support.chief.chief_driver import Driver, Worker

EVERY_2 = CheckpointConfig(every_steps=2)


def step(driver: Driver, workers: list[Worker], *states: str) -> None:
    """All workers contribute, each with a state (empty: unchanged), and continue."""
    calls = [worker.ask(commit=worker.next_commit(user_state=state)) for worker, state in zip(workers, states, strict=True)]
    assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))


def state_of(driver: Driver, worker: Worker) -> str:
    """What a worker is told that joins."""
    reply = driver.answers[driver.ask_model(worker)]
    assert isinstance(reply, ModelReply)
    assert reply.state is ModelState.READY
    return reply.attached.user_state


def saved(driver: Driver, number: int) -> tuple[str, ...]:
    (checkpoint,) = (one for one in driver.storage.values() if one.step == number)
    return tuple(one.json for one in checkpoint.record.attached.user_states)


def test_each_checkpoint_has_the_states_of_its_own_step() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=CheckpointConfig(every_steps=1, keep=9))
    workers = driver.train(0, 1)
    for number in range(3):
        step(driver, workers, f"a{number}", f"b{number}" if number == 1 else "")
    assert [saved(driver, number) for number in range(4)] == [(), ("a0",), ("a1", "b1"), ("a2", "b1")]


def test_a_rollback_takes_the_states_back_with_the_step() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=EVERY_2)
    workers = driver.train(0, 1)
    for number in range(5):
        step(driver, workers, f"a{number}", f"b{number}")
    workers[0].ask(commit=workers[0].next_commit(user_state="a5"))
    driver.restart(1)
    assert driver.step == 4
    for worker, state in zip(workers, ("a3", "b3"), strict=True):
        driver.come_back(worker)
        assert state_of(driver, worker) == state
    step(driver, workers, "again", "")
    assert [state_of(driver, worker) for worker in workers] == ["again", "b3"]


def test_a_cluster_that_resumes_from_a_checkpoint_has_its_states() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    (worker,) = driver.train(0)
    for number in range(3):
        step(driver, [worker], f"a{number}")
    other = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2, storage=driver.storage)
    assert other.step == 2
    assert state_of(other, Worker(other, 0)) == "a1"


def test_a_replacement_has_the_user_state_of_the_lost_workers_last_counted_contribution() -> None:
    driver = Driver(total_num_replicas=2)
    workers = driver.train(0, 1)
    step(driver, workers, "a0", "b0")
    workers[0].ask(commit=workers[0].next_commit(user_state="a1"))
    successor = Worker(driver, 0, takeover=True)
    assert not successor.registration.may_contribute
    assert state_of(driver, successor) == "a1", "the batch of that contribution is not to be used again"
    assert state_of(driver, workers[1]) == "b0"


def test_a_contribution_that_does_not_count_leaves_the_state_as_it_was() -> None:
    driver = Driver(total_num_replicas=2, replicas_to_aggregate=1)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    assert workers[0].commit(user_state="a0").outcome is PushOutcome.ACCEPTED
    assert workers[1].commit(user_state="b0").outcome is PushOutcome.LATE
    driver.apply()
    assert [state_of(driver, worker) for worker in workers] == ["a0", ""]


def test_of_several_contributions_to_one_step_the_last_one_s_state_holds() -> None:
    driver = Driver.outlived(total_num_replicas=1, replicas_to_aggregate=2, checkpoints=EVERY_2)
    (worker,) = driver.train(0)
    for number in range(4):
        worker.ask(commit=worker.next_commit(user_state=f"a{number}"))
        worker.local_step = driver.step
    assert saved(driver, 2) == ("a3",)


@pytest.mark.parametrize("shards", [(0,), (1,), (0, 1)], ids=str)
def test_a_new_chief_has_the_states_of_a_step_that_the_shards_have_applied(shards: tuple[int, ...]) -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    step(driver, workers, "a0", "b0")
    step(driver, workers, "", "b1")
    driver.applies_at_once = False
    for worker, state in zip(workers, ("a2", ""), strict=True):
        worker.ask(commit=worker.next_commit(user_state=state))
    driver.apply_at(*shards)
    driver.new_chief()
    if len(shards) == 1:
        assert driver.to_apply[0].request.attached.user_states == (UserState(worker=0, json="a2"), UserState(worker=1, json="b1"))
        driver.apply()
    for worker, state in zip(workers, ("a2", "b1"), strict=True):
        driver.come_back(worker)
        assert state_of(driver, worker) == state


def test_chiefs_that_take_over_one_after_the_other_lose_no_state() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    step(driver, workers, "a0", "b0")
    for _ in range(3):
        driver.new_chief()
        for worker in workers:
            driver.come_back(worker)
        step(driver, workers, "", "")
        assert [state_of(driver, worker) for worker in workers] == ["a0", "b0"]


def test_a_new_chief_has_the_state_of_a_contribution_that_was_promised() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    call = workers[0].send_commit(user_state="a0")
    driver.pass_time(0.01)
    assert call in driver.answers, "it counts for good"
    driver.new_chief()
    assert state_of(driver, Worker(driver, 0, takeover=True)) == "a0"
    driver.come_back(workers[1])
    workers[1].send_commit()
    assert driver.to_apply[0].request.attached.user_states == (UserState(worker=0, json="a0"),)


def test_a_state_travels_with_steps_until_a_record_has_it() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    state = "a" * MAX_USER_STATE_BYTES
    step(driver, [worker], state)
    for _ in range(4):
        step(driver, [worker], "")
    assert [len(one.request.attached.user_states) for one in driver.applied] == [1, 1, 1, 0, 0]
    record = driver.shards[0].record
    assert record is not None
    assert record.attached.user_states == (UserState(worker=0, json=state),)
    driver.new_chief()
    driver.come_back(worker)
    assert state_of(driver, worker) == state


def test_without_user_states_steps_carry_none_and_no_record_is_kept() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    num_records = driver.shards[0].record_version
    for _ in range(3):
        step(driver, [worker], "")
    assert all(one.request.attached.user_states == () for one in driver.applied)
    assert driver.shards[0].record_version == num_records


def test_a_contribution_that_no_shard_has_brings_no_state() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    workers[0].ask(commit=workers[0].next_commit(user_state="a0"))
    forged = workers[1].next_commit(user_state="b0")
    workers[1].ask(commit=forged)
    told = driver.to_apply.pop()
    assert len(told.request.attached.user_states) == 2
    driver.done(told, ev.Lacking(missing=((0, forged.push_id), (1, forged.push_id))))
    assert driver.to_apply[-1].request.attached.user_states == (UserState(worker=0, json="a0"),)


def test_applied_on_arrival_the_answer_waits_until_another_chief_would_know_the_state() -> None:
    policy = PolicySpec(name=PolicyName.ASYNC, use_locking=False)
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None, policy=policy)
    (worker,) = driver.train(0)
    driver.is_manual = True
    call = worker.send_commit(user_state="a0", is_applied=True)
    assert call not in driver.answers
    driver.is_manual = False
    driver.work_off()
    assert call in driver.answers
    driver.new_chief()
    driver.come_back(worker)
    assert state_of(driver, worker) == "a0"


def test_a_state_of_characters_that_take_more_than_a_byte_is_refused() -> None:
    # Of 64 such workers it would be too much for one message: no step that has them could be applied.
    (worker,) = Driver(total_num_replicas=1).train(0)
    with pytest.raises(InvalidSpec, match="user_state: it has characters that are not ASCII"):
        worker.send_commit(user_state='"' + "\U0001f600" * (MAX_USER_STATE_BYTES - 2) + '"')
    worker.send_commit()


def test_states_that_are_too_large_are_refused_and_nothing_is_counted() -> None:
    driver = Driver(total_num_replicas=100)
    workers = driver.train(*range(66))
    driver.applies_at_once = False
    with pytest.raises(LimitExceeded, match="user_state: 65537 bytes, 65536 at most"):
        workers[0].send_commit(user_state="a" * (MAX_USER_STATE_BYTES + 1))
    most = MAX_USER_STATES_BYTES // MAX_USER_STATE_BYTES
    for worker in workers[:most]:
        worker.send_commit(user_state="a" * MAX_USER_STATE_BYTES)
    with pytest.raises(
        LimitExceeded, match="with the 1 bytes of worker 64, the states of all workers together have 4194305 bytes, 4194304"
    ):
        workers[most].send_commit(user_state="a")
    workers[most].send_commit()
