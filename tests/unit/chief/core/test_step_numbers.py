"""Hyper-parameters that come with contributions: those of the lowest push id apply, in any order, and under the next chief too."""

from dataclasses import replace

import pytest

from chief.core.messages import ApplyStep
from chief.shards.work import step_requests
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.roles.chief import PushOutcome
from tests.support.chief.chief_driver import Driver, Worker


def rate(value: float, group: str = "") -> tuple[StepHyperparameter, ...]:
    return (StepHyperparameter(group=group, name="learning_rate", value=value),)


def used(step: ApplyStep) -> tuple[StepHyperparameter, ...]:
    """What every shard uses."""
    (of_all,) = {request.hyperparameters for request in step_requests(step, num_shards=2)}
    return of_all


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_numbers_of_the_worker_with_the_lowest_index_are_used_in_either_order(order: tuple[int, int]) -> None:
    driver = Driver(total_num_replicas=2)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    for index in order:
        workers[index].send_commit(hyperparameters=rate(0.5 - index / 4))
    assert used(driver.to_apply[0]) == rate(0.5)
    driver.apply()
    for worker in workers:
        worker.local_step = 1
        worker.send_commit()
    assert used(driver.to_apply[0]) == (), "they hold for one step"


def test_hyper_parameters_of_contributions_that_do_not_count_are_not_used() -> None:
    driver = Driver(total_num_replicas=3, replicas_to_aggregate=2)
    workers = driver.train(0, 1, 2)
    driver.applies_at_once = False
    for worker in (workers[1], workers[2], workers[0]):
        worker.send_commit(hyperparameters=rate(worker.index / 4))
    assert used(driver.to_apply[0]) == rate(0.25)


def test_a_shard_that_lacks_a_contribution_uses_the_numbers_of_the_next_one() -> None:
    driver = Driver(total_num_replicas=3)
    workers = driver.train(0, 1, 2)
    driver.applies_at_once = False
    lost = workers[0].next_push()
    workers[0].send_commit(push_id=lost, hyperparameters=rate(0.5))
    for worker in workers[1:]:
        worker.send_commit(hyperparameters=rate(0.25))
    (step,) = driver.to_apply
    told = step_requests(replace(step, without=((), (lost,))), num_shards=2)
    assert [request.hyperparameters for request in told] == [rate(0.5), rate(0.25)]
    nothing_here = step_requests(replace(step, without=((), step.request.contributors)), num_shards=2)
    assert nothing_here[1].hyperparameters == ()


def test_numbers_that_no_step_can_use_are_refused_by_the_chief_too() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0)
    for given, words in ((rate(-1.0), "want >= 0"), (rate(0.1, "head"), "no group 'head'"), (rate(0.1) * 2, "occurs twice")):
        with pytest.raises(InvalidSpec, match=words):
            worker.commit(hyperparameters=given)
    assert worker.push() is PushOutcome.ACCEPTED


def test_a_step_that_one_shard_has_applied_is_repeated_with_its_numbers() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    driver.applies_at_once = False
    worker.send_commit(hyperparameters=rate(0.25))
    driver.apply_at(0)
    driver.new_chief()
    assert used(driver.to_apply[0]) == rate(0.25)


def test_a_new_chief_uses_the_hyper_parameters_of_a_contribution_that_was_accepted() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    first = workers[0].next_push()
    call = workers[0].send_commit(push_id=first, hyperparameters=rate(0.25))
    driver.pass_time(0.01)
    assert call in driver.answers, "it counts for good"
    driver.new_chief()
    driver.come_back(workers[1])
    workers[1].send_commit()
    assert driver.to_apply[0].request.contributors[0] == first, "though worker 0 has not come back"
    assert used(driver.to_apply[0]) == rate(0.25)


def test_a_new_chief_uses_the_hyper_parameters_of_a_contribution_that_is_committed_again() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    driver.applies_at_once = False
    push_id = worker.next_push()
    worker.send_commit(push_id=push_id, hyperparameters=rate(0.25))
    driver.to_apply.clear()
    driver.new_chief()
    driver.come_back(worker)
    worker.send_commit(push_id=push_id, hyperparameters=rate(0.25))
    assert used(driver.to_apply[-1]) == rate(0.25)


def test_hyper_parameters_of_applied_contributions_are_forgotten() -> None:
    driver = Driver(total_num_replicas=2)
    workers: list[Worker] = driver.train(0, 1)
    for _ in range(3):
        for worker in workers:
            worker.ask(commit=worker.next_commit(hyperparameters=rate(0.25)))
            worker.local_step = driver.coordinator.cluster.step
    kept = driver.coordinator.cluster.attachments._counted  # what must not grow
    assert len(kept) <= 1


def test_differing_workers_are_warned_of_once_until_they_agree_again() -> None:
    driver = Driver(total_num_replicas=2)
    workers = driver.train(0, 1)

    def step(*rates: float) -> None:
        for worker, value in zip(workers, rates, strict=True):
            worker.ask(commit=worker.next_commit(hyperparameters=rate(value)))
        for worker in workers:
            worker.local_step = driver.coordinator.cluster.step

    for rates in ((0.5, 0.25), (0.5, 0.25), (0.5, 0.5), (0.5, 0.125)):
        step(*rates)
    said = [words for words in driver.said if "different numbers" in words]
    assert [note.partition("learning_rate ")[2] for note in said] == [
        "is 0.5 and 0.25; the step uses those of worker 0, the lowest",
        "is 0.5 and 0.125; the step uses those of worker 0, the lowest",
    ]
