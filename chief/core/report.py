"""The cluster's status, and a text that says what it waits for and what to do about that. Reads the core's state; changes nothing."""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chief.core.cluster.members import Member, MemberState
from chief.core.conditions import PATIENCE_S, conditions
from chief.core.lacking import missing
from chief.core.wording import lease_end, listed, seconds
from chief.policies.base import Policy
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind

if TYPE_CHECKING:
    from chief.core.state import Cluster


def cluster_status(cluster: "Cluster", *, now: float, max_ledger_entries: int) -> ClusterStatus:
    """Reports the cluster."""
    policy, training, recovery = cluster.policy, cluster.training, cluster.recovery
    ledger, members, config = cluster.ledger, cluster.members, cluster.settings.config
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
        waiting_for=explain(cluster, now=now) if is_waiting(cluster, now=now) else "",
        step_age_s=ledger.step_age_s(now),
        participants=members.statuses(now=now, waiting=training.waiting_workers, is_training=cluster.state is ClusterState.TRAINING),
        shards=cluster.servers.links(step=policy.step if cluster.model.is_ready else None, layouts=cluster.model.layouts),
        ledger=ledger.entries(max_ledger_entries),
        num_accepted=ledger.num_accepted,
        num_stale=ledger.num_stale,
        num_late=ledger.num_late,
        conditions=conditions(cluster, now=now),
        hyperparameters_version=cluster.settings.version,
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
    """Returns words for the cluster's wait."""
    match cluster.state:
        case ClusterState.RECOVERING:
            return _explain_recovery(cluster, now)
        case ClusterState.CONNECTING:
            return cluster.servers.explain_missing(now)
        case ClusterState.WAITING_FOR_MODEL:
            return _explain_model(cluster, now)
        case ClusterState.TRAINING:
            return _explain_step(cluster, now)
    return _explain_end(cluster, now)


def is_waiting(cluster: "Cluster", *, now: float) -> bool:
    """Whether the cluster waits for something that it may not get by simply working on."""
    if cluster.state in (ClusterState.FINISHED, ClusterState.FAILED):
        return cluster.members.num_live > 0 or bool(cluster.ending.awaited_workers)
    if cluster.state is not ClusterState.TRAINING:
        return True
    if cluster.ledger.step_age_s(now) >= PATIENCE_S or cluster.servers.unreachable_since is not None:
        return True
    policy = cluster.policy
    if policy.spec.reads_latest:
        # Any worker may contribute at any time, and again; there is one that will, unless all wait or are gone.
        return not policy.is_complete and not any(member.is_live and cluster.training.owes(member) for member in cluster.members.workers())
    able = policy.num_free_tokens + sum(1 for member in cluster.members.workers() if member.is_live and cluster.training.owes(member))
    return not policy.is_complete and policy.num_contributions + able < policy.num_required


def _explain_end(cluster: "Cluster", now: float) -> str:
    live = [f"{member.name} ({_sign_of_life(member, now)})" for member in cluster.members.all() if member.is_live]
    waits = [f"waiting for {listed(live)} to leave"] if live else []
    if cluster.ending.awaited_workers:
        waits.append(f"waiting for {cluster.ending.awaited_workers} to come and hear it")
    return "; ".join([cluster.ending.reason, *waits])


def _explain_outage(cluster: "Cluster", now: float) -> str:
    """Names the parameter servers that do not answer, as the beginning of a text; empty if all do."""
    unreachable = cluster.servers.explain_unreachable(now)
    if not unreachable:
        return ""
    which = "it" if len(unreachable) == 1 else "one of them"
    what_then = "start it again"
    if cluster.model.model is not None:
        what_then += ", and all go back to the newest checkpoint"
        if cluster.settings.config.checkpoints is None:
            what_then = "its variables are lost and the cluster must be started again"
    return f"{listed(unreachable)}; if {which} is gone {what_then}; "


def _explain_recovery(cluster: "Cluster", now: float) -> str:
    unreachable = cluster.servers.explain_unreachable(now)
    waiting = f"waiting for {listed(unreachable)}; " if unreachable else ""
    restoring = cluster.servers.explain_restoring()
    far = f": {listed(restoring)}" if restoring else ""
    return f"recovering: {cluster.recovery.why}; {waiting}{cluster.recovery.plan}{far}"


def _explain_model(cluster: "Cluster", now: float) -> str:
    registry, membership = cluster.model, cluster.members
    outage = _explain_outage(cluster, now)
    if registry.initializer is not None:
        member = membership.find(ParticipantKind.WORKER, registry.initializer[0])
        who = f"{member.name} ({_sign_of_life(member, now)})" if member else f"worker {registry.initializer[0]}"
        creating = cluster.servers.explain_creating(registry.layouts)
        far = f": {listed(creating)}" if creating else ""
        return f"{outage}{who} is initialising the model (attempt {registry.attempt}){far}"
    if registry.model is not None:
        return f"{outage}the worker that was initialising the model is gone; the next worker that asks takes over"
    if not membership.num_live_workers:
        return f"{outage}no worker has joined yet; start one"
    return f"{outage}none of the {membership.num_live_workers} live workers has registered a model yet"


def _explain_step(cluster: "Cluster", now: float) -> str:
    policy, outage = cluster.policy, _explain_outage(cluster, now)
    if cluster.training.saving:
        return outage + cluster.training.saving
    if cluster.training.is_configuring:
        return f"{outage}new settings are on their way to the parameter servers"
    if policy.is_complete:
        return f"{outage}step {policy.step} waits" if outage else f"step {policy.step} is being applied"
    if not policy.has_common_steps:
        return outage + _explain_free_step(cluster, now)
    if policy.is_in_grace:
        rest = listed([f"worker {member.index}" for member in missing(cluster).owing])
        return (
            f"{outage}step {policy.step} has {policy.num_contributions} contributions, enough, and waits {policy.spec.grace_s:g} s for"
            f" those of {rest or 'other workers'}"
        )
    lacking = list(_missing(cluster, now))
    parts = [
        f"{outage}step {policy.step} has {policy.num_contributions} of {policy.num_required} contributions",
        "" if outage else _explain_idle(cluster),
        _explain_old_tokens(policy),
        f"missing: {listed(lacking)}" if lacking else "",
        "" if outage else _advice(cluster),
    ]
    return "; ".join(part for part in parts if part)


def _explain_old_tokens(policy: Policy) -> str:
    """Returns words for workers with tokens of earlier steps; empty if there are none."""
    number = policy.num_old_tokens
    if not number:
        return ""
    what = "1 token of an earlier step comes" if number == 1 else f"{number} tokens of earlier steps come"
    return (
        f"{what} first out of the fifo queue, and the gradients computed with them are dropped, as in SyncReplicasOptimizer;"
        " strict tokens drop none"
    )


def _explain_free_step(cluster: "Cluster", now: float) -> str:
    """Says, for a policy under which each contribution is a step, which workers wait and for which workers."""
    policy, live = cluster.policy, [member for member in cluster.members.workers() if member.is_live]
    if not live:
        return f"step {policy.step} has no contribution, and no worker is live; start one"
    waiting = [member for member in live if member.index in cluster.training.waiting_workers]
    slowest = set(policy.slowest())
    if waiting and slowest:
        behind = [f"{member.name} ({_sign_of_life(member, now)})" for member in live if member.index in slowest and member not in waiting]
        ahead = listed([f"{member.name} ({policy.lead(member.index)} ahead)" for member in waiting])
        return (
            f"{ahead} {'waits' if len(waiting) == 1 else 'wait'}: at most {policy.spec.staleness} ahead of the slowest is allowed;"
            f" slowest: {listed(behind) or 'nobody'}; they continue when it contributes or leaves, or its lease ends"
        )
    computing = sorted(live, key=lambda member: member.last_seen)
    return f"step {policy.step} has no contribution; computing: {listed([f'{m.name} ({_sign_of_life(m, now)})' for m in computing])}"


def _explain_idle(cluster: "Cluster") -> str:
    """Names the workers that wait for a token that they get only once they have pushed; empty if there are none."""
    idle = [f"worker {member.index}" for member in cluster.members.workers() if cluster.training.must_push(member)]
    if not idle:
        return ""
    step = cluster.policy.step
    if len(idle) == 1:
        return f"{idle[0]} waits for a token but has not pushed for step {step}; it must push first"
    return f"{listed(idle)} wait for a token but have not pushed for step {step}; they must push first"


def _missing(cluster: "Cluster", now: float) -> Iterator[str]:
    """Yields the workers that the step lacks: gone ones, ones that have not joined, then live ones by their silence."""
    lacking = missing(cluster)
    yield from (f"worker {member.index} ({_sign_of_life(member, now)})" for member in lacking.gone)
    yield from (f"worker {index} (not joined)" for index in lacking.absent)
    for member in lacking.owing:
        token = ", has a token for one more contribution" if cluster.policy.holds_token(member.index) else ""
        yield f"worker {member.index} ({_sign_of_life(member, now)}{token})"


def _sign_of_life(member: Member, now: float) -> str:
    seen = f"last seen {seconds(now - member.last_seen)} ago {member.where}"
    if member.is_live:
        return seen + lease_end(member.last_seen + member.lease_s - now)
    if member.state is MemberState.LAPSED:
        return f"{seen}, lease ended {seconds(now - member.ended_at)} ago"
    if member.state is MemberState.EXPELLED:
        return f"expelled {seconds(now - member.ended_at)} ago: {member.failure}; {member.where}"
    how = (
        f"failed {seconds(now - member.ended_at)} ago: {member.failure};"
        if member.failure
        else f"left {seconds(now - member.ended_at)} ago"
    )
    return f"{how} {member.where}"


def _advice(cluster: "Cluster") -> str:
    policy, total = cluster.policy, cluster.settings.config.num_workers
    workers = {member.index: member for member in cluster.members.workers()}
    owing = [member for member in workers.values() if member.is_live and cluster.training.owes(member)]
    lacking = policy.num_required - policy.num_contributions - len(owing) - policy.num_free_tokens
    if policy.advice_to_all_waiting and not owing and any(member.is_live for member in workers.values()):
        return policy.advice_to_all_waiting
    if lacking <= 0:
        if not owing:
            return f"{policy.num_free_tokens} more token(s) of it are free for any worker that asks"
        busy = [member for member in owing if not cluster.training.must_push(member)]
        who = "it does" if len(busy) == 1 else "they do"
        return f"if {who} not come back, {_replace(busy, cluster)}" if busy else ""
    if total is None:
        return f"{lacking} more worker(s) needed than are live: start them{_command(cluster)}"
    gone = [member for member in workers.values() if not member.is_live and cluster.training.owes(member)]
    return _replace(gone, cluster) if gone else f"start the missing workers{_command(cluster)}"


def _replace(lost: list[Member], cluster: "Cluster") -> str:
    """Returns a remedy for silent or lost workers: look at the processes that may only be stopped, or start others."""
    start = f"start {'another' if len(lost) == 1 else 'others'} in {'its' if len(lost) == 1 else 'their'} place"
    is_full = cluster.settings.config.num_workers is not None
    if not is_full or not any(member.is_live and lease_end(member.lease_s) for member in lost):
        start += _command(cluster)
    elif len(lost) == 1:  # one that names the index finds out that a process of its own machine has ended
        start += f" once its process or its lease has ended{_command(cluster, index=lost[0].index)}"
    else:
        start += f" once their leases have ended{_command(cluster)}"
    # A lease that does not end belongs to a worker in this process. Processes of workers that failed or left have ended, or continue alone.
    silent = [member for member in lost if (member.is_live or member.state is MemberState.LAPSED) and lease_end(member.lease_s)]
    if not silent:
        return start
    if len(silent) == 1:
        return f"look at pid {silent[0].pid} on {silent[0].host} (stopped? kill -CONT {silent[0].pid}), or {start}"
    return f"look at their processes (stopped? kill -CONT PID), or {start}"


def _command(cluster: "Cluster", *, index: int | None = None) -> str:
    named = f"LOCKSTEP_WORKER_INDEX={index} " if index is not None else ""
    return f": {named}LOCKSTEP_CHIEF={shlex.quote(cluster.address)} PROGRAM" if cluster.address else ""
