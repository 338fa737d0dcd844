"""A new life after the loss of everything: numbers begin again, no participant is mistaken for an earlier one, no earlier answer holds."""

from dataclasses import replace
from typing import Any

import pytest

from chief.core import messages
from chief.options import CheckpointConfig
from ps_protocol.errors import EpochMismatch, Superseded, WorkerIndexTaken
from ps_protocol.model.data import DataSpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, HeartbeatRequest, Participant, PushCommit, PushOutcome
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import session_secret
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.chief.eras import era

SAVED = {"checkpoints": CheckpointConfig(every_steps=2)}
DATA = DataSpec(name="train", num_samples=12, range_size=1)
UNSAVED: dict[str, Any] = {"checkpoints": None}


def trained(num_steps: int = 3, **config: Any) -> tuple[Driver, list[Worker]]:
    driver = Driver.outlived(total_num_replicas=2, **config)
    workers = driver.train(0, 1)
    train(workers, num_steps)
    return driver, workers


def train(workers: list[Worker], num_steps: int) -> None:
    for _ in range(num_steps):
        calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
        assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))


def lose_all(driver: Driver) -> None:
    """Chief and servers are gone, and others are started in their places; workers live."""
    for shard in range(len(driver.shards)):
        driver.kill(shard)
    driver.new_chief()


def life_of(driver: Driver) -> int:
    (life,) = {shard.life for shard in driver.shards}
    return life


def numbers(participant: Participant) -> tuple[int, int]:
    return participant.era.epoch, participant.incarnation


def test_a_life_continues_under_another_chief_and_through_a_rollback() -> None:
    driver, workers = trained(5, **SAVED)
    life, before = life_of(driver), workers[0].participant
    assert before.era.life == life != 0
    driver.new_chief()
    assert driver.come_back(workers[0]).participant == before
    driver.restart(0)
    assert driver.come_back(workers[0]).participant == replace(before, era=era(2, life=before.era.life))


def test_a_life_continues_while_one_of_its_servers_is_left() -> None:
    driver, workers = trained(5, **SAVED)
    life = life_of(driver)
    driver.kill(1)
    driver.new_chief()
    assert life_of(driver) == life
    assert driver.come_back(workers[0]).participant.incarnation == workers[1].participant.incarnation


def test_a_cluster_of_which_nothing_is_left_has_another_life_and_the_same_numbers() -> None:
    driver, workers = trained(**UNSAVED)
    before = workers[0].participant
    lose_all(driver)
    newcomer = Worker(driver, 0)
    assert numbers(newcomer.participant) == numbers(before), "else this shows nothing"
    assert newcomer.participant.era.life == life_of(driver) != before.era.life


def test_a_participant_of_a_lost_life_is_not_served_as_the_present_holder_of_its_numbers() -> None:
    driver, workers = trained(**UNSAVED)
    lose_all(driver)
    driver.train(0, 1)
    survivor = workers[0]
    for act in (survivor.heartbeat, survivor.push, survivor.ask, survivor.leave):
        with pytest.raises(EpochMismatch, match=r"the cluster that you have joined was lost as a whole; it has begun again in epoch 1"):
            act()
    with pytest.raises(WorkerIndexTaken):
        driver.come_back(survivor)


def test_a_worker_of_a_lost_life_comes_back_with_a_higher_incarnation() -> None:
    driver, workers = trained(**UNSAVED)
    before = workers[0].participant
    lose_all(driver)
    after = driver.come_back(workers[0]).participant
    assert after.era.life != before.era.life
    assert after.incarnation > before.incarnation, "so that what it has named by its former number means nothing"


def test_a_call_that_names_no_life_is_refused() -> None:
    driver, workers = trained(**UNSAVED)
    with pytest.raises(EpochMismatch):
        driver.ask(HeartbeatRequest(participant=replace(workers[0].participant, era=era(1, life=0))))


def test_a_worker_that_comes_back_to_another_chief_keeps_its_training_data() -> None:
    driver, workers = trained(1, **UNSAVED)
    held = {one.id for one in driver.answers[driver.lease(workers[0], DATA, max_ranges=3)].ranges}
    driver.new_chief()
    driver.come_back(workers[0], held=tuple(held))
    driver.come_back(workers[1])
    others = {one.id for one in driver.answers[driver.lease(workers[1], DATA, max_ranges=12)].ranges}
    assert (len(held), others & held) == (3, set())


@pytest.mark.parametrize("what", ["model", "data"])
def test_a_blocked_call_is_refused_once_another_worker_has_the_callers_place(what: str) -> None:
    driver = Driver.outlived(total_num_replicas=2, **UNSAVED)
    if what == "data":
        first, second = driver.train(0, 1)
        driver.lease(first, DATA, max_ranges=12)
    else:
        first, second = Worker(driver, 0), Worker(driver, 1)
        driver.ask_model(first)
    waiting = driver.ask_model(second) if what == "model" else driver.lease(second, DATA, max_wait_s=5.0)
    assert waiting not in driver.answers
    driver.register(1, pid=99, takeover=True)
    assert isinstance(second.error(waiting), Superseded)


def test_a_survivor_of_the_checkpoints_life_keeps_its_incarnation_and_learns_which_pushes_were_saved() -> None:
    driver, workers = trained(5, **SAVED)
    survivor = workers[0]
    before = survivor.participant
    lose_all(driver)
    after = driver.come_back(survivor).participant
    assert (after.incarnation, driver.step) == (before.incarnation, 4)
    assert after.era != before.era, "what was said of step 4 does not hold"

    def asked(sequence: int) -> tuple[PushOutcome, PushOutcome | None]:
        push_id = PushId(worker=0, incarnation=after.incarnation, sequence=sequence)
        result = survivor.commit(step=sequence - 1, push_id=push_id, staged=False)
        return result.outcome, result.first_outcome

    assert asked(4) == (PushOutcome.DUPLICATE, PushOutcome.ACCEPTED)
    assert asked(5) == (PushOutcome.STALE, None)


def test_a_survivor_of_the_checkpoints_life_keeps_its_incarnation_under_the_next_chief() -> None:
    driver, workers = trained(5, **SAVED)
    lose_all(driver)
    fresh = Worker(driver, 1)
    assert fresh.participant.incarnation > workers[1].participant.incarnation
    before = workers[0].participant
    driver.new_chief()
    assert driver.come_back(workers[0]).participant.incarnation == before.incarnation


def test_a_survivor_keeps_its_incarnation_under_a_chief_that_restores_a_checkpoint_of_a_later_life() -> None:
    driver, workers = trained(5, **SAVED)
    before = workers[0].participant
    lose_all(driver)
    life = life_of(driver)
    driver.kill(1)
    driver.new_chief()
    newest = max(driver.storage.values(), key=lambda one: one.age_order)
    assert (newest.fence.life, life_of(driver)) == (life, life) != (before.era.life, before.era.life), "else this shows nothing"
    assert driver.come_back(workers[0]).participant.incarnation == before.incarnation


def test_a_number_given_after_the_checkpoint_was_saved_belongs_to_no_participant() -> None:
    """The chief that saved it was followed by another, whose number the chief of the next life has again."""
    driver, _ = trained(5, **SAVED)
    only = dict(list(driver.storage.items())[-1:])
    driver.new_chief(checkpoints=CheckpointConfig(every_steps=1000))
    late = Worker(driver, 0)
    driver.storage.clear()
    driver.storage.update(only)
    lose_all(driver)
    newcomer = Worker(driver, 1)
    assert newcomer.participant.incarnation == late.participant.incarnation == (1 << 20) + 1, "else this shows nothing"
    assert driver.come_back(late).participant.incarnation == (1 << 20) + 2


def test_a_number_given_in_a_life_of_which_nothing_was_saved_means_nothing_once_another_life_is_restored() -> None:
    """All was lost while a chief was cut off, and a chief of its number has trained and saved: both have numbered a worker alike."""
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    driver.new_chief()
    (worker,) = driver.train(0)
    other = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(every_steps=2))
    other.new_chief()
    (saved,) = other.train(0)
    train([saved], 4)
    assert worker.participant.incarnation == saved.participant.incarnation, "else this shows nothing"
    driver.storage.update(other.storage)
    driver.restart(0)
    assert driver.step == 4
    driver.come_back(worker)
    assert worker.push() is PushOutcome.ACCEPTED, "it is its first contribution, not the first of the worker that was saved"


def test_a_chief_that_finds_a_checkpoint_of_its_successor_begins_another_life_since_that_one_may_use_the_same_epochs() -> None:
    driver, workers = trained(0, **SAVED)
    former, life = driver.coordinator, life_of(driver)
    driver.new_chief()
    driver.come_back(workers[0])
    assert [checkpoint.fence.chief_incarnation for checkpoint in driver.storage.values()] == [1, 2], "else this shows nothing"
    driver.coordinator = former
    driver.restart(0)
    driver.restart(1)
    assert (former.cluster.members.chief_incarnation, driver.shards[0].chief) == (3, 3)
    assert life_of(driver) != life


def test_a_chief_that_repeats_a_restore_that_failed_begins_another_life_since_a_successor_may_have_used_the_next_epoch() -> None:
    """The successor took the servers over while the first restore was under way. Then all servers, and the successor, were lost."""
    before, _ = trained(5, **SAVED)
    driver = Driver.outlived(total_num_replicas=2, storage=before.storage, begin=False, checkpoints=CheckpointConfig(every_steps=2))
    driver.is_manual = True
    driver.begin()
    for _ in range(2):
        driver.do(driver.orders.pop(0))
    (restore,) = driver.orders
    driver.kill(0)
    driver.kill(1)
    driver.damaged = {restore.tag}
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 2)
    assert life_of(driver) != restore.fence.life
    assert driver.coordinator.cluster.members.chief_incarnation > restore.fence.chief_incarnation


@pytest.mark.parametrize("is_one_left", [True, False])
def test_a_life_ends_with_its_last_server_though_its_chief_lives_and_workers_stay_the_same_incarnations(is_one_left: bool) -> None:
    """A chief that was cut off does not hear what its successor did at servers that are lost since."""
    driver, workers = trained(5, num_shards=2 if is_one_left else 1, **SAVED)
    life, before = life_of(driver), workers[0].participant
    driver.restart(0)
    assert (life_of(driver) == life) is is_one_left
    with pytest.raises(EpochMismatch, match=r"cluster epoch is 2, you have 1 \(rolled back to step 4\)"):
        workers[0].heartbeat()
    after = driver.come_back(workers[0]).participant
    assert after == replace(before, era=era(2, life=life_of(driver)))
    newcomer = driver.register(1, pid=99, takeover=True).participant
    assert newcomer.incarnation == (2 if is_one_left else (1 << 20) + 1), "a number that no chief has given in this life"


def test_a_worker_of_an_earlier_chief_gets_another_secret_when_the_life_changes_since_new_servers_do_not_know_the_old_one() -> None:
    driver, workers = trained(5, num_shards=1, **SAVED)
    driver.new_chief()
    assert driver.come_back(workers[0]).participant.secret == workers[0].participant.secret
    before = workers[0].participant
    driver.restart(0)
    after = driver.come_back(workers[0]).participant
    assert (after.incarnation, after.secret != before.secret) == (before.incarnation, True)
    name = f"worker {after.index}"
    assert after.secret in {session_secret(key, name=name, incarnation=after.incarnation) for key in driver.shards[0].session_keys}


def test_all_servers_restarted_during_a_restore_are_brought_back_once_more_in_another_life() -> None:
    driver, _ = trained(5, **SAVED)
    driver.is_manual = True
    driver.restart(0)
    driver.do(driver.orders.pop(0))
    (restore,) = driver.orders
    for shard in range(2):
        driver.kill(shard)
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 4)
    assert life_of(driver) != restore.fence.life


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_chief_that_has_saved_nothing_begins_another_life_if_servers_were_restarted_while_it_adopted_them(num_lost: int) -> None:
    """A successor may have trained at the former servers, in the next epoch of the life, and saved nothing either."""
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    driver.is_manual = True
    driver.new_chief()
    for _ in range(2):
        driver.do(driver.orders.pop(0))
    (adopt,) = driver.orders
    assert isinstance(adopt, messages.AdoptShards), "in the next epoch"
    for shard in range(num_lost):
        driver.kill(shard)
    driver.is_manual = False
    driver.work_off()
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
    assert life_of(driver) != adopt.fence.life


def test_a_server_that_was_restarted_before_anything_was_trained_is_never_given_the_life_that_it_was_in() -> None:
    """Others may have been restarted since, of which the chief has not heard: their chief may have used the epochs of that life."""
    driver = Driver.outlived(checkpoints=None)
    life = life_of(driver)
    driver.restart(0)
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
    assert life not in {shard.life for shard in driver.shards}


def test_servers_of_two_lives_begin_a_third() -> None:
    driver, workers = trained(**UNSAVED)
    other, _ = trained(0, **UNSAVED)
    lives = {life_of(driver), life_of(other)}
    driver.shards[1].life = life_of(other)
    driver.new_chief()
    assert life_of(driver) not in lives
    assert driver.come_back(workers[0]).participant.incarnation > (1 << 20)


def test_a_commit_of_a_lost_life_is_counted_in_none() -> None:
    driver, workers = trained(2, **UNSAVED)
    lost: PushCommit = workers[0].next_commit()
    lose_all(driver)
    newcomers = driver.train(0, 1)
    train(newcomers, 2)
    with pytest.raises(EpochMismatch):
        workers[0].commit(lost.step, push_id=lost.push_id)
    assert newcomers[0].push() is PushOutcome.ACCEPTED, "of the same number"
