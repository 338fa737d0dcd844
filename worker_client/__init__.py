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
from worker_client.model.declarations import (
    Buffer,
    EmbeddingTable,
    IndexedSlices,
    Placement,
    Variable,
    clip_to,
    constant_initializer,
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
    cosine_decay,
    exponential_decay,
    ftrl,
    inverse_time_decay,
    momentum,
    piecewise_constant,
    polynomial_decay,
    proximal_adagrad,
    proximal_sgd,
    rmsprop,
    sgd,
)
from worker_client.model.policies import async_policy, moving_average, ssp_policy, sync_policy
from worker_client.model.wire_format import WireFormat, top_k
from worker_client.opening import connect, local, observe, observe_local
from worker_client.session.observer import Observer
from worker_client.session.outcomes import MetricReport, Push, WorkerMetric
from worker_client.session.session import Session

# What is built on a session is loaded when it is first asked for: module to its names. The imports below are for type checkers.
_LAZY_MODULES = (
    ("worker_client.accumulators", "ConditionalAccumulator SparseConditionalAccumulator"),
    ("worker_client.estimator", "DNNClassifier"),
    ("worker_client.sync_replicas.graph", "Graph ModelVariable default_graph reset_default_graph get_variable trainable_variables"),
    ("worker_client.sync_replicas.graph", "global_variables create_global_step get_global_step get_or_create_global_step"),
    ("worker_client.sync_replicas.graph", "LossResult"),
    ("worker_client.sync_replicas.optimizers", "TrainOp TrainResult map_gradients"),
    ("worker_client.sync_replicas.optimizers", "Optimizer as_optimizer"),
    (
        "worker_client.sync_replicas.optimizers",
        "GradientDescentOptimizer MomentumOptimizer AdagradOptimizer AdagradDAOptimizer AdamOptimizer",
    ),
    ("worker_client.sync_replicas.optimizers", "RMSPropOptimizer AdadeltaOptimizer FtrlOptimizer ProximalGradientDescentOptimizer"),
    ("worker_client.sync_replicas.optimizers", "ProximalAdagradOptimizer"),
    ("worker_client.sync_replicas.replicas_optimizer", "SyncReplicasOptimizer"),
    ("worker_client.sync_replicas.averages", "ExponentialMovingAverage restored_values"),
    ("worker_client.sync_replicas.session", "MonitoredTrainingSession MonitoredSession"),
    ("worker_client.sync_replicas.hooks", "SessionRunHook SessionRunArgs SessionRunContext SessionRunValues Coordinator"),
    (
        "worker_client.sync_replicas.hooks",
        "StopAtStepHook LoggingTensorHook StepCounterHook NanTensorHook NanLossDuringTrainingError FeedFnHook",
    ),
    ("worker_client.sync_replicas.hooks", "FinalOpsHook SecondOrStepTimer"),
    ("worker_client.sync_replicas.saving", "CheckpointSaverHook CheckpointSaverListener SummarySaverHook"),
    ("worker_client.sync_replicas.saving", "latest_checkpoint load_checkpoint"),
)
_LAZY = {name: module for module, names in _LAZY_MODULES for name in names.split()}

if TYPE_CHECKING:
    from worker_client.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
    from worker_client.estimator import DNNClassifier as DNNClassifier  # not in __all__: it needs scikit-learn
    from worker_client.sync_replicas.averages import ExponentialMovingAverage, restored_values
    from worker_client.sync_replicas.graph import (
        Graph,
        LossResult,
        ModelVariable,
        create_global_step,
        default_graph,
        get_global_step,
        get_or_create_global_step,
        get_variable,
        global_variables,
        reset_default_graph,
        trainable_variables,
    )
    from worker_client.sync_replicas.hooks import (
        Coordinator,
        FeedFnHook,
        FinalOpsHook,
        LoggingTensorHook,
        NanLossDuringTrainingError,
        NanTensorHook,
        SecondOrStepTimer,
        SessionRunArgs,
        SessionRunContext,
        SessionRunHook,
        SessionRunValues,
        StepCounterHook,
        StopAtStepHook,
    )
    from worker_client.sync_replicas.optimizers import (
        AdadeltaOptimizer,
        AdagradDAOptimizer,
        AdagradOptimizer,
        AdamOptimizer,
        FtrlOptimizer,
        GradientDescentOptimizer,
        MomentumOptimizer,
        Optimizer,
        ProximalAdagradOptimizer,
        ProximalGradientDescentOptimizer,
        RMSPropOptimizer,
        TrainOp,
        TrainResult,
        as_optimizer,
        map_gradients,
    )
    from worker_client.sync_replicas.replicas_optimizer import SyncReplicasOptimizer
    from worker_client.sync_replicas.saving import (
        CheckpointSaverHook,
        CheckpointSaverListener,
        SummarySaverHook,
        latest_checkpoint,
        load_checkpoint,
    )
    from worker_client.sync_replicas.session import MonitoredSession, MonitoredTrainingSession

__all__ = [
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AverageSpec",
    "Buffer",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "ClusterState",
    "ClusterStatus",
    "ConditionalAccumulator",
    "Constraint",
    "Coordinator",
    "EmbeddingTable",
    "ExponentialMovingAverage",
    "FeedFnHook",
    "FinalOpsHook",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "Graph",
    "IndexedSlices",
    "Initializer",
    "LoggingTensorHook",
    "LossResult",
    "MetricReport",
    "ModelVariable",
    "MomentumOptimizer",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "Observer",
    "Optimizer",
    "OptimizerSpec",
    "Placement",
    "PolicySpec",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "PsError",
    "Push",
    "PushOutcome",
    "RMSPropOptimizer",
    "Schedule",
    "SecondOrStepTimer",
    "Security",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SparseConditionalAccumulator",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "TrainOp",
    "TrainResult",
    "Variable",
    "WireFormat",
    "WorkerMetric",
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adam",
    "as_optimizer",
    "async_policy",
    "clip_to",
    "connect",
    "constant_initializer",
    "cosine_decay",
    "create_global_step",
    "default_graph",
    "exponential_decay",
    "fixed_size_partitioner",
    "ftrl",
    "get_global_step",
    "get_or_create_global_step",
    "get_variable",
    "global_variables",
    "inverse_time_decay",
    "latest_checkpoint",
    "load_checkpoint",
    "local",
    "map_gradients",
    "max_norm",
    "min_max_variable_partitioner",
    "momentum",
    "moving_average",
    "non_negative",
    "normal_initializer",
    "observe",
    "observe_local",
    "piecewise_constant",
    "polynomial_decay",
    "proximal_adagrad",
    "proximal_sgd",
    "reset_default_graph",
    "restored_values",
    "rmsprop",
    "sgd",
    "ssp_policy",
    "sync_policy",
    "top_k",
    "trainable_variables",
    "uniform_initializer",
    "unit_norm",
    "variable_axis_size_partitioner",
    "zeros_initializer",
]


def __getattr__(name: str) -> Any:
    """Loads what is built on a session when it is first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
