"""The SDK of Lockstep's workers: join a cluster, read variables, push gradients, wait for the step. `__all__` is the public surface.

import worker_client

with worker_client.connect() as session:
    session.create_or_join({"w": w, "b": b}, optimizer=worker_client.sgd(0.1))
    while not session.is_finished:
        variables = session.read()
        session.step({"w": ..., "b": ...})  # the gradients, arrays of the variables' shapes and types
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ps_protocol.errors import PsError
from ps_protocol.model.keys import text_keys
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import AverageSpec
from ps_protocol.model.variables import (
    Constraint,
    Initializer,
    fixed_size_partitioner,
    min_max_variable_partitioner,
    variable_axis_size_partitioner,
)
from ps_protocol.roles.chief import ClusterState, ClusterStatus, PushOutcome
from ps_protocol.security.options import Security
from worker_client.core.outcomes import MetricReport, Push, WorkerMetric
from worker_client.model import declarations, optimizers, policies
from worker_client.model.declarations import *  # noqa: F403 (its __all__ says what)
from worker_client.model.optimizers import *  # noqa: F403 (its __all__ says what)
from worker_client.model.policies import *  # noqa: F403 (its __all__ says what)
from worker_client.model.wire_format import WireFormat, top_k
from worker_client.opening import connect, local, observe, observe_local
from worker_client.session.observer import Observer
from worker_client.session.session import Session

# What is built on a session is loaded when it is first asked for: name to module. The imports below are for type checkers.
_LAZY = {
    "ConditionalAccumulator": "worker_client.accumulators",
    "SparseConditionalAccumulator": "worker_client.accumulators",
    "DiLoCo": "worker_client.outer",
    "outer_optimizer": "worker_client.outer",
    "follow": "worker_client.following.follow",
    "Follower": "worker_client.following.follower",
    "Part": "worker_client.following.follower",
    "Publisher": "worker_client.following.publisher",
    "publish": "worker_client.following.publisher",
    "DNNClassifier": "worker_client.estimator",
    "DNNRegressor": "worker_client.estimator",
}

if TYPE_CHECKING:
    from worker_client.accumulators import ConditionalAccumulator, SparseConditionalAccumulator

    # Not in __all__: they need scikit-learn.
    from worker_client.estimator import DNNClassifier as DNNClassifier
    from worker_client.estimator import DNNRegressor as DNNRegressor
    from worker_client.following.follow import follow
    from worker_client.following.follower import Follower, Part
    from worker_client.following.publisher import Publisher, publish
    from worker_client.outer import DiLoCo, outer_optimizer

__all__ = [
    "AverageSpec",
    "ClusterState",
    "ClusterStatus",
    "ConditionalAccumulator",
    "Constraint",
    "DiLoCo",
    "Follower",
    "Initializer",
    "MetricReport",
    "Observer",
    "OptimizerSpec",
    "Part",
    "PolicySpec",
    "PsError",
    "Publisher",
    "Push",
    "PushOutcome",
    "Schedule",
    "Security",
    "Session",
    "SparseConditionalAccumulator",
    "WireFormat",
    "WorkerMetric",
    "connect",
    "fixed_size_partitioner",
    "follow",
    "local",
    "min_max_variable_partitioner",
    "observe",
    "observe_local",
    "outer_optimizer",
    "publish",
    "text_keys",
    "top_k",
    "variable_axis_size_partitioner",
    *declarations.__all__,
    *optimizers.__all__,
    *policies.__all__,
]


def __getattr__(name: str) -> Any:
    """Loads a module that is built on sessions when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
