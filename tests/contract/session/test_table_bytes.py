"""Tables over a network: only rows are sent."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import EmbeddingTable, IndexedSlices

WIDTH = 16
SIZES = {"few": 2_000, "many": 200_000}


def test_a_step_moves_bytes_in_proportion_to_the_rows_and_not_to_the_table(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2, num_workers=1), stack, directory=socket_dir, has_relays=True)
        session, rng = cluster.session(), np.random.default_rng(4)
        halves = worker_client.fixed_size_partitioner(2)
        tables = {name: EmbeddingTable((size, WIDTH), partitioner=halves) for name, size in SIZES.items()}
        session.create_or_join(tables, optimizer=worker_client.sgd(1.0), timeout_s=20)

        def num_bytes() -> int:
            return sum(relay.num_up + relay.num_down for relay in cluster.relays)

        def step(name: str, rows: int) -> None:
            indices = rng.choice(SIZES[name], rows, replace=False)
            gradients: dict[str, IndexedSlices | None] = dict.fromkeys(tables)
            gradients[name] = IndexedSlices(indices, session.read_rows(name, indices))
            session.step(gradients, timeout_s=20)

        def bytes_a_step(name: str, rows: int) -> float:
            step(name, rows)  # what only the first of its kind costs
            before = num_bytes()
            for _ in range(5):
                step(name, rows)
            return (num_bytes() - before) / 5

        few, many, twice = bytes_a_step("few", 500), bytes_a_step("many", 500), bytes_a_step("many", 1000)
    # 500 rows of 16 float32 are read and as many pushed, each with an index of 8 bytes.
    rows_alone = 500 * (2 * 4 * WIDTH + 2 * 8)
    assert rows_alone <= few < 1.2 * rows_alone
    assert many == pytest.approx(few, rel=0.05), "the table is 100 times as long"
    assert twice == pytest.approx(2 * many, rel=0.1)
