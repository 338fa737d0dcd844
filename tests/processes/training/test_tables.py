"""Tables between processes: two workers' rows give one process's values, reads are of the requested step, and only rows are sent."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.model.variables import Array
from tests.support.processes.real_cluster import ThreadedCluster, threaded_cluster
from tests.support.sessions.clusters import Shape
from tests.support.sessions.models import NUM_FEW, NUM_MANY, WIDTH

Launch = Callable[..., ThreadedCluster]
# Rows of one step: each worker's indices, some of them twice, some of them both workers'.
Given = tuple[list[int], list[list[float]]]


@pytest.fixture
def launch(socket_dir: Path) -> Iterator[Launch]:
    """Starts two parameter servers and two workers that have joined a model of tables."""
    with ExitStack() as stack:

        def launched(model: str, *, num_required: int = 2, counts_bytes: bool = False) -> ThreadedCluster:
            shape = Shape(num_ps=2, replicas_to_aggregate=num_required, total_num_replicas=2)
            cluster = threaded_cluster(shape, stack, directory=socket_dir, counts_bytes=counts_bytes)
            cluster.all_do("join", model=model)
            return cluster

        yield launched


def some_rows(rng: np.random.Generator, num_rows: int) -> Given:
    indices = rng.choice(num_rows, 40)
    indices[:10] = np.arange(num_rows // 2 - 5, num_rows // 2 + 5)  # both workers', on both sides of the cut
    indices[10:15] = indices[:5]
    return indices.tolist(), rng.normal(size=(40, WIDTH)).astype(np.float32).tolist()


def mean_gradient(given: list[Given]) -> tuple[Array, Array]:
    """What the optimizer gets: each worker's repeated rows summed, then of each row the mean over the workers that have it."""
    total, count = dict[int, Array](), dict[int, int]()
    for indices, values in given:
        summed = dict[int, Array]()
        for index, row in zip(indices, np.array(values, np.float32), strict=True):
            summed[index] = summed.get(index, np.zeros(WIDTH, np.float32)) + row
        for index, row in summed.items():
            total[index] = total.get(index, np.zeros(WIDTH, np.float32)) + row
            count[index] = count.get(index, 0) + 1
    rows = sorted(total)
    return np.array(rows), np.array([total[row] / count[row] for row in rows])


class LazyAdam:
    """Adam that leaves rows without a gradient as they are, slots and all, as its authors' formula has it."""

    def __init__(self, values: Array) -> None:
        self.values, self.m, self.v, self.step = values, np.zeros_like(values), np.zeros_like(values), 0

    def apply(self, rows: Array, gradient: Array) -> None:
        self.step += 1
        rate = 0.01 * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
        self.m[rows] = 0.9 * self.m[rows] + 0.1 * gradient
        self.v[rows] = 0.999 * self.v[rows] + 0.001 * gradient**2
        self.values[rows] -= rate * self.m[rows] / (np.sqrt(self.v[rows]) + 1e-8)


class Adagrad:
    """Adagrad of rows, with 0.1 as the first value of the squares' sum."""

    def __init__(self, values: Array) -> None:
        self.values, self.squares = values, np.full_like(values, 0.1)

    def apply(self, rows: Array, gradient: Array) -> None:
        self.squares[rows] += gradient**2
        self.values[rows] -= 0.1 * gradient / np.sqrt(self.squares[rows])


def test_two_workers_steps_are_those_of_one_process_for_lazy_adam_and_adagrad(launch: Launch) -> None:
    cluster, rng = launch("embeddings"), np.random.default_rng(4)
    sizes = {"few": NUM_FEW, "many": NUM_MANY}
    watched = {
        name: np.unique(np.concatenate([rng.choice(size, 60), np.arange(size // 2 - 8, size // 2 + 8)])) for name, size in sizes.items()
    }
    references: dict[str, LazyAdam | Adagrad] = {
        "few": LazyAdam(cluster.observer.read_rows("few").astype(float)),
        "many": Adagrad(cluster.observer.read_rows("many").astype(float)),
    }
    for step in range(8):
        given = [{name: some_rows(rng, size) for name, size in sizes.items()} for _ in cluster.workers]
        if step == 3:
            given[1]["few"] = ([], [])
        outcomes = [worker.begin("push_rows", gradients=rows) for worker, rows in zip(cluster.workers, given, strict=True)]
        assert [outcome()[:3] for outcome in outcomes] == [["ACCEPTED", step, step]] * 2
        for name, reference in references.items():
            reference.apply(*mean_gradient([rows[name] for rows in given]))
            for found in cluster.all_do("read_rows", name=name, indices=watched[name].tolist()):
                np.testing.assert_allclose(found, reference.values[watched[name]], rtol=2e-5, atol=2e-6)
    for name, reference in references.items():
        np.testing.assert_allclose(cluster.observer.read_rows(name), reference.values, rtol=2e-5, atol=2e-6)


def test_rows_read_while_steps_are_applied_are_whole_and_of_the_workers_own_step(launch: Launch) -> None:
    cluster = launch("one_table", num_required=1)
    fast, slow = cluster.workers
    moving = fast.begin("move_table", name="table", shape=[20_000, WIDTH], times=80)
    found = slow.do("watch_table", name="table", times=60)
    assert [record[:3] for record in moving()] == [["ACCEPTED", step, step] for step in range(80)]
    torn = [one for one in found if not one[0] == -one[1] == -one[2]]
    assert not torn, f"step, least and largest of {len(torn)} of {len(found)} readings: {torn[:5]}"
    assert len({step for step, *_ in found}) > 3, "nothing has changed while it was read"


def test_a_step_moves_bytes_in_proportion_to_the_rows_and_not_to_the_table(launch: Launch) -> None:
    cluster = launch("embeddings", counts_bytes=True)

    def bytes_a_step(rows: int, *, few: bool) -> float:
        tables = {"few": NUM_FEW if few else None, "many": None if few else NUM_MANY}
        cluster.all_do("push_random_rows", tables=tables, rows=rows, times=1)  # what only the first of its kind costs
        before = sum(counter.num_up + counter.num_down for counter in cluster.counters)
        cluster.all_do("push_random_rows", tables=tables, rows=rows, times=5)
        return (sum(counter.num_up + counter.num_down for counter in cluster.counters) - before) / 5

    few, many, twice = bytes_a_step(500, few=True), bytes_a_step(500, few=False), bytes_a_step(1000, few=False)
    # Two workers read 500 rows of 16 float32 and push as many, each with an index of 8 bytes.
    rows_alone = 2 * 500 * (2 * 4 * WIDTH + 2 * 8)
    assert rows_alone <= few < 1.2 * rows_alone
    assert many == pytest.approx(few, rel=0.05), "the table is 100 times as long"
    assert twice == pytest.approx(2 * many, rel=0.1)
