"""The API of tf.distribute.StrategyExtended: replicas, variables that they share, reductions over them, and updates.

`values`: per-replica and mirrored values. `reduction`: sums and means. `contexts`: the context of a thread. `replicas`: threads in turn.
`variables`: aggregation and synchronisation. `group`: the replicas of a strategy; `workers`: those of several processes, `exchange` how
these reduce values, `shared_variables` their variables. `board`: posts on a parameter server; `content`: what they carry. `strategy`: the
strategy, its `extended`, and the replica's context. `optimizer`: updates by gradients of replicas. `coordinator`: closures that any worker
runs.
"""

from worker_client.strategy.content import PerWorkerDataset
from worker_client.strategy.coordinator import ClusterCoordinator, RemoteValue, serve
from worker_client.strategy.group import CollectiveHints
from worker_client.strategy.optimizer import Optimizer
from worker_client.strategy.reduction import ReduceOp
from worker_client.strategy.strategy import (
    ParameterServerStrategy,
    ReplicaContext,
    StrategyExtended,
    ValueContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from worker_client.strategy.values import Mirrored, PerReplica
from worker_client.strategy.variables import Variable, VariableAggregation, VariableCopy, VariableSynchronization

__all__ = [
    "ClusterCoordinator",
    "CollectiveHints",
    "Mirrored",
    "Optimizer",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerDataset",
    "ReduceOp",
    "RemoteValue",
    "ReplicaContext",
    "StrategyExtended",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableCopy",
    "VariableSynchronization",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "serve",
]
