"""A worker that learns the digits at a set pace, for both suites of this folder. Knows the demo's network and one session; no policy."""

import threading
import time
from collections.abc import Callable
from typing import Any

import worker_client
from benchmarks.harness.processes import Cluster
from benchmarks.harness.worker import Station
from lockstep.demo.digits import Examples, initial_values, load_digits, split
from lockstep.launcher.spec import ClusterSpec
from worker_client import Session

BATCH_SIZE = 32
_SEED = 7
_TIMEOUT_S = 600.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def learn(station: Station, train: Callable[[Session, Examples, Examples], Any], *, learning_rate: float, num_workers: int) -> None:
    """Joins, begins with the others, calls `train` with the session, this worker's examples and the test ones, and reports its result."""
    examples, test = split(load_digits())
    with worker_client.connect() as session:
        session.create_or_join(initial_values(seed=_SEED), optimizer=worker_client.sgd(learning_rate))
        station.await_go()
        report = train(session, examples.part(session.worker_index, num_parts=num_workers), test)
        station.say("done", report=report)


def keep_pace(began: float, *, pace_s: float) -> None:
    """Waits until `pace_s` seconds have passed since `began`, of the monotonic clock."""
    threading.Event().wait(max(0.0, pace_s - (time.monotonic() - began)))


def run_workers(spec: ClusterSpec, module: str, work: object) -> list[dict[str, Any]]:
    """Trains with processes for all roles, each with one thread for its arithmetic; returns the workers' reports. Raises LaunchFailed."""
    with Cluster(spec) as cluster:
        cluster.local.start_roles(environment=ONE_THREAD)
        cluster.start_workers(module, work, environment=ONE_THREAD)
        cluster.processes.await_events("up", spec.num_workers, timeout_s=_TIMEOUT_S)
        cluster.processes.go()
        cluster.processes.await_events("done", spec.num_workers, timeout_s=_TIMEOUT_S)
        return [event["report"] for event in cluster.processes.by_process("done")]
