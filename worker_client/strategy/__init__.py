"""The API of tf.distribute.StrategyExtended: replicas, variables that they share, reductions over them, and updates.

`values`: per-replica and mirrored values. `reduction`: sums and means. `contexts`: which context a thread is in. `replicas`: threads in
turn. `variables`: aggregation and synchronisation. `group`: which replicas there are; `workers`: those of several processes, and
`messages` what they exchange. `strategy`: the strategy, its `extended`, and the replica's context.
"""

from worker_client.strategy.reduction import ReduceOp
from worker_client.strategy.strategy import (
    CollectiveHints,
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
    "CollectiveHints",
    "Mirrored",
    "ParameterServerStrategy",
    "PerReplica",
    "ReduceOp",
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
]
