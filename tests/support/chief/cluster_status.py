"""The status of a cluster in training, in which a test changes the fields that it checks. Asserts nothing."""

from typing import Any

from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import ClusterState, ClusterStatus, Condition, Level, ParticipantKind, ParticipantStatus, ServerStatus


def worker_status(index: int, **changes: Any) -> ParticipantStatus:
    """A worker that lives, computes, and was heard of just now."""
    fields = {
        "kind": ParticipantKind.WORKER,
        "index": index,
        "incarnation": 1,
        "host": "here",
        "pid": 100 + index,
        "state": "live",
        "seen_ago_s": 0.1,
        "num_accepted": 0,
        "num_stale": 0,
        "num_late": 0,
        "is_waiting": False,
        "failure": "",
        "doing": "at work",
    }
    return ParticipantStatus(**{**fields, **changes})


def server_status(index: int, **changes: Any) -> ServerStatus:
    """A parameter server that answers and has the step."""
    fields = {"index": index, "address": f"unix:/ps{index}", "is_reachable": True, "step": 41, "arena_bytes": 64, "num_slices": 1}
    return ServerStatus(**{**fields, **changes})


def cluster_status(*workers: ParticipantStatus, **changes: Any) -> ClusterStatus:
    """A cluster at step 41 that waits for one of two contributions."""
    fields = {
        "cluster": "digits",
        "epoch": 1,
        "state": ClusterState.TRAINING,
        "reason": "",
        "global_step": 41,
        "max_steps": 600,
        "policy": PolicySpec(),
        "replicas_to_aggregate": 2,
        "total_num_replicas": 2,
        "num_contributions": 1,
        "waiting_for": "step 41 has 1 of 2 contributions; worker 1 is missing, last seen 3.0 s ago",
        "step_age_s": 3.25,
        "participants": workers,
        "shards": (),
        "ledger": (),
        "num_accepted": 0,
        "num_stale": 0,
        "num_late": 0,
        "conditions": (Condition(name="training", level=Level.GREEN, line="Training. Nothing is waited for"),),
    }
    return ClusterStatus(**{**fields, **changes})
