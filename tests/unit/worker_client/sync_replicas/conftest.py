"""The graph with one variable, and the cluster, that tests of monitored sessions and their hooks share."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.sessions.facade import FakeCluster
from worker_client.sync_replicas import Graph, get_variable


@pytest.fixture(autouse=True)
def graph() -> Iterator[Graph]:
    with Graph().as_default() as made:
        get_variable("w", np.zeros(2))
        yield made


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()
