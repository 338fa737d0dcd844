"""Waits for the chief's tokens, and says what for. Knows the chief and requests; no variables and no shards."""

from dataclasses import dataclass

from ps_protocol.chief import CommitResult, Participant, PushCommit, TokenReply, TokenResult
from worker_client.membership import Membership
from worker_client.patience import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How a wait ended: the step of the token, or the last step if training is finished; and what became of the commit that rode along.

    `global_step` is the open step; `settings_version` grows whenever the cluster's policy is changed; `reads_latest`: the newest variables
    are to be read, not exactly those of `step`. `shards_version` grows whenever other servers hold the shards than before.
    """

    step: int
    is_finished: bool
    commit: CommitResult | None
    global_step: int
    settings_version: int
    reads_latest: bool
    shards_version: int = 0


class TokenWaiter:
    """One worker's wishes for a token. A wish that timed out is taken up again by the next wait, so that none is granted twice."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._commits = member.commits
        self._request_id = 1

    def wait(self, participant: Participant, *, local_step: int, commit: PushCommit | None, timeout_s: float | None) -> Grant:
        """Counts the commit, then blocks until there is a token or the end of training; after 2 s it logs what it waits for.

        Raises DeadlineExceeded with the same words; the commit has been counted nevertheless.
        """
        patience = Patience(f"worker {participant.index} wants a token after step {local_step}", timeout_s=timeout_s)
        committed: CommitResult | None = None
        if commit is not None:
            self._commits.sent(commit)
        while True:
            reply = self._ask(participant, local_step, commit if committed is None else None, patience)
            if committed is None and reply.commit is not None and commit is not None:
                committed = reply.commit
                self._commits.answered(commit, committed, global_step=reply.global_step)
                self._member.link.note_outcome(commit, committed, epoch=participant.epoch)
            if reply.result is not TokenResult.WAIT:
                self._request_id += 1
                return Grant(
                    step=reply.step,
                    is_finished=reply.result is TokenResult.FINISHED,
                    commit=committed,
                    global_step=max(reply.step, reply.global_step),
                    settings_version=reply.settings_version,
                    reads_latest=reply.reads_latest,
                    shards_version=reply.shards_version,
                )
            patience.explain(reply.waiting_for)

    def forget(self) -> None:
        """A wish that was under way is of an epoch that is over."""
        self._request_id += 1

    def _ask(self, participant: Participant, local_step: int, commit: PushCommit | None, patience: Patience) -> TokenReply:
        max_wait_s, request_id = patience.slice_s(), self._request_id
        return self._member.ask(
            lambda chief: chief.dequeue_token(
                participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
            participant=participant,
            what=f"a token after step {local_step}",
            timeout_s=patience.left_s(),
            expected_s=max_wait_s,
        )
