"""Watches a demo's cluster from a thread of its own: reads the variables, evaluates them, asks for the status. Draws nothing."""

import threading
import time
from dataclasses import dataclass

import numpy as np

import worker_client
from lockstep.demo_progress import Progress, ProgressMeter
from lockstep.digits_examples import Examples
from lockstep.digits_model import evaluate
from ps_protocol.chief import ClusterState
from ps_protocol.errors import PsError
from ps_protocol.tensors import Array

_PERIOD_S = 0.2
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The end of training: the final variables, and how good they are."""

    progress: Progress
    variables: dict[str, Array]


class DemoObserver:
    """Call `start()`; then `progress`, `trained` and `error` are filled in as things happen. They may be read from any thread."""

    def __init__(self, chief_address: str, *, cluster: str, num_workers: int, train: Examples, test: Examples) -> None:
        self.progress: Progress | None = None
        self.trained: Trained | None = None
        self.error: PsError | None = None
        self._address = chief_address
        self._cluster = cluster
        self._train = train
        self._test = test
        self._meter = ProgressMeter(num_workers=num_workers)
        self._has_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Leaves the cluster; waits for that at most `timeout_s`."""
        self._has_to_stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with worker_client.observe(self._address, cluster=self._cluster, timeout_s=_CONNECT_TIMEOUT_S) as observer:
                self._watch(observer)
        except PsError as error:
            self.error = error

    def _watch(self, observer: "worker_client.Observer") -> None:
        while observer.status().state in (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL):
            if self._has_to_stop.wait(_PERIOD_S):
                return
        start = time.monotonic()
        while not self._has_to_stop.wait(_PERIOD_S):
            # Asked for first: what is read after training has finished is final.
            status = observer.status()
            variables = observer.read()
            progress = self._meter.measure(
                train=evaluate(variables, self._train.images, self._train.labels),
                test=evaluate(variables, self._test.images, self._test.labels),
                step=observer.step or 0,
                status=status,
                elapsed_s=time.monotonic() - start,
            )
            self.progress = progress
            if status.state is ClusterState.FINISHED:
                self.trained = Trained(progress=progress, variables={name: np.array(value) for name, value in variables.items()})
                return
