"""Says in words what the cluster waits for, and what to do about it. Reads the core's state; changes nothing; `now` is an argument."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from chief.ledger import Ledger
from chief.membership import Member, Membership, MemberState
from chief.model_registry import ModelRegistry
from chief.policy import Policy
from chief.shard_table import ShardTable
from chief.wording import listed, seconds
from ps_protocol.chief import ClusterState, ParticipantKind

# A cluster whose step is younger, and that has all the workers it needs, is at work and not waiting.
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The parts of the core that an explanation looks at."""

    state: ClusterState
    reason: str
    membership: Membership
    policy: Policy
    registry: ModelRegistry
    shards: ShardTable
    ledger: Ledger
    total_num_replicas: int | None
    waiting: Container[int]  # workers that block on a token


def explain(situation: Situation, *, now: float) -> str:
    """Returns what the cluster waits for."""
    match situation.state:
        case ClusterState.CONNECTING:
            return situation.shards.explain_missing(now)
        case ClusterState.WAITING_FOR_MODEL:
            return _explain_model(situation, now)
        case ClusterState.TRAINING:
            return _explain_step(situation, now)
    return _explain_end(situation, now)


def is_waiting(situation: Situation, *, now: float) -> bool:
    """Whether the cluster waits for something that it may not get by simply working on."""
    if situation.state in (ClusterState.FINISHED, ClusterState.FAILED):
        return situation.membership.num_live > 0
    if situation.state is not ClusterState.TRAINING:
        return True
    if situation.ledger.step_age_s(now) >= _PATIENCE_S or situation.shards.explain_unreachable(now):
        return True
    policy = situation.policy
    able = policy.num_free_tokens + sum(1 for member in situation.membership.workers() if member.is_live and _owes(policy, member.index))
    return not policy.is_complete and policy.num_contributions + able < policy.num_required


def _explain_end(situation: Situation, now: float) -> str:
    live = [f"{member.name} ({_sign_of_life(member, now)})" for member in situation.membership.all() if member.is_live]
    return f"{situation.reason}; waiting for {listed(live)} to leave" if live else situation.reason


def _explain_model(situation: Situation, now: float) -> str:
    registry, membership = situation.registry, situation.membership
    unreachable = situation.shards.explain_unreachable(now)
    suffix = f"; {unreachable}" if unreachable else ""
    if registry.initializer is not None:
        member = membership.find(ParticipantKind.WORKER, registry.initializer[0])
        who = f"{member.name} ({_sign_of_life(member, now)})" if member else f"worker {registry.initializer[0]}"
        return f"{who} is initialising the model (attempt {registry.attempt}){suffix}"
    if registry.model is not None:
        return f"the worker that was initialising the model is gone; the next worker that asks takes over{suffix}"
    if not membership.num_live_workers:
        return f"no worker has joined yet; start one{suffix}"
    return f"none of the {membership.num_live_workers} live workers has registered a model yet{suffix}"


def _explain_step(situation: Situation, now: float) -> str:
    policy, unreachable = situation.policy, situation.shards.explain_unreachable(now)
    if policy.is_complete:
        return f"{unreachable}; step {policy.step} waits" if unreachable else f"step {policy.step} is being applied"
    text = f"step {policy.step} has {policy.num_contributions} of {policy.num_required} contributions"
    missing = list(_missing(situation, now))
    if missing:
        text += f"; missing: {listed(missing)}"
    return f"{text}; {_advice(situation)}" + (f"; {unreachable}" if unreachable else "")


def _owes(policy: Policy, worker: int) -> bool:
    return not policy.has_contributed(worker) or policy.holds_token(worker)


def _missing(situation: Situation, now: float) -> Iterator[str]:
    """Those that the step could still use: who is gone, who never came, then the living, the most silent first."""
    policy, workers = situation.policy, {member.index: member for member in situation.membership.workers()}
    places = situation.total_num_replicas or 0
    owing = sorted((member for member in workers.values() if _owes(policy, member.index)), key=lambda member: member.last_seen)
    for member in owing:
        # With any number of workers allowed, one that left in peace need not come back.
        if not member.is_live and (places or member.state is MemberState.LAPSED or member.failure):
            yield f"worker {member.index} ({_sign_of_life(member, now)})"
    yield from (f"worker {index} (never joined)" for index in range(places) if index not in workers)
    for member in owing:
        if member.is_live:
            yield f"worker {member.index} ({_sign_of_life(member, now)}{_token_words(situation, member)})"


def _token_words(situation: Situation, member: Member) -> str:
    if situation.policy.holds_token(member.index):
        return ", has a token for one more contribution"
    return ", waits for a token but has not contributed" if member.index in situation.waiting else ""


def _sign_of_life(member: Member, now: float) -> str:
    seen = f"last seen {seconds(now - member.last_seen)} ago {member.where}"
    if member.is_live:
        return f"{seen}, lease ends in {seconds(member.last_seen + member.lease_s - now)}"
    if member.state is MemberState.LAPSED:
        return f"{seen}, lease ended {seconds(now - member.ended_at)} ago"
    how = (
        f"failed {seconds(now - member.ended_at)} ago: {member.failure};"
        if member.failure
        else f"left {seconds(now - member.ended_at)} ago"
    )
    return f"{how} {member.where}"


def _advice(situation: Situation) -> str:
    policy, total = situation.policy, situation.total_num_replicas
    workers = {member.index: member for member in situation.membership.workers()}
    owing = [member for member in workers.values() if member.is_live and _owes(policy, member.index)]
    lacking = policy.num_required - policy.num_contributions - len(owing) - policy.num_free_tokens
    if lacking <= 0:
        if not owing:
            return f"{policy.num_free_tokens} more token(s) of it are free for any worker that asks"
        return (
            "if it does not come back start a replacement with the same index"
            if len(owing) == 1
            else "those that do not come back need replacements with the same index"
        )
    if total is None:
        return f"{lacking} more worker(s) needed than are live: start them"
    is_replaceable = any(not member.is_live and _owes(policy, member.index) for member in workers.values())
    return "start a replacement with the same index" if is_replaceable else "start the missing workers"
