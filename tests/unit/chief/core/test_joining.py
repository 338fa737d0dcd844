"""Joining of workers and observers, and their agreement on a model. A chief admits nobody before it knows its predecessors."""

from dataclasses import replace

import pytest

from chief.core import messages
from chief.core import messages as ev
from ps_protocol.errors import (
    LeaseExpired,
    ModelMismatch,
    Superseded,
    Unavailable,
)
from ps_protocol.roles.chief import (
    AgreedModel,
    ClusterState,
    GetModelRequest,
    ModelReply,
    ModelState,
    ParticipantKind,
    PushOutcome,
    RegisterRequest,
    Registration,
    SaveCheckpointRequest,
)
from tests.support.chief.chief_driver import MODEL, Driver, Worker, model_of
from tests.support.chief.eras import era

# How workers and observers come in, and how they agree on a model.


ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


# -- registration


def test_the_status_says_how_a_workers_gradients_travel_once_the_worker_has_reported_it() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0)
    assert driver.coordinator.status(driver.now).participants[0].transport == ""
    worker.heartbeat("shared_memory", "grpc")
    assert driver.coordinator.status(driver.now).participants[0].transport == "grpc, shared_memory"


def test_the_transports_that_a_worker_reports_are_bounded_in_length() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.heartbeat(*(f"{number}\x1b[2J{'x' * 1000}" for number in range(1000)))
    said = driver.coordinator.status(driver.now).participants[0].transport
    assert len(said) < 2000 and said.isprintable()


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
    assert driver.coordinator.cluster.state is ClusterState.TRAINING


# -- model


def test_the_waiting_workers_learn_when_the_model_is_ready() -> None:
    driver = Driver(num_shards=2)
    first, second = Worker(driver, 0), Worker(driver, 1)
    initialise, wait = driver.ask_model(first), driver.ask_model(second)
    know = driver.call()
    driver.send(ev.Asked(call=know, request=GetModelRequest(max_wait_s=20.0)))
    reply = driver.answers[initialise]
    assert (reply.state, reply.attempt, reply.max_staged_per_worker) == (ModelState.INITIALIZE, 1, 3)
    assert {wait, know}.isdisjoint(driver.answers)
    first.complete(1)
    assert driver.answers[wait] == ModelReply(
        state=ModelState.READY, placement=reply.placement, attempt=1, max_staged_per_worker=3, global_step=0
    )
    assert driver.answers[know] == AgreedModel(state=ModelState.READY, model=MODEL, placement=reply.placement, global_step=0)
    assert driver.coordinator.cluster.state is ClusterState.TRAINING


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
    driver.is_manual = True
    driver.send(ev.ShardSeen(shard=0, process_incarnation=1))


def test_another_model_is_refused_also_while_a_worker_waits_to_initialise() -> None:
    driver = Driver()
    restart(driver)
    first, second = Worker(driver, 0), Worker(driver, 1)
    agreed, other = driver.ask_model(first), driver.ask_model(second, model_of(4))
    assert {agreed, other}.isdisjoint(driver.answers)
    driver.is_manual = False
    driver.work_off()
    assert driver.answers[agreed].state is ModelState.INITIALIZE
    assert isinstance(driver.answers[other], ModelMismatch)


def test_while_shards_are_not_reached_workers_wait_with_that_explanation() -> None:
    driver = Driver()
    restart(driver)
    call = driver.ask_model(Worker(driver), max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[call].state is ModelState.ABSENT
    assert "for ps 0. Start what is missing, or check addresses. (ps 0: host-p:5000)" in driver.answers[call].waiting_for


# Nobody is taken in before the chief knows which chiefs there were before it, since a number might be another's.


def arrival(driver: Driver, index: int) -> int:
    """Somebody wants to take part; returns the call."""
    call = driver.call()
    request = RegisterRequest(kind=ParticipantKind.WORKER, index=index, host="host-b", pid=4242, request_id=1000 + call)
    driver.send(messages.Asked(call=call, request=request))
    return call


def test_no_worker_is_admitted_before_the_chief_knows_the_earlier_ones_and_none_gets_anothers_number() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    for worker in workers:
        worker.push()
    fresh = Driver.outlived(total_num_replicas=2, checkpoints=None, begin=False)
    fresh.shards = driver.shards
    call = arrival(fresh, 0)
    assert call not in fresh.answers, "it could not know which number is free"
    fresh.begin()
    registration = fresh.answers[call]
    assert isinstance(registration, Registration)
    assert registration.participant.incarnation > workers[0].participant.incarnation


def test_a_worker_that_arrives_before_the_parameter_servers_are_found_learns_what_it_waits_for() -> None:
    fresh = Driver.outlived(total_num_replicas=2, checkpoints=None, begin=False)
    fresh.send(messages.ShardUnreachable(shard=1, why="connection refused"))
    call, gone = arrival(fresh, 0), arrival(fresh, 1)
    fresh.send(messages.CallCancelled(call=gone))
    fresh.pass_time(1.5)
    assert isinstance(fresh.answers[call], Unavailable), "so that it asks again"
    assert "ps 1: host-p:5001" in str(fresh.answers[call])
    fresh.begin()
    assert gone not in fresh.answers
    assert fresh.register(0).participant.incarnation == 1


def test_no_participant_is_admitted_before_all_servers_know_the_chief() -> None:
    """Were it lost before that, the next one would have its number, and give the same ones."""
    fresh = Driver.outlived(num_shards=2, total_num_replicas=2, checkpoints=None, begin=False)
    fresh.is_manual = True
    fresh.begin()
    call = arrival(fresh, 0)
    assert call not in fresh.answers
    fresh.is_manual = False
    fresh.work_off()
    assert isinstance(fresh.answers[call], Registration)


def test_a_worker_that_arrives_before_a_checkpoint_is_found_is_numbered_above_all_in_the_checkpoint() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.Asked(call=None, request=SaveCheckpointRequest(request_id=1, max_wait_s=0.0)))
    again = Driver.outlived(total_num_replicas=1, storage=driver.storage, begin=False)
    again.is_manual = True
    again.begin()
    call = arrival(again, 0)
    assert call not in again.answers
    again.is_manual = False
    again.work_off()
    registration = again.answers[call]
    assert isinstance(registration, Registration)
    assert registration.chief_incarnation == 2
    assert registration.participant.incarnation == (1 << 20) + 1


def test_a_chief_that_takes_a_higher_number_later_refuses_workers_that_it_admitted_before() -> None:
    """The newest checkpoint is damaged, and the older one is of a chief with a higher number than this one has by then."""
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.Asked(call=None, request=SaveCheckpointRequest(request_id=1, max_wait_s=0.0)))
    tags = sorted(driver.storage)
    driver.storage[tags[0]] = replace(driver.storage[tags[0]], fence=replace(driver.storage[tags[0]].fence, chief_incarnation=5))
    again = Driver.outlived(total_num_replicas=1, storage=driver.storage, begin=False)
    again.damaged, again.is_manual = {tags[-1]}, True
    again.begin()
    for _ in range(2):
        again.do(again.orders.pop(0))
    early = Worker(again, 0, pid=4242)
    again.is_manual = False
    again.work_off()
    assert again.coordinator.cluster.members.chief_incarnation == 6
    assert again.come_back(early, pid=4242).participant.incarnation == (5 << 20) + 1


def test_a_chief_that_knows_nothing_yet_names_no_epoch_that_it_has_made_up() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    fresh = Driver.outlived(total_num_replicas=1, checkpoints=None, begin=False)
    worker.driver = fresh
    worker.participant = replace(worker.participant, era=era(7, life=worker.participant.era.life))
    with pytest.raises(LeaseExpired, match="not registered here"):
        worker.heartbeat()
