"""Replays recorded placements and partitions: where variables and slices lie. Knows the format of their cases; starts no process."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import worker_client
from ps_protocol.model.spec import PlacedSlice
from ps_protocol.model.variables import Partitioner
from ps_protocol.roles.chief import GetModelRequest
from tests.conformance.checking import check_close, check_equal
from tests.support.cluster.shape import Cluster
from worker_client import Variable

Case = dict[str, Any]

# The recordings are of how variables are cut. To push and read the few that are larger takes as long as all others.
MOST_ELEMENTS_PUSHED = 1_000_000

PARTITIONERS: dict[str, Callable[..., Partitioner]] = {
    "fixed_size": worker_client.fixed_size_partitioner,
    "variable_axis_size": worker_client.variable_axis_size_partitioner,
    "min_max": worker_client.min_max_variable_partitioner,
}


def replay_placement(case: Case, *, cluster: Cluster) -> None:
    """Replays one case of placement: registers the variables and asks the chief where each lies. Raises Mismatch."""
    values = {spec["name"]: np.zeros(spec["shape"], spec["dtype"]) for spec in case["variables"]}
    with cluster.session() as session:
        session.create_or_join(values, optimizer=worker_client.sgd(1.0), placement=case["strategy"], split_bytes=0)
        shards = {placed.slice.variable.name: placed.shard for placed in _placement(cluster)}
    check_equal("task of each variable", [shards[name] for name in values], case["expect"])


def replay_partitioner(case: Case, *, cluster: Cluster) -> None:
    """Replays one case of partitioner: what it returns, and that a variable so cut is read and pushed as one. Raises Mismatch."""
    partitioner = PARTITIONERS[case["partitioner"]](**case["arguments"])
    shape, dtype = tuple(case["shape"]), case["dtype"]
    check_equal("slices an axis", list(partitioner(shape, np.dtype(dtype))), case["expect"])
    num_elements = math.prod(shape)
    # Small whole numbers, so that the sum is exact.
    value = (np.arange(num_elements) % 127).astype(dtype).reshape(shape)
    with cluster.session() as session:
        session.create_or_join({"v": Variable(value, partitioner=partitioner)}, optimizer=worker_client.sgd(1.0), split_bytes=0)
        if num_elements <= MOST_ELEMENTS_PUSHED:
            session.step({"v": np.full(shape, -2.0, dtype)}, timeout_s=60)
            check_close("the whole variable", session.read()["v"], value + 2, dtype=dtype)
        slices = [placed.slice for placed in _placement(cluster)]
    counts = [len(slices) if axis == slices[0].axis else 1 for axis in range(len(shape))]
    check_equal("slices that the chief agreed on", counts, case["expect"])


def _placement(cluster: Cluster) -> tuple[PlacedSlice, ...]:
    return cluster.client().call(GetModelRequest(max_wait_s=20)).placement
