"""A cluster that refuses gradients that are not finite: shards and workers get that setting, from the next chief too."""

from typing import Any

import pytest

from chief.config import parse_config
from chief.core.messages import RestoreShards
from tests.support.chief.chief_driver import Driver, Worker


def trained(**config: Any) -> tuple[Driver, list[Worker]]:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None, **config)
    workers = driver.train(0, 1)
    for worker in workers:
        worker.ask(commit=worker.next_commit())
    assert driver.step == 1
    return driver, workers


@pytest.mark.parametrize("reject", [True, False])
def test_the_refusal_of_nonfinite_gradients_reaches_shards_with_the_first_values_and_workers_at_registration(reject: bool) -> None:
    driver = Driver(reject_nonfinite=reject)
    worker = Worker(driver)
    assert driver.register(1).rejects_nonfinite is reject
    initialise = driver.ask_model(worker)
    assert initialise in driver.answers
    worker.complete(1)
    assert [change.rejects_nonfinite for change in driver.configured] == [True] * reject


def test_a_new_chief_that_treats_nonfinite_gradients_alike_sends_no_settings() -> None:
    driver, _ = trained(reject_nonfinite=True)
    num_told = len(driver.configured)
    driver.new_chief()
    assert len(driver.configured) == num_told


@pytest.mark.parametrize("reject", [True, False])
def test_a_new_chief_that_treats_nonfinite_gradients_otherwise_tells_the_shards(reject: bool) -> None:
    driver, workers = trained(reject_nonfinite=not reject)
    driver.new_chief(reject_nonfinite=reject)
    assert driver.configured[-1].rejects_nonfinite is reject
    assert driver.come_back(workers[0]).rejects_nonfinite is reject


def test_restored_shards_are_told_again_to_refuse_nonfinite_gradients() -> None:
    driver = Driver.outlived(total_num_replicas=1, reject_nonfinite=True)
    (worker,) = driver.train(0)
    worker.ask(commit=worker.next_commit())
    driver.is_manual = True
    driver.restart(0)
    while not isinstance(driver.orders[0], RestoreShards):
        driver.do(driver.orders.pop(0))
    assert driver.orders[0].settings.rejects_nonfinite


@pytest.mark.parametrize(
    ("flags", "environment", "wanted"),
    [
        ([], {}, False),
        (["--reject-nonfinite"], {}, True),
        ([], {"LOCKSTEP_REJECT_NONFINITE": "1"}, True),
        ([], {"LOCKSTEP_REJECT_NONFINITE": "0"}, False),
    ],
)
def test_the_flag_and_the_variable_have_nonfinite_gradients_refused(flags: list[str], environment: dict[str, str], wanted: bool) -> None:
    assert parse_config(["--ps", "a:1", "--workers", "2", *flags], environment=environment).coordination.reject_nonfinite is wanted
