"""Watches a demo's cluster from a thread of its own: reads the variables, evaluates them, asks for the status. Draws nothing."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

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
    """From `start()` on the attributes are filled in as things happen. Any thread may read them."""

    def __init__(self, *, num_workers: int, train: Examples, test: Examples) -> None:
        self.progress: Progress | None = None
        self.trained: Trained | None = None
        self.error: PsError | None = None
        self._train, self._test = train, test
        self._meter = ProgressMeter(num_workers=num_workers)
        self._has_to_stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, chief_address: str, *, cluster: str, token_file: Path | None = None) -> None:
        """Begins to watch a cluster."""
        self._thread = threading.Thread(target=self._run, args=(chief_address, cluster, token_file), name="observer", daemon=True)
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Leaves the cluster; waits for that at most `timeout_s`."""
        self._has_to_stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, address: str, cluster: str, token_file: Path | None) -> None:
        try:
            with worker_client.observe(address, cluster=cluster, timeout_s=_CONNECT_TIMEOUT_S, token_file=token_file) as observer:
                self._watch(observer)
        except PsError as error:
            self.error = error

    def _watch(self, observer: worker_client.Observer) -> None:
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
