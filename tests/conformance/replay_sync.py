"""Replays a recorded training by SyncReplicasOptimizer, with one client a worker. Knows the format of its cases; starts no process."""

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np

from ps_protocol.roles.chief import Chief, ClusterStatus, FinishTrainingRequest, ParticipantKind
from tests.conformance.checking import check_close, check_equal
from tests.conformance.replay_training import optimizer_of
from tests.support.cluster.shape import Cluster, Shape
from worker_client import EmbeddingTable, IndexedSlices, Observer, Session

Case = dict[str, Any]

SETTLE_TIMEOUT_S = 60.0


def shape_of(case: Case) -> Shape:
    """Returns the cluster of a case."""
    return Shape(
        num_ps=case["ps_tasks"],
        num_workers=case["total_num_replicas"],
        replicas_to_aggregate=case["replicas_to_aggregate"],
        chief_flags=("--policy", "sync", "--tokens", "fifo", f"--num-tokens={case['num_tokens']}"),
    )


class _Worker:
    """One client in a thread of its own: it joins, and then does one step after the other as it is told to."""

    def __init__(self, index: int, cluster: Cluster, case: Case) -> None:
        self.index = index
        self.num_finished = 0
        self.local_step = 0
        self.joined: Future[None] = Future()
        self._step: Future[None] | None = None
        self._cluster = cluster
        self._case = case
        self._jobs: queue.SimpleQueue[tuple[Case, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"worker-{index}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether its step is under way. Raises what has failed in it."""
        if self._step is None or not self._step.done():
            return self._step is not None
        self._step.result()
        return False

    def begin(self, gradient: Case) -> None:
        """Begins a step."""
        self._step = Future()
        self._jobs.put((gradient, self._step))

    def close(self) -> None:
        """Ends the thread, after the step under way."""
        self._jobs.put(None)
        self._thread.join(SETTLE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with self._cluster.session(self.index) as session:
                values = {name: np.array(value, np.float32) for name, value in self._case["initial"].items()}
                session.create_or_join({**values, "vs": EmbeddingTable(values["vs"])}, optimizer=optimizer_of(self._case))
                self.joined.set_result(None)
                while (job := self._jobs.get()) is not None:
                    self._take_step(session, *job)
        except BaseException as error:
            if not self.joined.done():
                self.joined.set_exception(error)

    def _take_step(self, session: Session, gradient: Case, step: "Future[None]") -> None:
        rows = gradient["vs"]
        slices: Any = IndexedSlices(np.array(rows["indices"], np.int64), np.array(rows["values"], np.float32))
        dense = {name: np.array(gradient[name], np.float32) for name in ("v0", "v1")}
        try:
            result = session.step({**dense, "vs": slices})
            if not result.is_finished:
                self.num_finished += 1
                self.local_step = session.local_step
            step.set_result(None)
        except BaseException as error:
            step.set_exception(error)


def replay_sync_replicas(case: Case, *, cluster: Cluster) -> None:
    """Replays one case of sync_replicas: after each event everything must come to stand as it did in the original. Raises Mismatch."""
    with ExitStack() as stack:
        chief = cluster.client()
        workers = [_Worker(index, cluster, case) for index in range(case["total_num_replicas"])]
        for worker in workers:
            stack.callback(worker.close)
        # The end of training releases workers that are blocked.
        stack.callback(chief.call, FinishTrainingRequest(reason="the case is over"))
        for worker in workers:
            worker.joined.result(SETTLE_TIMEOUT_S)
        observer = cluster.observer()
        for place, event in enumerate(case["events"]):
            workers[event["worker"]].begin(event["gradient"])
            status = _settled(chief, workers)
            _check(f"events[{place}]", event["expect"], status, workers, observer)


def _settled(chief: Chief, workers: list[_Worker]) -> ClusterStatus:
    """Returns the cluster's status once nothing moves: no step is being applied, and each worker is free or waits at the chief."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        # First who is free, then who waits: what was seen as free begins nothing by itself.
        busy = {worker.index for worker in workers if worker.is_busy}
        status = chief.status()
        waiting = {p.index for p in status.participants if p.kind is ParticipantKind.WORKER and p.is_waiting}
        if busy == waiting and status.num_contributions < status.replicas_to_aggregate:
            return status
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster did not come to rest: busy {busy}, waiting {waiting}; {status.waiting_for}")
        threading.Event().wait(0.002)


def _check(what: str, expect: Case, status: ClusterStatus, workers: list[_Worker], observer: Observer) -> None:
    check_equal(f"{what}: global_step", status.global_step, expect["global_step"])
    check_equal(f"{what}: finished", [worker.num_finished for worker in workers], expect["finished"])
    check_equal(f"{what}: local_steps", [worker.local_step for worker in workers], expect["local_steps"])
    check_equal(f"{what}: blocked", [worker.is_busy for worker in workers], expect["blocked"])
    dense = observer.read()
    for name in ("v0", "v1"):
        check_close(f"{what}: {name}", dense[name], expect[name], dtype="float32")
    check_close(f"{what}: vs", observer.read_rows("vs"), expect["vs"], dtype="float32")
