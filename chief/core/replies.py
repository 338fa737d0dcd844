"""What callers are told of steps, tokens and data, and when it may be told: after shards keep what it rests on. Knows no thread or wire."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from chief.core.cluster import Cluster, Waiting
from chief.core.messages import Instruction, KeepRecord, Note, RecordKept, Refuse, Reply
from chief.core.waiting import Key
from chief.policies.base import Grant
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import CommitResult, PushOutcome, TokenReply, TokenResult
from ps_protocol.roles.shard import PushId

# What a participant is told only once it stays true even if the chief dies: functions of the coordinator. Knows no clock, thread or wire.
#
# That a contribution is accepted is told when it is applied, or when a parameter server keeps for the chief's successor that it was chosen.
# A step that has all its contributions is being applied anyway; for one that lacks some the record is written, one at a time for all.


# Who waits to be told is told so, and asks again.
_ASSURED_S = 1.0
# Where workers are about equally fast, the step has all its contributions sooner than that, and no record is needed.
LINGER_KEY: Key = ("linger", 0)
LINGER_S = 0.002
# Ranges done that travel with every step, at most about so many; then the record is written.
_MAX_UNKEPT = 512


def keep(cluster: Cluster, *, for_all: bool = True) -> KeepRecord:
    """Has shards keep what a successor must know, in place of what they have: all of them, or the first, where all are asked by it."""
    told = cluster.told
    told.version += 1
    told.is_for_all = for_all or (told.in_flight is not None and told.is_for_all)
    record = replace(cluster.record(), epoch=cluster.epoch, step=cluster.policy.step, chosen=_chosen(cluster), data=cluster.data.marks())
    told.in_flight, told.num_unkept, told.has_data = told.version, len(told.unkept), record.data is not None
    told.chosen = tuple(one.push_id for one in record.chosen)
    return KeepRecord(epoch=cluster.epoch, version=told.version, record=record, is_for_all=told.is_for_all)


def kept(cluster: Cluster, event: RecordKept) -> list[Instruction]:
    """A record is kept: answers who waited for that, and has the next one kept if somebody waits for it."""
    told = cluster.told
    if event.epoch != cluster.epoch or event.version != told.in_flight:
        return []
    instructions: list[Instruction] = []
    if event.failure:
        words = f"the parameter servers do not keep what another chief would have to know: {event.failure}"
        instructions.append(Note(text=words, is_warning=True))
    instructions += _released(cluster, told.take(version=told.kept()))
    return [*instructions, *keep_if_awaited(cluster)]


def tell(cluster: Cluster, reply: Reply, *, push_id: PushId | None, commit: CommitResult | None, now: float) -> list[Instruction]:
    """Gives an answer that says what became of a contribution: now, or when it is sure."""
    if _is_sure(cluster, push_id, commit):
        return [reply]
    is_on_its_way = cluster.policy.is_complete
    _wait(cluster, reply, push_id=push_id, is_on_its_way=is_on_its_way, now=now)
    if is_on_its_way or cluster.told.in_flight is not None:
        return []
    if cluster.policy.num_required > cluster.membership.num_live_workers:
        # Somebody gives several contributions to the step: perhaps this one, who does not go on before it is told.
        return [keep(cluster, for_all=False)]
    cluster.deadlines.set(LINGER_KEY, now + LINGER_S)
    return []


def tell_of_data(cluster: Cluster, reply: Reply, *, now: float) -> list[Instruction]:
    """Gives an answer that depends on what is known of the training data: when another chief would know that."""
    told = cluster.told
    if not told.is_needed or (told.is_data_kept and told.unkept == []):
        return [reply]
    _wait(cluster, reply, push_id=None, is_on_its_way=False, now=now)
    return keep_if_awaited(cluster)


def is_told(cluster: Cluster, push_id: PushId | None, commit: CommitResult | None) -> CommitResult | None:
    """Returns what may be said now of what became of a contribution; None: nothing, whoever asks again is told later."""
    return commit if _is_sure(cluster, push_id, commit) else None


def applied(cluster: Cluster, contributors: Sequence[PushId], *, is_held: bool) -> list[Instruction]:
    """All shards have applied these; `is_held`: nobody hears of the step for now. They are sure from now on."""
    told = cluster.told
    if not told.is_needed:
        return []
    if is_held:
        told.sure.update(contributors)
    elif told.sure:
        told.sure.difference_update(contributors)
    instructions = _released(cluster, told.take(applied=contributors)) if told.waiting else []
    if len(told.unkept) >= _MAX_UNKEPT and told.in_flight is None:
        instructions.append(keep(cluster, for_all=False))
    return instructions


def expire(cluster: Cluster, call: int, now: float) -> list[Instruction]:
    """Somebody has waited as long as one call may; what it asked for stands, and it is told when it asks again."""
    if cluster.told.waiting.pop(call, None) is None:
        return []
    return [Refuse(call=call, error=Unavailable(cluster.explain(now))), *keep_if_awaited(cluster)]


def cancel(cluster: Cluster, call: int) -> None:
    """A caller has gone away."""
    if cluster.told.waiting.pop(call, None) is not None:
        cluster.deadlines.clear(_key(call))


def refuse(cluster: Cluster, error: PsError) -> list[Instruction]:
    """What would have been told will not come true."""
    calls = [*cluster.told.waiting]
    for call in calls:
        cancel(cluster, call)
    return [Refuse(call=call, error=error) for call in calls]


def release(cluster: Cluster) -> list[Instruction]:
    """There will be no other chief: whoever waits is told."""
    replies = [one.reply for one in cluster.told.waiting.values()]
    cluster.told.waiting.clear()
    return _released(cluster, replies)


def revise(cluster: Cluster, push_id: PushId, result: CommitResult) -> None:
    """Has whoever waits to be told of this contribution told something else."""
    waiting = cluster.told.waiting
    for call, one in [*waiting.items()]:
        if one.push_id == push_id and isinstance(one.reply.value, CommitResult):
            waiting[call] = replace(one, reply=replace(one.reply, value=_revised(one.reply.value, result)))
        elif one.push_id == push_id and isinstance(one.reply.value, TokenReply) and one.reply.value.commit is not None:
            value = replace(one.reply.value, commit=_revised(one.reply.value.commit, result))
            waiting[call] = replace(one, reply=replace(one.reply, value=value))


def _is_sure(cluster: Cluster, push_id: PushId | None, commit: CommitResult | None) -> bool:
    if commit is None or not cluster.told.is_needed or cluster.is_finished:
        return True
    outcome = commit.first_outcome if commit.outcome is PushOutcome.DUPLICATE else commit.outcome
    if outcome is not PushOutcome.ACCEPTED or commit.applied_step is None or commit.applied_step < cluster.policy.step:
        return True
    return push_id in cluster.told.sure


def _wait(cluster: Cluster, reply: Reply, *, push_id: PushId | None, is_on_its_way: bool, now: float) -> None:
    told = cluster.told
    told.waiting[reply.call] = Waiting(reply=reply, push_id=push_id, version=None if is_on_its_way else told.next_version)
    cluster.deadlines.set(_key(reply.call), now + _ASSURED_S)


def keep_if_awaited(cluster: Cluster) -> list[Instruction]:
    """Has a record kept if somebody waits for one, and none is under way."""
    told = cluster.told
    if told.in_flight is not None or not told.waiting:
        return []
    is_awaited = any(one.version is not None and one.version > told.version for one in told.waiting.values())
    return [keep(cluster, for_all=False)] if is_awaited else []


def _released(cluster: Cluster, replies: Sequence[Reply]) -> list[Instruction]:
    for reply in replies:
        cluster.deadlines.clear(_key(reply.call))
    return [*replies]


def _chosen(cluster: Cluster) -> tuple[ChosenPush, ...]:
    policy = cluster.policy
    if policy.spec.applies_on_arrival or not policy.num_contributions:
        return ()
    ranges = cluster.data.counted_ranges
    return tuple(ChosenPush(push_id=one.push_id, step=one.step, weight=one.weight, ranges=ranges(one.push_id)) for one in policy.counted())


def _revised(before: CommitResult, result: CommitResult) -> CommitResult:
    return replace(before, applied_step=result.applied_step, staleness=result.staleness, weight=result.weight)


def _key(call: int) -> Key:
    return ("told", call)


# Answers to workers that want a token, all in one place. Knows the cluster; changes only who waits.


def token(cluster: Cluster, step: int, commit: CommitResult | None) -> TokenReply:
    """Returns the answer to who gets a token of `step`."""
    return _reply(cluster, TokenResult.TOKEN, step, commit)


def wait(cluster: Cluster, commit: CommitResult | None, waiting_for: str) -> TokenReply:
    """Returns the answer to who must ask again."""
    return _reply(cluster, TokenResult.WAIT, cluster.policy.step, commit, waiting_for)


def finished(cluster: Cluster, commit: CommitResult | None) -> TokenReply:
    """Returns the answer to who waits for a token that will never come."""
    return _reply(cluster, TokenResult.FINISHED, cluster.policy.step, commit)


def grant(cluster: Cluster, grants: Iterable[Grant], now: float) -> list[Instruction]:
    """Answers those who wait and have a token now."""
    instructions: list[Instruction] = []
    for due in grants:
        if (waiting := cluster.waiting.take_token_call(due.worker)) is not None:
            reply = Reply(call=waiting.call, value=token(cluster, due.step, waiting.commit))
            instructions += tell(cluster, reply, push_id=waiting.push_id, commit=waiting.commit, now=now)
    return instructions


def _reply(cluster: Cluster, result: TokenResult, step: int, commit: CommitResult | None, waiting_for: str = "") -> TokenReply:
    return TokenReply(
        result=result,
        step=step,
        commit=commit,
        waiting_for=waiting_for,
        global_step=cluster.policy.step,
        reads_latest=cluster.policy.spec.reads_latest,
        settings_version=cluster.settings_version,
        shards_version=cluster.shards_version,
    )
