"""Answers to workers that want a token, all in one place. Knows the cluster; changes only who waits."""

from collections.abc import Iterable

from chief import assurance
from chief.cluster import Cluster
from chief.events import Instruction, Reply
from chief.policy import Grant
from ps_protocol.chief import CommitResult, TokenReply, TokenResult


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
            instructions += assurance.tell(cluster, reply, push_id=waiting.push_id, commit=waiting.commit, now=now)
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
