"""Programs written for SyncReplicasOptimizer and for the plain optimizers train on real clusters by the original's rules."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sessions.facade_programs import SHAPES, Build, running_cluster, target_of, train
from worker_client.sync_replicas import (
    ExponentialMovingAverage,
    GradientDescentOptimizer,
    MomentumOptimizer,
    StopAtStepHook,
    SyncReplicasOptimizer,
    get_or_create_global_step,
    trainable_variables,
)

RATE = 0.25
NUM_STEPS = 6


@pytest.fixture(params=["in process", "grpc"])
def master(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Any]:
    with running_cluster(request.param, directory=socket_dir) as running:
        yield running


def sync_program(replicas: int, total: int, *, num_tokens: int, last_step: int = NUM_STEPS, **options: Any) -> Build:
    def build(index: int, loss: Callable[..., Any]) -> Any:
        optimizer = SyncReplicasOptimizer(GradientDescentOptimizer(RATE), replicas, total, **options)
        op = optimizer.minimize(loss, global_step=get_or_create_global_step())
        return op, [optimizer.make_session_run_hook(index == 0, num_tokens), StopAtStepHook(last_step=last_step)]

    return build


def accepted(results: Any) -> list[int]:
    return [result.step for result in results if result.is_accepted]


def test_chief_that_ends_ends_the_others(master: Any) -> None:
    def build(index: int, loss: Callable[..., Any]) -> Any:
        op, (hook, stop) = sync_program(2, 2, num_tokens=0)(index, loss)
        return op, [hook, stop] if index == 0 else [hook]

    workers = train(master, build, num_workers=2)
    # Its last contribution may be counted for a step that never comes.
    assert accepted(workers[1].results)[:NUM_STEPS] == list(range(NUM_STEPS))
    assert (workers[1].results[-1].is_finished, len(workers[1].results) <= NUM_STEPS + 1) == (True, True)


def test_averages_see_exactly_the_values_after_each_step(master: Any) -> None:
    averages: list[ExponentialMovingAverage] = []

    def build(index: int, loss: Callable[..., Any]) -> Any:
        averages.append(ExponentialMovingAverage(0.5))
        return sync_program(1, 1, num_tokens=0, variable_averages=averages[-1], variables_to_average=trainable_variables())(index, loss)

    (worker,) = train(master, build, num_workers=1, at_end=lambda session: session.session.read_averages())
    target = target_of(0)["bias"]
    value = average = np.zeros(3)
    for _ in range(NUM_STEPS):
        value = value - RATE * (value - target)
        average = average - 0.5 * (average - value)
    np.testing.assert_allclose(worker.final["at end"]["bias"], average, rtol=1e-12)


def test_slots_are_read_by_their_handles(master: Any) -> None:
    optimizers: list[SyncReplicasOptimizer] = []

    def build(index: int, loss: Callable[..., Any]) -> Any:
        optimizers.append(SyncReplicasOptimizer(MomentumOptimizer(0.1, 0.5), 1))
        op = optimizers[0].minimize(loss, global_step=get_or_create_global_step())
        return op, [optimizers[0].make_session_run_hook(True, 0), StopAtStepHook(last_step=1)]

    (worker,) = train(master, build, num_workers=1, at_end=lambda session: session.run(optimizers[0].variables()))
    np.testing.assert_allclose(worker.final["at end"][0], -target_of(0)["bias"])


NUM_RUNS = 25


@pytest.mark.parametrize("use_locking", [True, False])
def test_plain_optimizer_applies_every_workers_gradients_by_themselves(use_locking: bool, master: Any) -> None:
    def build(index: int, loss: Callable[..., Any]) -> Any:
        optimizer = GradientDescentOptimizer(1.0, use_locking=use_locking)
        pairs = [(np.ones(SHAPES[variable.name]), variable) for variable in trainable_variables()]
        return optimizer.apply_gradients(pairs, get_or_create_global_step()), [StopAtStepHook(last_step=2 * NUM_RUNS)]

    workers = train(master, build, num_workers=2, at_end=lambda session: session.session.status())
    results = [result for worker in workers for result in worker.results]
    num_applied = sum(result.is_accepted for result in results)
    assert num_applied >= 2 * NUM_RUNS
    assert all(result.applied_step == result.step + result.staleness for result in results if result.is_accepted and use_locking)
    last = max(worker.final["variables"]["bias"].min() * -1 for worker in workers)
    # With locking no update is lost; without, updates that met may be, as in the original.
    assert last == num_applied if use_locking else 0 < last <= num_applied
