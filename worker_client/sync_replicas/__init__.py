"""The API of tf.compat.v1.train, on top of a session: graph, optimizers, SyncReplicasOptimizer, monitored sessions, hooks.

Knows the public interface of sessions; no server and no transport. `graph`: declarations, and evaluating a run. `gradients`: handles of
gradients, and the op that pushes them. `optimizers`: the ten optimizers. `replicas_optimizer`: SyncReplicasOptimizer. `session`:
MonitoredTrainingSession. `hooks` and `saving`: the ready-made hooks. `averages`: ExponentialMovingAverage.
"""

from worker_client.sync_replicas import gradients, graph, hooks, optimizers, saving
from worker_client.sync_replicas.averages import ExponentialMovingAverage, restored_values
from worker_client.sync_replicas.gradients import *  # noqa: F403 (its __all__ says what)
from worker_client.sync_replicas.graph import *  # noqa: F403 (its __all__ says what)
from worker_client.sync_replicas.hooks import *  # noqa: F403 (its __all__ says what)
from worker_client.sync_replicas.optimizers import *  # noqa: F403 (its __all__ says what)
from worker_client.sync_replicas.replicas_optimizer import SyncReplicasOptimizer
from worker_client.sync_replicas.saving import *  # noqa: F403 (its __all__ says what)
from worker_client.sync_replicas.session import MonitoredSession, MonitoredTrainingSession

__all__ = [
    "ExponentialMovingAverage",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "SyncReplicasOptimizer",
    "restored_values",
    *gradients.__all__,
    *graph.__all__,
    *hooks.__all__,
    *optimizers.__all__,
    *saving.__all__,
]
