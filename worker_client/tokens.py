"""Waits for the chief's tokens, and says what for. Knows the chief and requests; no variables and no shards."""

from dataclasses import dataclass

from ps_protocol.chief import CommitResult, Participant, PushCommit, TokenReply, TokenResult
from worker_client.cluster_link import ClusterLink
from worker_client.patience import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How a wait ended: the step of the token, or the last step if training is finished; and what became of the commit that rode along.

    `global_step` is the open step; `settings_version` grows whenever the cluster's policy is changed; `reads_latest`: the newest variables
    are to be read, not exactly those of `step`.
    """

    step: int
    is_finished: bool
    commit: CommitResult | None
    global_step: int
    settings_version: int
    reads_latest: bool


class TokenWaiter:
    """One worker's wishes for a token. A wish that timed out is taken up again by the next wait, so that none is granted twice."""

    def __init__(self, link: ClusterLink, participant: Participant) -> None:
        self._link = link
        self._participant = participant
        self._request_id = 1

    def wait(self, *, local_step: int, commit: PushCommit | None, timeout_s: float | None) -> Grant:
        """Counts the commit, then blocks until there is a token or the end of training; after 2 s it logs what it waits for.

        Raises DeadlineExceeded with the same words; the commit has been counted nevertheless.
        """
        patience = Patience(f"worker {self._participant.index} wants a token after step {local_step}", timeout_s=timeout_s)
        committed: CommitResult | None = None
        while True:
            reply = self._ask(local_step, commit if committed is None else None, patience)
            committed = committed or reply.commit
            if reply.result is not TokenResult.WAIT:
                self._request_id += 1
                return Grant(
                    step=reply.step,
                    is_finished=reply.result is TokenResult.FINISHED,
                    commit=committed,
                    global_step=max(reply.step, reply.global_step),
                    settings_version=reply.settings_version,
                    reads_latest=reply.reads_latest,
                )
            patience.explain(reply.waiting_for)

    def _ask(self, local_step: int, commit: PushCommit | None, patience: Patience) -> TokenReply:
        max_wait_s, request_id = patience.slice_s(), self._request_id
        return self._link.ask(
            lambda chief: chief.dequeue_token(
                self._participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
            what=f"a token after step {local_step}",
            timeout_s=patience.left_s(),
            expected_s=max_wait_s,
        )
