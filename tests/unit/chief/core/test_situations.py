"""Whole distributed situations on the coordinator alone: processes die, and training continues or reports why it does not."""

import pytest

from chief.core.state import Cluster
from ps_protocol.roles.chief import ClusterState, PushOutcome, TokenReply, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED, LATE, STALE = PushOutcome.ACCEPTED, PushOutcome.LATE, PushOutcome.STALE


def play_round(workers: list[Worker]) -> list[PushOutcome]:
    """Each worker pushes for its step and waits for its token; the workers whose token came have it afterwards."""
    outcomes, calls = [], []
    for worker in workers:
        outcomes.append(worker.push())
        calls.append(worker.ask())
    for worker, call in zip(workers, calls, strict=True):
        worker.has_token(call)
    return outcomes


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_with_one_of_three_killed_twenty_updates_of_two_take_twenty_rounds_without_a_stale_token(killed: int) -> None:
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=3, lease_s=1000.0)
    workers = driver.train(0, 1, 2)
    del workers[killed]
    for number in range(20):
        assert [worker.local_step for worker in workers] == [number, number]
        assert play_round(workers) == [ACCEPTED, ACCEPTED]
    assert driver.step == 20
    assert driver.coordinator.status(driver.now).num_stale == 0


def test_with_one_of_two_workers_dead_the_wait_names_it_and_a_replacement_continues() -> None:
    driver = Driver(total_num_replicas=2, lease_s=10.0)
    alive, dead = driver.train(0, 1)
    for _ in range(3):
        play_round([alive, dead])
    alive.push()
    call = alive.ask()
    for _ in range(5):
        driver.pass_time(3.0)
        alive.heartbeat()
    assert alive.push() is LATE, "nobody else fills in"
    driver.pass_time(5.0)
    assert "step 3 has 1 of 2 contributions; last seen: worker 1 20.0 s ago" in alive.answer(call).waiting_for
    call = alive.ask(repeat=True)
    replacement = Worker(driver, 1)
    assert (replacement.local_step, replacement.registration.may_contribute) == (3, True)
    assert replacement.push() is ACCEPTED
    assert alive.has_token(call)
    assert alive.local_step == 4


def test_a_replacement_of_a_worker_that_had_contributed_waits_for_the_next_step() -> None:
    driver = Driver(total_num_replicas=2)
    slow, dead = driver.train(0, 1)
    dead.push()
    replacement = Worker(driver, 1, takeover=True)
    assert not replacement.registration.may_contribute
    assert replacement.push() is LATE
    call = replacement.ask()
    slow.push()
    assert replacement.has_token(call)
    assert driver.applied[0].request.contributors == tuple(PushId(worker=worker, incarnation=1, sequence=1) for worker in (0, 1)), (
        "what the dead one gave stays counted"
    )


def test_one_worker_makes_three_minibatches_a_step() -> None:
    driver = Driver(replicas_to_aggregate=3, total_num_replicas=1)
    (worker,) = driver.train(0)
    for number in range(12):
        assert worker.push() is ACCEPTED
        assert worker.has_token(worker.ask())
        assert worker.local_step == (number + 1) // 3
    assert driver.step == 4
    assert [len(step.request.contributors) for step in driver.applied] == [3] * 4


def test_two_workers_share_the_third_minibatch_of_each_step() -> None:
    driver = Driver(replicas_to_aggregate=3, total_num_replicas=2)
    first, second = driver.train(0, 1)
    for number in range(10):
        quick, slow = (first, second) if number % 2 else (second, first)
        assert quick.push() is ACCEPTED
        assert quick.has_token(quick.ask()), "the extra token goes to who asks first"
        assert slow.push() is ACCEPTED
        waiting = slow.ask()
        assert quick.push() is ACCEPTED
        assert quick.has_token(quick.ask())
        assert slow.has_token(waiting)
    assert driver.step == 10


@pytest.mark.parametrize("how", ["leaves", "fails", "is replaced", "falls silent"])
def test_the_extra_token_comes_back_however_its_holder_goes(how: str) -> None:
    driver = Driver(replicas_to_aggregate=3, total_num_replicas=2, lease_s=10.0)
    gone, alive = driver.train(0, 1)
    gone.push()
    assert gone.has_token(gone.ask())
    alive.push()
    call = alive.ask()
    if how == "is replaced":
        Worker(driver, 0, takeover=True)
    elif how == "falls silent":
        driver.pass_time(9.9)
        alive.heartbeat()
        assert call not in driver.answers
        driver.pass_time(0.2)
    else:
        gone.leave(failure="boom" if how == "fails" else "")
    assert alive.has_token(call)


def test_a_replacement_may_take_an_extra_token_for_a_step_that_its_index_has_contributed_to() -> None:
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=1)
    (dead,) = driver.train(0)
    dead.push()
    replacement = Worker(driver, 0, takeover=True)
    assert not replacement.registration.may_contribute
    assert replacement.has_token(replacement.ask())
    assert replacement.push() is ACCEPTED
    assert driver.step == 1


def test_workers_may_come_and_go_where_no_number_is_given() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, second = driver.train(0, 1)
    play_round([first, second])
    first.leave()
    third = Worker(driver)
    assert third.index == 0, "the free index"
    assert play_round([second, third]) == [ACCEPTED, ACCEPTED]
    assert driver.step == 2


def test_a_worker_killed_long_before_the_others_were_done_does_not_hold_up_the_end() -> None:
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=3, lease_s=10.0)
    first, second, _killed = driver.train(0, 1, 2)
    driver.pass_time(4.0)
    play_round([first, second])
    first.leave()
    second.leave()
    assert driver.coordinator.cluster.state is ClusterState.TRAINING, "the third may still come"
    driver.pass_time(6.0)
    assert [end.exit_code for end in driver.ended] == [0]


def test_a_thousand_waiting_workers_are_all_released_by_one_event() -> None:
    driver = Driver(total_num_replicas=1000, applies_at_once=False, lease_s=1000.0)
    workers = driver.train(*range(1000))
    calls = []
    for worker in workers:
        worker.push()
        calls.append(worker.ask())
    driver.apply()
    assert all(worker.answer(call).result is TokenResult.TOKEN for worker, call in zip(workers, calls, strict=True))


def test_a_thousand_callers_whose_time_is_up_do_not_cost_a_thousand_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(total_num_replicas=1000, lease_s=1000.0)
    workers = driver.train(*range(1000))
    for worker in workers[1:]:
        worker.push()
        worker.ask(max_wait_s=2.0)
        driver.pass_time(0.0001)
    explained = []

    def explain(cluster: Cluster, *, now: float) -> str:
        explained.append(now)
        return "worker 0"

    monkeypatch.setattr("chief.core.state.explain", explain)
    driver.pass_time(3.0)
    replies = [reply for reply in driver.answers.values() if isinstance(reply, TokenReply) and reply.result is TokenResult.WAIT]
    assert (len(replies), {reply.waiting_for for reply in replies}, len(explained)) == (999, {"worker 0"}, 1)
