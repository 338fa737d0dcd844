"""A cluster and its sessions for tests of the facade: gradient descent at rate 1, in memory. Knows the facade's calls; no server."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from ps_protocol.errors import PsError
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ClusterState, PushOutcome
from worker_client.sync_replicas import GradientDescentOptimizer, SessionRunArgs, SessionRunHook, TrainOp, get_or_create_global_step


class FakeCluster:
    """What outlives a session: variables, the step, the policy, and a record of what was asked. Itself an opener."""

    def __init__(self) -> None:
        self.variables: dict[str, Array] = {}
        self.averaged: tuple[str, ...] = ()
        self.global_step = 0
        self.policy = PolicySpec()
        self.is_finished = False
        self.pushes: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.opened: list[int | None] = []
        # Errors of the next steps.
        self.faults: list[PsError] = []

    def __call__(self, worker_index: int | None) -> "FakeSession":
        self.opened.append(worker_index)
        return FakeSession(self)


class FakeSession:
    """One worker's session of a FakeCluster."""

    worker_index = 3

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.is_closed = False
        self.num_reads = 0
        self.failure: BaseException | None = None

    def __enter__(self) -> "FakeSession":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.failure = error
        self.close()

    @property
    def local_step(self) -> int:
        return self.cluster.global_step

    @property
    def global_step(self) -> int:
        return self.cluster.global_step

    @property
    def is_finished(self) -> bool:
        return self.cluster.is_finished

    def create_or_join(
        self, initial_values: Any, *, optimizer: Any, averages: Any = None, create: bool = True, timeout_s: float | None = None
    ) -> bool:
        self.cluster.asked.append(f"model create={create}")
        is_new = not self.cluster.variables
        if is_new:
            self.cluster.averaged = () if averages is None else averages.variables
            self.cluster.variables = {name: np.array(getattr(value, "value", value)) for name, value in initial_values.items()}
        return is_new

    def read(self, *, copy: bool = False) -> dict[str, Array]:
        self.num_reads += 1
        return {name: value.copy() if copy else value for name, value in self.cluster.variables.items()}

    def read_rows(self, name: str, indices: Any = None) -> Array:
        return np.zeros((2, 2))

    def step(self, gradients: Any, *, updates: Any = None, metrics: Any = None) -> Any:
        if self.cluster.faults:
            raise self.cluster.faults.pop(0)
        step = self.cluster.global_step
        self.cluster.pushes.append({"gradients": gradients, "updates": updates, "metrics": metrics})
        for name, gradient in gradients.items():
            if gradient is not None:
                self.cluster.variables[name] = self.cluster.variables[name] - gradient
        self.cluster.global_step += 1
        return SimpleNamespace(outcome=PushOutcome.ACCEPTED, step=step, applied_step=step, staleness=0)

    def read_averages(self, names: Any = None) -> dict[str, Array]:
        return {name: self.cluster.variables[name] / 2 for name in (names or self.cluster.averaged)}

    def get_slot(self, variable: str, slot: str) -> Array:
        return np.full_like(self.cluster.variables[variable], 7.0)

    def set_policy(self, policy: PolicySpec, *, timeout_s: float | None = None) -> int:
        self.cluster.policy = policy
        self.cluster.asked.append(f"policy {policy.text} {policy.num_tokens}")
        return self.cluster.global_step

    def status(self, *, max_ledger_entries: int = 0) -> Any:
        state = ClusterState.TRAINING if self.cluster.variables else ClusterState.WAITING_FOR_MODEL
        policy = self.cluster.policy
        return SimpleNamespace(
            state=state,
            policy=policy,
            replicas_to_aggregate=policy.replicas_to_aggregate,
            total_num_replicas=policy.total_num_replicas,
        )

    def finish(self, reason: str = "", timeout_s: float | None = None) -> int:
        self.cluster.is_finished = True
        self.cluster.asked.append("finish")
        return self.cluster.global_step

    def close(self) -> None:
        self.is_closed = True


def quadratic(target: float = 1.0, name: str = "w") -> Callable[..., Any]:
    """A loss with its gradient: half the squared distance of a variable to a number."""

    def loss(variables: Any) -> Any:
        difference = variables[name] - target
        return 0.5 * float((difference**2).sum()), {name: difference}

    return loss


def train_op(loss: Callable[..., Any] | None = None) -> TrainOp:
    """The op of gradient descent at rate 1 on a loss; by default the quadratic one."""
    return GradientDescentOptimizer(1.0).minimize(loss or quadratic(), get_or_create_global_step())


class Recording(SessionRunHook):
    def __init__(self, record: list[str], *, stop_at: int = 10**9) -> None:
        self.record, self.stop_at = record, stop_at

    def begin(self) -> None:
        self.record.append("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.record.append(f"created w={session.run('w').tolist()}")

    def before_run(self, run_context: Any) -> SessionRunArgs:
        self.record.append("before")
        return SessionRunArgs({"step": "global_step"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.record.append(f"after {run_values.results['step']}")
        if run_values.results["step"] >= self.stop_at:
            run_context.request_stop()

    def end(self, session: Any) -> None:
        self.record.append(f"end w={session.run('w').tolist()}")
