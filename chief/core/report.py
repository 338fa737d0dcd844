"""The cluster's status, and a text that says what it waits for and what to do about that. Reads the core's state; changes nothing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from chief.core.conditions import conditions
from chief.core.lacking import missing
from chief.core.wording import counted, listed, seconds
from ps_protocol.roles.chief import ClusterState, ClusterStatus

if TYPE_CHECKING:
    from chief.core.state import Cluster

# Of conditions that hold at once.
_MOST_SAID = 3


def cluster_status(cluster: "Cluster", *, now: float, max_ledger_entries: int) -> ClusterStatus:
    """Reports the cluster."""
    policy, training, recovery = cluster.policy, cluster.training, cluster.recovery
    ledger, members, config = cluster.ledger, cluster.members, cluster.settings.config
    said = conditions(cluster, now=now)
    # Also one that is over, and waits for those that have not left.
    is_waiting = any(one.is_standstill for one in said) or (
        cluster.ending.is_over and members.num_live + bool(cluster.ending.awaited_workers)
    )
    return ClusterStatus(
        cluster=config.cluster,
        epoch=members.epoch,
        state=cluster.state,
        reason=cluster.ending.reason,
        global_step=policy.step,
        max_steps=config.max_steps,
        policy=policy.spec,
        replicas_to_aggregate=config.num_required if training.is_quorum_lowered else policy.num_required,
        total_num_replicas=config.num_workers or 0,
        num_contributions=policy.num_contributions,
        waiting_for=explain(cluster, now=now) if is_waiting else "",
        step_age_s=ledger.step_age_s(now),
        participants=members.statuses(now=now, waiting=training.waiting_workers, is_training=cluster.state is ClusterState.TRAINING),
        shards=cluster.servers.links(step=policy.step if cluster.model.is_ready else None, layouts=cluster.model.layouts),
        ledger=ledger.entries(max_ledger_entries),
        num_accepted=ledger.num_accepted,
        num_stale=ledger.num_stale,
        num_late=ledger.num_late,
        conditions=said,
        settings_version=cluster.settings.version,
        optimizer=cluster.settings.optimizer_words(),
        max_observed_staleness=ledger.max_staleness,
        chief_incarnation=members.chief_incarnation,
        num_rollbacks=recovery.num_rollbacks,
        last_rollback=recovery.last_rollback,
        min_replicas=config.min_replicas or 0,
        data=cluster.data.status(),
        checkpoint=cluster.checkpoints.status(now),
    )


def explain(cluster: "Cluster", *, now: float) -> str:
    """Returns words for the cluster's wait: the conditions by which training stands, what to do about them, and who was seen when."""
    found = conditions(cluster, now=now, patience_s=0.0)
    standing = tuple(one for one in found if one.is_standstill) or (() if cluster.state is ClusterState.TRAINING else found[:1])
    said = [f"{one.line}. {one.advice}".rstrip(". ") for one in standing[:_MOST_SAID]]
    return "; ".join([*said, *(standing[0].commands if standing else ()), *_step_words(cluster, now)])


def _step_words(cluster: "Cluster", now: float) -> Iterator[str]:
    """Yields what the open step has, and when those were last seen that it lacks."""
    policy, waiting, live = cluster.policy, cluster.training.waiting_workers, cluster.members.live_workers
    if cluster.state is not ClusterState.TRAINING or policy.is_complete or cluster.training.is_configuring:
        return
    if policy.spec.has_common_steps:
        lacking = missing(cluster)
        awaited = [*lacking.gone, *lacking.owing]
        yield f"step {policy.step} has {policy.num_contributions} of {policy.num_required} contributions"
    else:
        awaited = [one for one in live if one.index in {*policy.slowest()} - waiting] or [*live]
        yield f"step {policy.step} has no contribution"
        yield from (f"{one.name} waits, {policy.lead(one.index)} ahead of the slowest" for one in live if one.index in waiting)
    if policy.tokens.num_old:
        yield f"{counted(policy.tokens.num_old, 'token')} of earlier steps come first out of the fifo queue: gradients for them are dropped"
    if awaited:
        yield f"last seen: {listed([f'{one.name} {seconds(now - one.last_seen)} ago {one.where}' for one in awaited])}"
    elif policy.tokens.num_free:
        yield f"{counted(policy.tokens.num_free, 'token')} of it can be had by any worker that asks"
