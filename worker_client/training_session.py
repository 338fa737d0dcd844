"""The seam to a worker's session, as far as the facade uses it, and how a `master` becomes one. Knows no graph and no hook."""

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from ps_protocol.averages import AverageSpec
from ps_protocol.chief import ClusterStatus, PushOutcome
from ps_protocol.errors import InternalError
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.tensors import Array


class StepReport(Protocol):
    """What a session tells of a step."""

    @property
    def outcome(self) -> PushOutcome:
        """What became of the contribution."""

    @property
    def step(self) -> int:
        """The step of the variables that it was computed from."""

    @property
    def applied_step(self) -> int | None:
        """The step that it is a part of."""

    @property
    def staleness(self) -> int:
        """How many steps were applied in between."""


class TrainingSession(Protocol):
    """What the facade asks of a session; `worker_client.Session` is one. Its docstrings say what each does."""

    def __enter__(self) -> Self:
        """Returns itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leaves, and tells the chief of the error."""

    @property
    def worker_index(self) -> int:
        """The worker's index."""

    @property
    def local_step(self) -> int:
        """The step of the variables."""

    @property
    def global_step(self) -> int:
        """The newest step heard of."""

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""

    def create_or_join(
        self,
        initial_values: Mapping[str, Any],
        *,
        optimizer: OptimizerSpec,
        averages: AverageSpec | None = None,
        create: bool = True,
        timeout_s: float | None = None,
    ) -> bool:
        """Creates or joins the model."""

    def read(self, *, copy: bool = False) -> dict[str, Array]:
        """Reads the dense variables."""

    def read_rows(self, name: str, indices: Any = None) -> Array:
        """Reads rows of a table."""

    def step(self, gradients: Any, *, updates: Any = None, metrics: Any = None) -> StepReport:
        """Pushes, waits, reads."""

    def read_averages(self, names: Any = None) -> dict[str, Array]:
        """Reads moving averages."""

    def get_slot(self, variable: str, slot: str) -> Array:
        """Reads a slot."""

    def set_policy(self, policy: PolicySpec, *, timeout_s: float | None = None) -> int:
        """Changes how workers are coordinated."""

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""

    def finish(self, reason: str = "") -> int:
        """Ends the training of all workers."""

    def close(self) -> None:
        """Leaves."""


# Called with the worker's index (None: any) and whether whoever holds that index is to be pushed aside.
Opener = Callable[[int | None, bool], TrainingSession]


def opener_of(master: Any) -> Opener:
    """Returns how to open sessions at `master`, which `MonitoredTrainingSession` describes. Opens nothing yet."""
    if callable(master):
        return master  # type: ignore[no-any-return]  # the caller's promise
    if hasattr(master, "chief") and hasattr(master, "shards"):
        return lambda index, takeover: _local(master, index, takeover)
    if not master and not os.environ.get("LOCKSTEP_CHIEF") and not os.environ.get("TF_CONFIG"):
        return _private_cluster()
    if master and not isinstance(master, str):
        raise ValueError(f"master: got {master!r}, want 'host:port' or 'unix:/path' of the chief, '' or a cluster inside this process")
    return lambda index, takeover: _connected(master or None, index, takeover)


def _connected(chief: str | None, index: int | None, takeover: bool) -> TrainingSession:
    from worker_client.opening_over_grpc import connect

    return connect(chief, worker_index=index, takeover=takeover)


def _local(cluster: Any, index: int | None, takeover: bool) -> TrainingSession:
    from worker_client.opening_in_process import local

    return local(cluster, worker_index=index, takeover=takeover)


def _private_cluster() -> Opener:
    def opened(index: int | None, takeover: bool) -> TrainingSession:
        from worker_client.opening_in_process import local

        if takeover:
            raise InternalError("the cluster inside this process belongs to one session, and that has failed; make a new session")
        return local(worker_index=index)

    return opened
