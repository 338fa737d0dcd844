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
from worker_client.model.declarations import (
    Buffer,
    EmbeddingTable,
    IndexedSlices,
    Placement,
    UpdateFormula,
    Variable,
    clip_to,
    constant_initializer,
    custom_constraint,
    max_norm,
    non_negative,
    normal_initializer,
    uniform_initializer,
    unit_norm,
    zeros_initializer,
)
from worker_client.model.optimizers import (
    adadelta,
    adagrad,
    adagrad_da,
    adam,
    adamw,
    cosine_decay,
    custom_optimizer,
    delayed_nesterov,
    exponential_decay,
    ftrl,
    inverse_time_decay,
    lamb,
    lion,
    momentum,
    nadam,
    piecewise_constant,
    polynomial_decay,
    proximal_adagrad,
    proximal_sgd,
    rmsprop,
    sgd,
)
from worker_client.model.policies import async_policy, moving_average, outer_policy, ssp_policy, sync_policy
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
    "Buffer",
    "ClusterState",
    "ClusterStatus",
    "ConditionalAccumulator",
    "Constraint",
    "DiLoCo",
    "EmbeddingTable",
    "Follower",
    "IndexedSlices",
    "Initializer",
    "MetricReport",
    "Observer",
    "OptimizerSpec",
    "Part",
    "Placement",
    "PolicySpec",
    "PsError",
    "Publisher",
    "Push",
    "PushOutcome",
    "Schedule",
    "Security",
    "Session",
    "SparseConditionalAccumulator",
    "UpdateFormula",
    "Variable",
    "WireFormat",
    "WorkerMetric",
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adam",
    "adamw",
    "async_policy",
    "clip_to",
    "connect",
    "constant_initializer",
    "cosine_decay",
    "custom_constraint",
    "custom_optimizer",
    "delayed_nesterov",
    "exponential_decay",
    "fixed_size_partitioner",
    "follow",
    "ftrl",
    "inverse_time_decay",
    "lamb",
    "lion",
    "local",
    "max_norm",
    "min_max_variable_partitioner",
    "momentum",
    "moving_average",
    "nadam",
    "non_negative",
    "normal_initializer",
    "observe",
    "observe_local",
    "outer_optimizer",
    "outer_policy",
    "piecewise_constant",
    "polynomial_decay",
    "proximal_adagrad",
    "proximal_sgd",
    "publish",
    "rmsprop",
    "sgd",
    "ssp_policy",
    "sync_policy",
    "text_keys",
    "top_k",
    "uniform_initializer",
    "unit_norm",
    "variable_axis_size_partitioner",
    "zeros_initializer",
]


def __getattr__(name: str) -> Any:
    """Loads a module that is built on sessions when it is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
