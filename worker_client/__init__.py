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

from ps_protocol.averages import AverageSpec
from ps_protocol.chief import ClusterState, ClusterStatus, PushOutcome
from ps_protocol.errors import PsError
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule
from ps_protocol.partitioners import fixed_size_partitioner, min_max_variable_partitioner, variable_axis_size_partitioner
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.variable_options import Constraint, Initializer
from worker_client.observer import Observer
from worker_client.opening_in_process import local, observe_local
from worker_client.opening_over_grpc import connect, observe
from worker_client.optimizers import adadelta, adagrad, adagrad_da, adam, ftrl, momentum, proximal_adagrad, proximal_sgd, rmsprop, sgd
from worker_client.outcomes import MetricReport, Push, StepResult, WorkerMetric
from worker_client.placements import Placement
from worker_client.policies import async_policy, moving_average, ssp_policy, sync_policy
from worker_client.schedules import cosine_decay, exponential_decay, inverse_time_decay, piecewise_constant, polynomial_decay
from worker_client.session import Session
from worker_client.variables import (
    IndexedSlices,
    State,
    Table,
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
from worker_client.wire_format import WireFormat, top_k

# What is built on a session is loaded when it is first asked for: module to its names. The imports below are for type checkers.
_LAZY_MODULES = (
    ("worker_client.accumulators", "ConditionalAccumulator SparseConditionalAccumulator"),
    ("worker_client.estimator", "DNNClassifier"),
    ("worker_client.graph", "Graph ModelVariable default_graph reset_default_graph get_variable trainable_variables"),
    ("worker_client.graph", "global_variables create_global_step get_global_step get_or_create_global_step"),
    ("worker_client.graph", "LossResult"),
    ("worker_client.train_op", "TrainOp TrainResult map_gradients"),
    ("worker_client.optimizer_facade", "Optimizer as_optimizer"),
    (
        "worker_client.optimizer_facade_kinds",
        "GradientDescentOptimizer MomentumOptimizer AdagradOptimizer AdagradDAOptimizer AdamOptimizer",
    ),
    ("worker_client.optimizer_facade_kinds", "RMSPropOptimizer AdadeltaOptimizer FtrlOptimizer ProximalGradientDescentOptimizer"),
    ("worker_client.optimizer_facade_kinds", "ProximalAdagradOptimizer"),
    ("worker_client.sync_replicas", "SyncReplicasOptimizer"),
    ("worker_client.averages_facade", "ExponentialMovingAverage restored_values"),
    ("worker_client.monitored_session", "MonitoredTrainingSession MonitoredSession"),
    ("worker_client.hooks", "SessionRunHook SessionRunArgs SessionRunContext SessionRunValues Coordinator"),
    (
        "worker_client.hooks_standard",
        "StopAtStepHook LoggingTensorHook StepCounterHook NanTensorHook NanLossDuringTrainingError FeedFnHook",
    ),
    ("worker_client.hooks_standard", "FinalOpsHook SecondOrStepTimer"),
    ("worker_client.hooks_saving", "CheckpointSaverHook CheckpointSaverListener SummarySaverHook"),
    ("worker_client.worker_checkpoint", "latest_checkpoint load_checkpoint"),
)
_LAZY = {name: module for module, names in _LAZY_MODULES for name in names.split()}

if TYPE_CHECKING:
    from worker_client.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
    from worker_client.averages_facade import ExponentialMovingAverage, restored_values
    from worker_client.estimator import DNNClassifier as DNNClassifier  # not in __all__: it needs scikit-learn
    from worker_client.graph import (
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
    from worker_client.hooks import Coordinator, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
    from worker_client.hooks_saving import CheckpointSaverHook, CheckpointSaverListener, SummarySaverHook
    from worker_client.hooks_standard import (
        FeedFnHook,
        FinalOpsHook,
        LoggingTensorHook,
        NanLossDuringTrainingError,
        NanTensorHook,
        SecondOrStepTimer,
        StepCounterHook,
        StopAtStepHook,
    )
    from worker_client.monitored_session import MonitoredSession, MonitoredTrainingSession
    from worker_client.optimizer_facade import Optimizer, as_optimizer
    from worker_client.optimizer_facade_kinds import (
        AdadeltaOptimizer,
        AdagradDAOptimizer,
        AdagradOptimizer,
        AdamOptimizer,
        FtrlOptimizer,
        GradientDescentOptimizer,
        MomentumOptimizer,
        ProximalAdagradOptimizer,
        ProximalGradientDescentOptimizer,
        RMSPropOptimizer,
    )
    from worker_client.sync_replicas import SyncReplicasOptimizer
    from worker_client.train_op import TrainOp, TrainResult, map_gradients
    from worker_client.worker_checkpoint import latest_checkpoint, load_checkpoint

__all__ = [
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AverageSpec",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "ClusterState",
    "ClusterStatus",
    "ConditionalAccumulator",
    "Constraint",
    "Coordinator",
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
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "SparseConditionalAccumulator",
    "State",
    "StepCounterHook",
    "StepResult",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "Table",
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
