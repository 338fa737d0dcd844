"""Replays recorded optimizers and moving averages in a cluster with one worker. Knows the format of their cases; starts no process."""

from typing import Any

import numpy as np

import worker_client
from tests.conformance.checking import check_close, check_equal
from tests.support.cluster.shape import Cluster
from worker_client import EmbeddingTable, IndexedSlices, Session

Case = dict[str, Any]


def optimizer_of(case: Case) -> worker_client.OptimizerSpec:
    """Returns the optimizer of a case; the hyper-parameters have the original's names."""
    hyperparameters = dict(case["hyperparameters"])
    spec: worker_client.OptimizerSpec = getattr(worker_client, case["optimizer"])(**hyperparameters)
    return spec


def replay_optimizer(case: Case, *, cluster: Cluster) -> None:
    """Replays one case of optimizer: a dense variable and a table, their slots, step by step. Raises Mismatch."""
    dtype, initial = case["dtype"], {name: np.array(value, case["dtype"]) for name, value in case["initial"].items()}
    with cluster.session() as session:
        session.create_or_join({"dense": initial["dense"], "sparse": EmbeddingTable(initial["sparse"])}, optimizer=optimizer_of(case))
        check_equal("slot_names", session.get_slot_names(), case["slot_names"])
        _check_slots("at first", session, case["initial_slots"], dtype=dtype)
        for place, step in enumerate(case["steps"]):
            gradient, rows = step["gradient"], step["gradient"]["sparse"]
            slices: Any = IndexedSlices(np.array(rows["indices"], np.int64), np.array(rows["values"], dtype))
            session.step({"dense": np.array(gradient["dense"], dtype), "sparse": slices}, timeout_s=60)
            what = f"steps[{place}]"
            check_close(f"{what}: dense", session.read()["dense"], step["expect"]["dense"], dtype=dtype)
            check_close(f"{what}: sparse", session.read_rows("sparse"), step["expect"]["sparse"], dtype=dtype)
            _check_slots(what, session, step["slots"], dtype=dtype)


def replay_moving_average(case: Case, *, cluster: Cluster) -> None:
    """Replays one case of moving_average. Raises Mismatch.

    The original assigns the variable; here plain SGD with rate 1 gets the difference as its gradient.
    """
    averages = worker_client.moving_average(case["decay"], use_num_updates=case["use_num_updates"])
    with cluster.session() as session:
        session.create_or_join({"v": np.array(case["initial"])}, optimizer=worker_client.sgd(1.0), averages=averages)
        for place, step in enumerate(case["steps"]):
            session.step({"v": session.read()["v"] - np.array(step["value"])}, timeout_s=60)
            what = f"steps[{place}]"
            check_equal(f"{what}: num_updates", session.global_step, step["num_updates"])
            check_close(f"{what}: value", session.read()["v"], step["value"], dtype="float64")
            check_close(f"{what}: average", session.read_averages()["v"], step["expect"], dtype="float64")


def _check_slots(what: str, session: Session, slots: dict[str, Any], *, dtype: str) -> None:
    for name, (dense, sparse) in slots.items():
        check_close(f"{what}: slot {name} of dense", session.get_slot("dense", name), dense, dtype=dtype)
        check_close(f"{what}: slot {name} of sparse", session.get_slot("sparse", name), sparse, dtype=dtype)
