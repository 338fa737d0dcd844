"""Shards with standbys: their addresses for participants, the return of a lost one, and the one that a new chief trusts."""

from dataclasses import replace
from typing import Any

import pytest

from chief.core import messages as rev
from chief.options import CheckpointConfig
from chief.shards.standby import Replica, judge
from ps_protocol.errors import StorageFull, Unavailable
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import TokenResult
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardReport, ShardStatus
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.chief.eras import fence

ON_DEMAND = CheckpointConfig(durability=Durability.NONE)


def changed(shard: int = 0, *, standby: str = "host-s:1", address: str = "host-p:5000", missing: str = "") -> rev.ReplicasChanged:
    return rev.ReplicasChanged(shard=shard, address=address, standby=standby, missing=missing)


def trained(**config: Any) -> tuple[Driver, Any]:
    """A cluster of one worker whose shard 0 has lost its standby, which is there again."""
    config.setdefault("checkpoints", ON_DEMAND)
    driver = Driver.outlived(total_num_replicas=1, **config)
    (worker,) = driver.train(0)
    driver.send(changed())
    driver.send(changed(standby="", missing="it was restarted"))
    driver.is_manual = True
    driver.orders.clear()
    driver.send(rev.ReplicaReady(shard=0))
    return driver, worker


def step(driver: Driver, worker: Any) -> int:
    call: int = worker.ask(commit=worker.next_commit())
    return call


def orders(driver: Driver, kind: type) -> list[Any]:
    return [order for order in driver.orders if isinstance(order, kind)]


def words(driver: Driver) -> str:
    return driver.coordinator.status(driver.now).shards[0].standby_missing


def test_the_status_of_a_cluster_without_standbys_does_not_mention_them() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    assert (worker.registration.standby_addresses, worker.registration.shards_version) == ((), 0)
    assert driver.answers[step(driver, worker)].shards_version == 0


def test_participants_get_the_shards_addresses_and_a_change_with_their_next_token() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    driver.send(changed(1))
    (worker,) = driver.train(0)
    first = worker.registration
    assert (first.shard_addresses[1], first.standby_addresses) == ("host-p:5000", ("", "host-s:1"))
    driver.send(changed(1, address="host-s:1", standby="", missing="ps 1 is gone"))
    token = driver.answers[step(driver, worker)]
    assert token.shards_version > first.shards_version > 0
    assert driver.answers[driver.ask_model(worker)].shards_version == token.shards_version
    again = driver.come_back(worker)
    assert (again.participant, again.shard_addresses[1], again.standby_addresses) == (first.participant, "host-s:1", ("", ""))
    assert again.shards_version == token.shards_version


def test_workers_that_have_given_two_servers_different_gradients_are_named() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    pushes = tuple(PushId(worker=worker, incarnation=1, sequence=4) for worker in (0, 2))
    driver.send(rev.ContributionsDiffer(shard=1, step=7, contributions=pushes))
    (note,) = [note for note in driver.notes if "different gradients" in note.text]
    assert note.is_warning
    assert "worker 0, worker 2" in note.text
    assert "ps 1" in note.text
    assert "step 7 (contribution 0/1/4, 2/1/4)" in note.text


def test_another_reason_for_a_missing_standby_is_no_new_version_and_a_new_chief_counts_from_a_higher_one() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    driver.send(changed(standby="", missing="not reached yet"))
    (worker,) = driver.train(0)
    driver.send(changed(standby="", missing="it is there again"))
    assert driver.answers[step(driver, worker)].shards_version == worker.registration.shards_version
    driver.new_chief()
    driver.send(changed())
    before = worker.registration.shards_version
    assert driver.come_back(worker).shards_version > before


def test_a_lost_replica_comes_back_between_two_steps_before_anybody_hears_of_the_second() -> None:
    driver, worker = trained()
    call = step(driver, worker)
    (save,) = orders(driver, rev.CopyStep)
    assert (save.step, worker.has_token(call)) == (1, False)
    while not orders(driver, rev.BringReplicasBack):
        driver.do(driver.orders.pop(0))
    (order,) = orders(driver, rev.BringReplicasBack)
    assert (order.tag, order.shards, [spec.initial_step for spec in order.specs]) == (save.tag, (0,), [1])
    assert "a standby is being brought back to step 1" in driver.coordinator.cluster.explain(driver.now)
    assert not worker.has_token(call)
    driver.send(changed(standby="host-s:1"))
    driver.done(order, ())
    token = driver.answers[call]
    assert (token.result, token.step) == (TokenResult.TOKEN, 1)
    assert token.shards_version > worker.registration.shards_version
    assert not words(driver)
    driver.orders.clear()
    assert worker.has_token(step(driver, worker)), "the next step is as ever"
    assert not orders(driver, rev.CopyStep)


@pytest.mark.parametrize("failure", ["the disk is full", ""])
def test_a_replica_that_cannot_come_back_holds_nothing_up(failure: str) -> None:
    driver, worker = trained()
    call = step(driver, worker)
    (save,) = orders(driver, rev.CopyStep)
    if failure:
        driver.fail(save, StorageFull(failure))
    else:
        while not orders(driver, rev.BringReplicasBack):
            driver.do(driver.orders.pop(0))
        (order,) = orders(driver, rev.BringReplicasBack)
        driver.done(replace(order), ())
        assert not worker.has_token(call), "of another instruction"
        driver.done(order, ((0, "it was restarted again"),))
    assert worker.has_token(call)
    assert (failure or "restarted again") in words(driver)
    assert worker.has_token(step(driver, worker))


@pytest.mark.parametrize(
    ("config", "why"),
    [({"checkpoints": None}, "without --checkpoint-dir"), ({"policy": PolicySpec(name=PolicyName.ASYNC)}, "with the policy async")],
)
def test_a_standby_that_cannot_return_between_two_steps_stays_out_and_that_is_reported(config: dict[str, Any], why: str) -> None:
    driver, worker = trained(**config)
    assert why in words(driver)
    assert worker.has_token(step(driver, worker))
    assert not orders(driver, rev.CopyStep)


def test_a_rollback_takes_all_replicas_along_so_none_is_waited_for() -> None:
    driver, worker = trained(checkpoints=CheckpointConfig(interval_s=1e6))
    driver.is_manual = False
    driver.restart(0)
    driver.come_back(worker)
    driver.is_manual = True
    driver.orders.clear()
    assert worker.has_token(step(driver, worker))
    assert not orders(driver, rev.CopyStep)


def test_a_replica_that_is_there_again_before_the_model_is_known_comes_back_after_the_next_step_as_promised() -> None:
    driver, worker = trained()
    driver.orders.clear()
    for shard in driver.shards:
        shard.record, shard.record_version = None, 0
    driver.is_manual = False
    driver.new_chief()
    driver.send(changed(standby="", missing="it was restarted"))
    driver.send(rev.ReplicaReady(shard=0))
    assert "is brought back after the next step" in words(driver)
    driver.come_back(worker)
    driver.ask_model(worker)
    driver.is_manual = True
    call = step(driver, worker)
    while not orders(driver, rev.BringReplicasBack):
        driver.do(driver.orders.pop(0))
    assert orders(driver, rev.BringReplicasBack)[0].shards == (0,)
    assert not worker.has_token(call)


def test_a_replica_that_is_there_again_before_a_shard_is_restarted_comes_back_after_the_first_step_as_promised() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    driver.send(changed(standby="", missing="it was restarted"))
    driver.send(rev.ReplicaReady(shard=0))
    worker = Worker(driver, 0)
    driver.ask_model(worker)
    driver.restart(1)
    assert "is brought back after the next step" in words(driver)
    driver.come_back(worker)
    attempt = driver.answers[driver.ask_model(worker)].attempt
    for shard in driver.shards:
        shard.step = 0
    worker.complete(attempt)
    driver.is_manual = True
    step(driver, worker)
    while not orders(driver, rev.BringReplicasBack):
        driver.do(driver.orders.pop(0))


class _Link:
    """Has an address."""

    def __init__(self, address: str) -> None:
        self.address = address


def status(*, epoch: int = 1, at: int | None = None, is_alone: bool = False, heard: float | None = None, chief: int = 1) -> ShardStatus:
    return ShardStatus(
        shard=0,
        process_incarnation=5,
        fence=fence(epoch, chief),
        step=at,
        report=ShardReport(),
        chief_heard_ago_s=heard,
        is_alone=is_alone,
    )


FIRST, SECOND = (Replica(_Link(name)) for name in ("a:1", "b:1"))  # type: ignore[arg-type]
ABSENT = Unavailable("cannot reach b:1")


def test_of_two_replicas_the_one_with_the_latest_epoch_and_step_is_used() -> None:
    found = judge({FIRST: status(at=7), SECOND: status(at=8, chief=2, heard=1.5)}, [])
    assert (found.best, found.is_proven) == (SECOND, True)
    assert (found.status().step, found.status().fence.chief_incarnation, found.status().chief_heard_ago_s) == (8, 2, 1.5)
    assert judge({FIRST: status(epoch=2, at=3), SECOND: status(at=8)}, []).best is FIRST


def test_no_replica_is_trusted_while_one_is_absent_that_may_have_continued_alone() -> None:
    with pytest.raises(Unavailable):
        judge({FIRST: status(at=7)}, [ABSENT])
    assert judge({FIRST: status(at=7, is_alone=True)}, [ABSENT]).best is FIRST
    with pytest.raises(Unavailable):
        judge({FIRST: status(is_alone=True)}, [ABSENT])


def test_a_replica_that_was_the_only_one_counted_on_is_used_whatever_step_the_other_has() -> None:
    for step in (7, 8):
        found = judge({FIRST: status(at=step), SECOND: status(at=7, is_alone=True)}, [])
        assert (found.best, found.is_proven) == (SECOND, True)


def test_a_replica_with_a_model_beside_an_empty_one_must_be_confirmed() -> None:
    found = judge({FIRST: status(epoch=0), SECOND: status(at=7)}, [])
    assert (found.best, found.is_proven) == (SECOND, False)
    assert judge({FIRST: status(epoch=0), SECOND: status(at=7, is_alone=True)}, []).is_proven
    assert judge({FIRST: status(), SECOND: status()}, []).is_proven
