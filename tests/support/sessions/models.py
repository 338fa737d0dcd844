"""The models that worker processes of tests join: arguments of `create_or_join`, by a name. Knows the public SDK; no test."""

from collections.abc import Callable
from typing import Any

import numpy as np

import worker_client

WIDTH, NUM_FEW, NUM_MANY = 16, 2_000, 200_000


def large() -> dict[str, Any]:
    """One variable of 16 blocks of the kernel, so that two updates of it take long enough to overlap; each update takes 1 away."""
    return {"initial_values": {"w": np.zeros(1 << 20, np.float32)}, "optimizer": worker_client.sgd(1.0)}


def counting() -> dict[str, Any]:
    """Variables on two servers, of whose every element each step takes exactly 1 away, and one that counts contributions."""
    halves = worker_client.fixed_size_partitioner(2)
    values: dict[str, Any] = {
        "a": np.zeros(3),
        "b": np.zeros((40, 5), np.float32),
        "rows": worker_client.EmbeddingTable((30, 2), partitioner=halves),
        "count": worker_client.Buffer(np.zeros(()), "add"),
    }
    return {"initial_values": values, "optimizer": worker_client.sgd(1.0)}


def limited() -> dict[str, Any]:
    """The same with a limit on the gradients' norm that is never reached: it makes a step two moves of the servers instead of one."""
    return {**counting(), "clip_global_norm": 1e9}


def ones() -> tuple[dict[str, Any], dict[str, Any]]:
    """What a worker contributes to each step of `counting`: gradients and updates."""
    gradients = {"a": np.ones(3), "b": np.ones((40, 5), np.float32), "rows": np.ones((30, 2), np.float32)}
    return gradients, {"count": np.float64(1)}


def embeddings() -> dict[str, Any]:
    """Two tables of very different length, each over both servers, which also make their first values; and nothing dense."""
    halves = worker_client.fixed_size_partitioner(2)
    start = worker_client.uniform_initializer(-1.0, 1.0, seed=5)
    tables: dict[str, Any] = {
        "few": worker_client.EmbeddingTable((NUM_FEW, WIDTH), initializer=start, partitioner=halves),
        "many": worker_client.EmbeddingTable(
            (NUM_MANY, WIDTH), initializer=start, partitioner=halves, optimizer=worker_client.adagrad(0.1)
        ),
    }
    return {"initial_values": tables, "optimizer": worker_client.adam(0.01, lazy=True)}


def one_table() -> dict[str, Any]:
    """A table over both servers of which each step takes 1 away from every element."""
    table = worker_client.EmbeddingTable(
        (20_000, WIDTH), initializer=worker_client.zeros_initializer(), partitioner=worker_client.fixed_size_partitioner(2)
    )
    return {"initial_values": {"table": table}, "optimizer": worker_client.sgd(1.0)}


def statistics() -> dict[str, Any]:
    """Variables that take gradients, always and now and then, beside state of each kind; averages of the first two."""
    values: dict[str, Any] = {
        "always": np.zeros(3),
        "sometimes": np.zeros((2, 2)),
        "last_mean": worker_client.Buffer(np.zeros(2)),
        "seen": worker_client.Buffer(np.zeros(()), "add"),
        "running_mean": worker_client.Buffer(np.zeros(2), "moving_average", decay=0.75),
    }
    averages = worker_client.moving_average(0.9, use_num_updates=True)
    return {"initial_values": values, "optimizer": worker_client.momentum(0.5, momentum=0.5), "averages": averages}


def contribution(worker: int, step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[float, float]]]:
    """What a worker contributes to a step of `statistics`: gradients, updates of state, and metrics with their weights."""
    number = 1.0 + worker + step % 5
    sometimes = np.full((2, 2), number) if (worker + step) % 3 == 0 else None
    updates = {"seen": np.float64(10 * (worker + 1)), "running_mean": np.full(2, number)}
    if worker != step % 2:
        updates["last_mean"] = np.full(2, -number)
    return {"always": np.full(3, number), "sometimes": sometimes}, updates, {"loss": (number, worker + 1.0)}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "large": large,
    "counting": counting,
    "limited": limited,
    "embeddings": embeddings,
    "one_table": one_table,
    "statistics": statistics,
}
