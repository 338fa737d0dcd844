"""Training programs in the style of tf.compat.v1.train, run by several workers in threads. Knows the facade; asserts nothing."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.in_process import InProcessCluster
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client.sync_replicas import (
    Graph,
    LossResult,
    MonitoredSession,
    MonitoredTrainingSession,
    SessionRunHook,
    TrainOp,
    TrainResult,
    get_variable,
)

SHAPES: dict[str, tuple[int, ...]] = {"weights": (4, 3), "bias": (3,)}


@dataclass(slots=True)
class Worker:
    """What one worker's program came to."""

    results: list[TrainResult] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


# Declares the training op and the hooks of one worker, given its index and the loss.
Build = Callable[[int, Callable[..., Any]], tuple[TrainOp, Sequence[Any]]]


def target_of(worker: int) -> dict[str, Any]:
    """Returns what this worker's own data would have the variables be."""
    return {name: np.random.default_rng((worker, index)).normal(size=shape) for index, (name, shape) in enumerate(SHAPES.items())}


def loss_of(worker: int) -> Callable[..., LossResult]:
    """Returns half the squared distance to the worker's target, with its gradient."""
    target = target_of(worker)

    def loss(variables: Any) -> LossResult:
        gradients = {name: variables[name] - target[name] for name in SHAPES}
        return LossResult(value=0.5 * sum(float((gradient**2).sum()) for gradient in gradients.values()), gradients=gradients)

    return loss


class Together(SessionRunHook):
    """Lets no worker train before all have their sessions: a fast one might be done before the others have come."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self._has_met = False

    def after_create_session(self, session: Any, coord: Any) -> None:
        if not self._has_met:
            self._has_met = True
            self._barrier.wait(30)


@contextmanager
def running_cluster(kind: str, *, directory: Path, num_ps: int = 2) -> Iterator[Any]:
    """Runs a cluster, "in process" or "grpc", and gives what `MonitoredTrainingSession` takes as its master."""
    if kind == "in process":
        yield InProcessCluster(num_ps=num_ps)
        return
    with ExitStack() as stack:
        yield ServedCluster(Shape(num_ps=num_ps), stack, directory=directory).chief_address


def train(master: Any, build: Build, *, num_workers: int, at_end: Callable[[MonitoredSession], Any] | None = None) -> list[Worker]:
    """Runs the program in one thread a worker, worker 0 being the chief, and returns what each came to. Raises the first error."""
    workers, barrier = [Worker() for _ in range(num_workers)], threading.Barrier(num_workers)

    def gated(index: int, loss: Callable[..., Any]) -> tuple[TrainOp, Sequence[Any]]:
        op, hooks = build(index, loss)
        return op, [*hooks, Together(barrier)]

    threads = [
        threading.Thread(target=_program, args=(master, gated, index, worker, at_end), daemon=True) for index, worker in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    assert not any(thread.is_alive() for thread in threads), "a worker is stuck"
    return workers


def _program(master: Any, build: Build, index: int, worker: Worker, at_end: Callable[[MonitoredSession], Any] | None) -> None:
    try:
        with Graph().as_default():
            for name, shape in SHAPES.items():
                get_variable(name, np.zeros(shape))
            op, hooks = build(index, loss_of(index))
            with MonitoredTrainingSession(master, index == 0, hooks=hooks, worker_index=index, max_wait_secs=30) as session:
                while not session.should_stop():
                    worker.results.append(session.run(op))
                worker.final = {"variables": session.read(), "at end": None if at_end is None else at_end(session)}
    except BaseException as error:
        worker.error = error
