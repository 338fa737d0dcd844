"""A worker that has no gradient for a step takes part in it all the same: the others' mean counts, and nobody waits."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import worker_client
from tests.support.cluster.shape import Shape, Start


def test_a_step_that_a_worker_skips_has_the_mean_of_the_others(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=2, replicas_to_aggregate=2))

    def train(index: int) -> Any:
        session = cluster.session(index)
        session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
        first = session.skip(timeout_s=20) if index else session.step({"w": np.ones(3)}, timeout_s=20)
        second = session.skip(timeout_s=20)
        assert (first.applied_step, second.applied_step) == (0, 1)
        return session.read()["w"]

    with ThreadPoolExecutor(2) as threads:
        for value in threads.map(train, range(2)):
            np.testing.assert_array_equal(value, -np.ones(3))
