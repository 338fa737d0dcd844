"""Watches a demo's cluster from a thread of its own: reads the variables, evaluates them, asks for the status. Draws nothing."""

import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import worker_client
from lockstep.demo_progress import Progress, ProgressMeter
from lockstep.digits_examples import Examples, ExamplesMissing, load_digits, save_digits, split
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
    """Call `start()`, later `connect()`; then the attributes are filled in as things happen. Any thread may read them."""

    def __init__(self, *, num_workers: int, digits_path: Path) -> None:
        self.progress: Progress | None = None
        self.trained: Trained | None = None
        self.error: PsError | ExamplesMissing | None = None
        self.has_examples = False
        self.digits_path = digits_path
        self._target: queue.SimpleQueue[tuple[str, str, Path | None] | None] = queue.SimpleQueue()
        self._meter = ProgressMeter(num_workers=num_workers)
        self._has_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def start(self) -> None:
        """Begins to load the examples, which takes a second, and to write them to `digits_path` for the workers; then `has_examples`."""
        self._thread.start()

    def connect(self, chief_address: str, *, cluster: str, token_file: Path | None = None) -> None:
        """Begins to watch a cluster."""
        self._target.put((chief_address, cluster, token_file))

    def stop(self, *, timeout_s: float) -> None:
        """Leaves the cluster; waits for that at most `timeout_s`."""
        self._has_to_stop.set()
        self._target.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            rows = load_digits()
            save_digits(rows, path=self.digits_path)
            train, test = split(rows)
            self.has_examples = True
            target = self._target.get()
            if target is not None:
                address, cluster, token_file = target
                with worker_client.observe(address, cluster=cluster, timeout_s=_CONNECT_TIMEOUT_S, token_file=token_file) as observer:
                    self._watch(observer, train=train, test=test)
        except (PsError, ExamplesMissing) as error:
            self.error = error

    def _watch(self, observer: worker_client.Observer, *, train: Examples, test: Examples) -> None:
        while observer.status().state in (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL):
            if self._has_to_stop.wait(_PERIOD_S):
                return
        start = time.monotonic()
        while not self._has_to_stop.wait(_PERIOD_S):
            # Asked for first: what is read after training has finished is final.
            status = observer.status()
            variables = observer.read()
            progress = self._meter.measure(
                train=evaluate(variables, train.images, train.labels),
                test=evaluate(variables, test.images, test.labels),
                step=observer.step or 0,
                status=status,
                elapsed_s=time.monotonic() - start,
            )
            self.progress = progress
            if status.state is ClusterState.FINISHED:
                self.trained = Trained(progress=progress, variables={name: np.array(value) for name, value in variables.items()})
                return
