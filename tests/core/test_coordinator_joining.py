"""How workers and observers come in, and how they agree on a model."""

import pytest

from chief.core import messages as ev
from ps_protocol.errors import (
    LeaseExpired,
    ModelMismatch,
    Superseded,
)
from ps_protocol.roles.chief import AgreedModel, ClusterState, ModelReply, ModelState, PushOutcome
from tests.core.chief_driver import MODEL, Driver, Worker, model_of

ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


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
    assert (reply.state, reply.attempt, reply.max_staged_per_worker) == (ModelState.INITIALIZE, 1, 3)
    assert {wait, know}.isdisjoint(driver.answers)
    first.complete(1)
    assert driver.answers[wait] == ModelReply(
        state=ModelState.READY, placement=reply.placement, attempt=1, max_staged_per_worker=3, global_step=0
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


def restart(driver: Driver) -> None:
    """The only server is another process, which does not obey the chief yet."""
    driver.send(ev.ShardSeen(shard=0, process_incarnation=1))


def test_another_model_is_refused_also_while_one_waits() -> None:
    driver = Driver()
    first, second = Worker(driver, 0), Worker(driver, 1)
    restart(driver)
    agreed, other = driver.ask_model(first), driver.ask_model(second, model_of(4))
    assert {agreed, other}.isdisjoint(driver.answers)
    driver.send(ev.ShardAdopted(shard=0, process_incarnation=1))
    assert driver.answers[agreed].state is ModelState.INITIALIZE
    assert isinstance(driver.answers[other], ModelMismatch)


def test_while_shards_are_not_reached_workers_are_told_so() -> None:
    driver = Driver()
    worker = Worker(driver)
    restart(driver)
    call = driver.ask_model(worker, max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[call].state is ModelState.ABSENT
    assert "ps 0 at host-p:5000 unreachable for 2.0 s" in driver.answers[call].waiting_for
