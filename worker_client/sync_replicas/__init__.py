"""The API of tf.compat.v1.train, on top of a session: graph, optimizers, SyncReplicasOptimizer, monitored sessions, hooks.

Knows the public interface of sessions; no server and no transport. `graph`: declarations, and evaluating a run. `gradients`: handles of
gradients, and the op that pushes them. `optimizers`: the ten optimizers. `replicas_optimizer`: SyncReplicasOptimizer. `session`:
MonitoredTrainingSession. `hooks` and `saving`: the ready-made hooks. `averages`: ExponentialMovingAverage.
"""

from worker_client.sync_replicas.averages import ExponentialMovingAverage, restored_values
from worker_client.sync_replicas.gradients import (
    TrainOp,
    TrainResult,
    map_gradients,
)
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
    as_optimizer,
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
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Coordinator",
    "ExponentialMovingAverage",
    "FeedFnHook",
    "FinalOpsHook",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "Graph",
    "LoggingTensorHook",
    "LossResult",
    "ModelVariable",
    "MomentumOptimizer",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "Optimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "TrainOp",
    "TrainResult",
    "as_optimizer",
    "create_global_step",
    "default_graph",
    "get_global_step",
    "get_or_create_global_step",
    "get_variable",
    "global_variables",
    "latest_checkpoint",
    "load_checkpoint",
    "map_gradients",
    "reset_default_graph",
    "restored_values",
    "trainable_variables",
]
