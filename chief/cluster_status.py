"""What the chief reports of its cluster, put together from what it knows. Changes nothing; `now` is an argument."""

from chief.cluster import Cluster
from chief.explain import explain, is_waiting
from chief.wording import optimizers_words
from ps_protocol.chief import ClusterStatus


def cluster_status(cluster: Cluster, now: float, *, max_ledger_entries: int) -> ClusterStatus:
    """Reports the cluster."""
    situation, policy = cluster.situation(), cluster.policy
    return ClusterStatus(
        cluster=cluster.config.cluster,
        epoch=cluster.epoch,
        state=situation.state,
        reason=situation.reason,
        global_step=policy.step,
        max_steps=cluster.config.max_steps,
        policy=policy.spec.text,
        replicas_to_aggregate=cluster.config.num_required if cluster.is_quorum_lowered else policy.num_required,
        total_num_replicas=cluster.config.num_workers or 0,
        num_contributions=policy.num_contributions,
        waiting_for=explain(situation, now=now) if is_waiting(situation, now=now) else "",
        step_age_s=cluster.ledger.step_age_s(now),
        participants=cluster.membership.statuses(now=now, waiting=cluster.waiting.token_workers),
        shards=cluster.shards.links(step=policy.step if cluster.registry.is_ready else None, layouts=cluster.registry.layouts),
        ledger=cluster.ledger.entries(max_ledger_entries),
        num_accepted=cluster.ledger.num_accepted,
        num_stale=cluster.ledger.num_stale,
        num_late=cluster.ledger.num_late,
        hyperparameters_version=cluster.settings_version,
        optimizer=_optimizer_words(cluster),
        max_observed_staleness=cluster.ledger.max_staleness,
        chief_incarnation=cluster.chief_incarnation,
        num_rollbacks=cluster.num_rollbacks,
        last_rollback=cluster.last_rollback,
        min_replicas=cluster.config.min_replicas or 0,
        data=cluster.data.status(),
    )


def _optimizer_words(cluster: Cluster) -> str:
    if cluster.optimizer or cluster.registry.model is None:
        return cluster.optimizer
    words = optimizers_words(cluster.registry.model, {})
    if cluster.registry.is_ready:
        cluster.optimizer = words  # a model may have very many variables
    return words
