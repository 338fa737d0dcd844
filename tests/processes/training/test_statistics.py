"""State, missing gradients, metrics and averages between processes, one of which dies: a contribution counts once, with all its parts."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.model.variables import Array
from tests.support.processes.real_cluster import Worker, real_cluster
from tests.support.sessions.clusters import Shape
from tests.support.sessions.models import contribution
from worker_client import MetricReport

LAST_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What three workers contributed (step to the workers that it was made of), and what an observer read in the end."""

    contributors: Mapping[int, list[int]]
    values: Mapping[str, Array]
    averages: Mapping[str, Array]
    momentum: Mapping[str, Array]
    metrics: Mapping[str, MetricReport]


def together(workers: list[Worker], *, until: int) -> list[list[Any]]:
    """Has these workers contribute at the same time until a step is reached, and returns the records of each."""
    outcomes = [worker.begin("contribute_statistics", until=until) for worker in workers]
    return [outcome() for outcome in outcomes]


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """Two of three contributions make a step; the third worker is too late at first, and dies on the way."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp" if Path("/tmp").is_dir() else None)))
        cluster = real_cluster(Shape(num_ps=2, replicas_to_aggregate=2, total_num_replicas=3), stack, directory=directory)
        cluster.all_do("join", model="statistics")
        first, second, third = cluster.workers
        records = together([first, second], until=1) + together([third], until=1)
        assert [[record[:2] for record in one] for one in records] == [[["ACCEPTED", 0]], [["ACCEPTED", 0]], [["STALE", 0]]]
        for workers, until in (([first, third], 8), (cluster.workers, 20), ([first, second], LAST_STEP)):
            if third not in workers:
                third.kill()
            for one, more in zip(workers, together(workers, until=until), strict=True):
                records[one.index] += more
        contributors = defaultdict[int, list[int]](list)
        for worker, its_records in enumerate(records):
            for outcome, step, applied_step, _ in its_records:
                if outcome == "ACCEPTED":
                    assert step == applied_step
                    contributors[step].append(worker)
        observer = cluster.observer
        yield Found(
            contributors=contributors,
            values={name: value.copy() for name, value in observer.read(timeout_s=20).items()},
            averages=observer.read_averages(),
            momentum={name: observer.get_slot(name, "momentum") for name in ("always", "sometimes")},
            metrics=observer.read_metrics(),
        )


def test_every_step_is_made_of_two_contributions_and_none_is_missing(found: Found) -> None:
    assert sorted(found.contributors) == list(range(LAST_STEP))
    assert {len(workers) for workers in found.contributors.values()} == {2}


def test_state_takes_the_updates_of_contributions_that_count_and_no_others(found: Found) -> None:
    seen, last, running = 0.0, 0.0, 0.0
    for step, workers in sorted(found.contributors.items()):
        updates = [contribution(worker, step)[1] for worker in workers]
        seen += sum(float(one["seen"]) for one in updates)
        given = [one["last_mean"][0] for one in updates if "last_mean" in one]
        last = np.mean(given) if given else last
        running -= 0.25 * (running - np.mean([one["running_mean"][0] for one in updates]))
    assert found.values["seen"] == seen
    np.testing.assert_array_equal(found.values["last_mean"], [last, last])
    np.testing.assert_allclose(found.values["running_mean"], [running, running], rtol=1e-12)


def test_the_mean_gradient_is_over_workers_that_have_one_and_without_any_nothing_changes(found: Found) -> None:
    for name, expected in trained(found).items():
        np.testing.assert_allclose(found.values[name], np.full_like(found.values[name], expected[-1][0]), rtol=1e-12)
        np.testing.assert_allclose(found.momentum[name], np.full_like(found.values[name], expected[-1][1]), rtol=1e-12)


def test_averages_follow_each_steps_variables(found: Found) -> None:
    assert sorted(found.averages) == ["always", "sometimes"]
    for name, values in trained(found).items():
        average = 0.0
        for step, (value, _) in enumerate(values, start=1):
            average -= (1 - min(0.9, (1 + step) / (10 + step))) * (average - value)
        np.testing.assert_allclose(found.averages[name], np.full_like(found.values[name], average), rtol=1e-6)


def test_metrics_are_those_of_contributions_that_count_also_of_a_worker_that_died(found: Found) -> None:
    assert list(found.metrics) == ["loss"]
    report, total, weight = found.metrics["loss"], 0.0, 0.0
    for worker in range(3):
        steps = [step for step, workers in sorted(found.contributors.items()) if worker in workers]
        given = [contribution(worker, step)[2]["loss"] for step in steps]
        its = report.by_worker[worker]
        assert (its.count, its.last) == (len(given), given[-1][0])
        np.testing.assert_allclose(its.sum, sum(value * factor for value, factor in given))
        total, weight = total + its.sum, weight + sum(factor for _, factor in given)
    assert report.count == 2 * len(found.contributors)
    np.testing.assert_allclose([report.sum, report.mean], [total, total / weight])


def trained(found: Found) -> dict[str, list[tuple[float, float]]]:
    """Value and momentum of an element after each step, as one process computes them."""
    history: dict[str, list[tuple[float, float]]] = {"always": [], "sometimes": []}
    for name, steps in history.items():
        value = momentum = 0.0
        for step, workers in sorted(found.contributors.items()):
            gradients = [contribution(worker, step)[0][name] for worker in workers]
            given = [gradient.flat[0] for gradient in gradients if gradient is not None]
            if given:
                momentum = 0.5 * momentum + np.mean(given)
                value -= 0.5 * momentum
            steps.append((value, momentum))
    return history
