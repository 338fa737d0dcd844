"""Secrets of participants: only their holders may call in their name. Also the possible incarnations and sequences."""

import dataclasses
from typing import Any

import pytest

from chief.options import CheckpointConfig
from ps_protocol.errors import InvalidSpec, LeaseExpired, Superseded, WorkerIndexTaken
from ps_protocol.model.data import DataSpec
from ps_protocol.roles.chief import (
    CommitPushRequest,
    DeregisterRequest,
    HeartbeatRequest,
    LeaseRangesRequest,
    Participant,
    ParticipantKind,
    PushOutcome,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import session_secret
from ps_protocol.roles.request import Request
from tests.support.chief.chief_driver import KEY, Driver, Worker


def stranger(participant: Participant) -> Participant:
    """Somebody who knows of a participant what the status says."""
    return dataclasses.replace(participant, secret=0)


def test_each_incarnation_has_a_secret_of_its_own_that_servers_with_the_key_can_make() -> None:
    driver = Driver()
    first, second = driver.register(0).participant, driver.register(1).participant
    again = driver.register(0, takeover=True).participant
    assert len({first.secret, second.secret, again.secret}) == 3
    assert again.secret == session_secret(KEY, name="worker 0", incarnation=again.incarnation)


def test_no_text_shows_a_secret() -> None:
    participant = Driver().register(0).participant
    assert str(participant.secret) not in repr(participant)


def test_no_other_caller_can_commit_take_tokens_or_data_renew_the_lease_or_leave_in_a_workers_name() -> None:
    driver = Driver(total_num_replicas=2)
    worker, _ = driver.train(0, 1)
    them = stranger(worker.participant)
    attempts: list[Request[Any]] = [
        CommitPushRequest(participant=them, commit=worker.next_commit(push_id=PushId(worker=0, incarnation=1, sequence=1 << 63))),
        HeartbeatRequest(participant=them),
        DeregisterRequest(participant=them),
        LeaseRangesRequest(participant=them, data=DataSpec(name="d", num_samples=1, range_size=1), max_ranges=1, request_id=1),
    ]
    for request in attempts:
        with pytest.raises(LeaseExpired, match=r"worker 0 \(incarnation 1\) is registered to another caller"):
            driver.ask(request)
    worker.participant, mine = them, worker.participant
    with pytest.raises(LeaseExpired):
        worker.ask(commit=worker.next_commit())
    worker.participant = mine
    assert worker.commit().outcome is PushOutcome.ACCEPTED


def test_no_other_process_can_come_back_as_a_live_worker() -> None:
    driver = Driver()
    former = driver.register(0, host="a", pid=1).participant
    with pytest.raises(WorkerIndexTaken):
        driver.register(0, host="a", pid=1, former=stranger(former))
    assert driver.register(0, host="a", pid=1, former=former).participant == former


def test_no_other_process_can_come_back_as_an_observer() -> None:
    driver = Driver()
    former = driver.register(kind=ParticipantKind.OBSERVER).participant
    with pytest.raises(LeaseExpired, match="observer 0"):
        driver.ask(HeartbeatRequest(participant=stranger(former)))


def test_a_worker_keeps_its_secret_under_the_next_chief() -> None:
    driver = Driver.outlived()
    worker = driver.train(0)[0]
    worker.commit()
    driver.new_chief()
    registration = driver.register(0, former=worker.participant)
    assert registration.participant == worker.participant
    assert registration.participant.secret == worker.participant.secret
    assert driver.coordinator.cluster.members.chief_incarnation == 2


def test_no_other_process_comes_back_to_the_next_chief_as_a_worker_that_an_earlier_one_had_admitted() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.commit()
    second.commit()
    driver.new_chief()
    attacker = driver.register(0, former=stranger(first.participant), host="elsewhere")
    assert attacker.participant.incarnation > first.participant.incarnation
    assert driver.come_back(second).participant == second.participant
    # Not what the worker has pushed, but of its own number only: the name is part of the commit.
    first.participant, mine = attacker.participant, first.participant
    with pytest.raises(InvalidSpec, match="want worker 0, incarnation"):
        first.send_commit(push_id=PushId(worker=0, incarnation=mine.incarnation, sequence=2))


def test_a_worker_comes_back_though_every_server_that_knew_the_key_of_its_secret_is_lost() -> None:
    driver = Driver.outlived(checkpoints=CheckpointConfig(every_steps=1))
    worker = driver.train(0)[0]
    worker.commit()
    for shard in driver.shards:
        shard.session_keys = ()
    driver.new_chief()
    lost = worker.participant.secret
    participant = driver.come_back(worker).participant
    assert participant.incarnation == 1
    assert participant.secret != lost, "no server would believe it"


def test_worker_keeps_its_place_under_several_chiefs_in_a_row() -> None:
    driver = Driver.outlived()
    worker = driver.train(0)[0]
    for _ in range(3):
        worker.commit()
        driver.new_chief()
        assert driver.come_back(worker).participant == worker.participant


def test_no_worker_commits_another_workers_push() -> None:
    driver = Driver(total_num_replicas=2)
    worker, other = driver.train(0, 1)
    with pytest.raises(InvalidSpec, match="want worker 1, incarnation 1"):
        other.send_commit(push_id=PushId(worker=0, incarnation=worker.participant.incarnation, sequence=1))
    assert worker.commit().outcome is PushOutcome.ACCEPTED


def test_the_next_chief_admits_no_process_beside_the_worker_that_came_back() -> None:
    driver = Driver.outlived()
    worker = driver.train(0)[0]
    worker.commit()
    driver.new_chief()
    driver.register(0, former=worker.participant)
    with pytest.raises(WorkerIndexTaken):
        driver.register(0, former=stranger(worker.participant))


def test_a_worker_whose_secret_no_parameter_server_knows_any_more_gets_another() -> None:
    driver = Driver.outlived()
    worker = driver.train(0)[0]
    lost = session_secret(b"lost", name="worker 0", incarnation=worker.participant.incarnation)
    driver.new_chief()
    found = driver.register(0, former=dataclasses.replace(worker.participant, secret=lost)).participant
    assert found.secret == session_secret(driver.session_key, name="worker 0", incarnation=found.incarnation)


def test_an_incarnation_that_a_caller_names_does_not_raise_the_next_one() -> None:
    driver = Driver.outlived()
    named = Participant(era=driver.register(0).participant.era, kind=ParticipantKind.WORKER, index=1, incarnation=(1 << 20) - 1)
    assert driver.register(1, former=named, host="elsewhere").participant.incarnation == 1


def test_a_new_incarnation_differs_from_the_one_that_its_caller_had_elsewhere() -> None:
    driver = Driver()
    former = driver.register(0).participant
    life = former.era._replace(life=former.era.life + 1)
    elsewhere = dataclasses.replace(former, era=life, index=1, incarnation=1)
    assert driver.register(1, former=elsewhere, host="elsewhere").participant.incarnation == 2


def test_a_sequence_far_ahead_is_refused_and_hides_nothing_that_follows() -> None:
    driver = Driver(total_num_replicas=2)
    worker, other = driver.train(0, 1)
    worker.commit()
    for sequence in (1 << 63, (1 << 20) + 2):
        with pytest.raises(
            InvalidSpec, match=f"sequence {sequence} after 1, want at most 1048577; number contributions one after the other"
        ):
            worker.send_commit(push_id=PushId(worker=0, incarnation=1, sequence=sequence))
    other.commit()
    worker.local_step = other.local_step = 1
    assert worker.commit().outcome is PushOutcome.ACCEPTED


def test_a_first_sequence_may_be_that_of_a_long_training_and_no_more() -> None:
    driver = Driver()
    worker = driver.train(0)[0]
    with pytest.raises(InvalidSpec):
        worker.send_commit(push_id=PushId(worker=0, incarnation=1, sequence=1 << 63))
    assert worker.commit(push_id=PushId(worker=0, incarnation=1, sequence=1 << 40)).outcome is PushOutcome.ACCEPTED


def test_a_worker_that_took_a_place_over_is_its_only_holder() -> None:
    driver = Driver()
    former = Worker(driver, 0)
    Worker(driver, 0, takeover=True)
    with pytest.raises(Superseded):
        former.heartbeat()
