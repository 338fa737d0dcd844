"""Watches a demo's cluster from a thread of its own: reads and evaluates the variables, and reads the status. Draws nothing."""

import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

import worker_client
from lockstep.demo.digits import Evaluation, Examples, evaluate
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind

# The state of a demo, as data.


_RATE_WINDOW_S = 3.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCounts:
    """One worker's contributions so far."""

    index: int
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DemoStatus:
    """The state of a demo at one moment. `loss` is over all training examples; `waiting_for` is empty while the cluster does not wait.

    `max_staleness`: the largest staleness of a contribution so far, in steps.
    """

    step: int
    elapsed_s: float
    loss: float
    test_accuracy: float
    steps_per_s: float
    num_stale: int
    num_late: int
    waiting_for: str
    workers: tuple[WorkerCounts, ...]
    max_staleness: int = 0


class Meter:
    """Makes a DemoStatus from each observation, with the steps per second over the last few seconds."""

    def __init__(self, *, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seen: deque[tuple[float, int]] = deque()

    def measure(self, *, train: Evaluation, test: Evaluation, step: int, cluster: ClusterStatus, elapsed_s: float) -> DemoStatus:
        """`step` is that of the variables that were evaluated."""
        self._seen.append((elapsed_s, step))
        while len(self._seen) > 2 and self._seen[0][0] < elapsed_s - _RATE_WINDOW_S:
            self._seen.popleft()
        (first_s, first_step), (last_s, last_step) = self._seen[0], self._seen[-1]
        workers = {one.index: one for one in cluster.participants if one.kind is ParticipantKind.WORKER}
        return DemoStatus(
            step=step,
            elapsed_s=elapsed_s,
            loss=train.loss,
            test_accuracy=test.accuracy,
            steps_per_s=(last_step - first_step) / (last_s - first_s) if last_s > first_s else 0.0,
            num_stale=cluster.num_stale,
            num_late=cluster.num_late,
            waiting_for=cluster.waiting_for if cluster.state is ClusterState.TRAINING else "",
            workers=tuple(
                WorkerCounts(
                    index=index,
                    num_accepted=workers[index].num_accepted,
                    num_stale=workers[index].num_stale,
                    num_late=workers[index].num_late,
                )
                if index in workers
                else WorkerCounts(index=index)
                for index in range(self._num_workers)
            ),
            max_staleness=cluster.max_observed_staleness,
        )


_PERIOD_S = 0.2
_CONNECT_TIMEOUT_S = 10.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The end of training: the final variables, and their evaluation."""

    status: DemoStatus
    variables: dict[str, Array]


class DemoObserver:
    """Updates its attributes from `start()` on. Any thread may read them."""

    def __init__(self, *, num_workers: int, train: Examples, test: Examples) -> None:
        self.status: DemoStatus | None = None
        self.trained: Trained | None = None
        self.error: PsError | None = None
        self._train, self._test = train, test
        self._meter = Meter(num_workers=num_workers)
        self._has_to_stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, chief_address: str, *, cluster: str, token_file: Path | None = None) -> None:
        """Starts to watch a cluster."""
        self._thread = threading.Thread(target=self._run, args=(chief_address, cluster, token_file), name="observer", daemon=True)
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Leaves the cluster; blocks for at most `timeout_s`."""
        self._has_to_stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, address: str, cluster: str, token_file: Path | None) -> None:
        try:
            security = None if token_file is None else worker_client.Security(token_file=token_file)
            with worker_client.observe(address, cluster=cluster, timeout_s=_CONNECT_TIMEOUT_S, security=security) as observer:
                self._watch(observer)
        except PsError as error:
            self.error = error

    def _watch(self, observer: worker_client.Observer) -> None:
        while observer.status().state in (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL):
            if self._has_to_stop.wait(_PERIOD_S):
                return
        start = time.monotonic()
        while not self._has_to_stop.wait(_PERIOD_S):
            # The status comes first: variables read after training has finished are final.
            cluster = observer.status()
            variables = observer.read()
            status = self._meter.measure(
                train=evaluate(variables, self._train.images, self._train.labels),
                test=evaluate(variables, self._test.images, self._test.labels),
                step=observer.step or 0,
                cluster=cluster,
                elapsed_s=time.monotonic() - start,
            )
            self.status = status
            if cluster.state is ClusterState.FINISHED:
                self.trained = Trained(status=status, variables={name: np.array(value) for name, value in variables.items()})
                return
