"""The SDK of Lockstep's workers: join a cluster, read variables, push gradients, wait for the step. `__all__` is the public surface.

import worker_client

with worker_client.connect() as session:
    session.create_or_join({"w": w, "b": b}, optimizer=worker_client.sgd(0.1))
    while not session.is_finished:
        variables = session.read()
        session.step({"w": ..., "b": ...})  # the gradients, arrays of the variables' shapes and types
"""

from ps_protocol.chief import ClusterState, ClusterStatus, PushOutcome
from ps_protocol.errors import PsError
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule
from worker_client.connect import connect, observe
from worker_client.local import local, observe_local
from worker_client.observer import Observer
from worker_client.optimizers import adagrad, adam, momentum, sgd
from worker_client.outcomes import Push, StepResult
from worker_client.schedules import cosine_decay, exponential_decay, inverse_time_decay, piecewise_constant, polynomial_decay
from worker_client.session import Session

__all__ = [
    "ClusterState",
    "ClusterStatus",
    "Observer",
    "OptimizerSpec",
    "PsError",
    "Push",
    "PushOutcome",
    "Schedule",
    "Session",
    "StepResult",
    "adagrad",
    "adam",
    "connect",
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "local",
    "momentum",
    "observe",
    "observe_local",
    "piecewise_constant",
    "polynomial_decay",
    "sgd",
]
