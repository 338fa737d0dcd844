"""How training ends, well or badly: the coordinator's methods for that. Knows the cluster; no clock, thread or wire."""

from chief import assurance
from chief.checkpointing import Checkpointing
from chief.cluster import Cluster
from chief.deadlines import Key
from chief.events import EndProcesses, FinishTraining, Instruction, Note, Refuse, Reply
from chief.model_calls import ModelCalls
from chief.settings import Settings
from chief.token_replies import finished
from chief.wording import printable
from ps_protocol.chief import ClusterState, LeaseReply, LeaseResult
from ps_protocol.errors import TrainingFailed

# A step that is being applied when training is finished is the last one, if the shards manage it within this time.
_FINISH_GRACE_S = 1.0
FINISH_KEY: Key = ("finish", 0)
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)


class Ending:
    """Releases all who wait, and ends the processes once nobody needs them."""

    def __init__(self, cluster: Cluster, models: ModelCalls, settings: Settings, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._checkpointing = checkpointing
        self._models = models
        self._settings = settings

    def finish_training(self, event: FinishTraining, now: float) -> list[Instruction]:
        """Somebody wants training to end."""
        cluster = self._cluster
        if cluster.state in _OVER:
            return [Reply(call=event.call, value=cluster.policy.step)] if event.call is not None else []
        if event.call is not None:
            cluster.finish_calls.append(event.call)
        return self.finish_when_applied(printable(event.reason) or "finished by request", now)

    def finish_when_applied(self, reason: str, now: float) -> list[Instruction]:
        """Finishes at once, or as soon as the step is applied that is being applied now."""
        cluster = self._cluster
        if not cluster.policy.is_complete:
            return self.finish(reason, now)
        if not cluster.pending_finish:
            cluster.pending_finish = reason
            if cluster.policy.spec.accepts_stale:
                cluster.policy.close()
            cluster.deadlines.set(FINISH_KEY, now + _FINISH_GRACE_S)
        return []

    def finish(self, reason: str, now: float) -> list[Instruction]:
        """Training is finished: everybody who waits is told so."""
        cluster = self._cluster
        cluster.finish_reason, cluster.pending_finish = reason, ""
        cluster.deadlines.clear(FINISH_KEY)
        calls, cluster.finish_calls = cluster.finish_calls, []
        self._checkpointing.finish(now)
        cluster.recovering = ""  # whoever needs the values of the last step finds them in its checkpoint
        over = TrainingFailed(f"training was finished ({reason}) before its settings were changed")
        return [
            Note(text=f"training is finished at step {cluster.policy.step}: {reason}"),
            *(Reply(call=call, value=cluster.policy.step) for call in calls),
            *(Reply(call=waiting.call, value=finished(cluster, waiting.commit)) for waiting in cluster.waiting.take_token_calls()),
            *(Reply(call=call, value=LeaseReply(result=LeaseResult.EXHAUSTED)) for call in cluster.waiting.take_data_calls()),
            *assurance.release(cluster),
            *self._settings.refuse(over),
            *self._models.settle(),
            *self.end_if_deserted(),
        ]

    def fail(self, reason: str) -> list[Instruction]:
        """The cluster cannot go on: everybody who waits is told why."""
        cluster = self._cluster
        if cluster.state in _OVER:
            return []
        cluster.failure, cluster.pending_finish, cluster.recovering = reason, "", ""
        cluster.is_saving_last = False
        cluster.deadlines.clear(FINISH_KEY)
        blocked = [*cluster.finish_calls, *(waiting.call for waiting in cluster.waiting.take_token_calls())]
        cluster.finish_calls = []
        error = TrainingFailed(reason)
        return [
            Note(text=f"training has failed: {reason}", is_warning=True),
            *(Refuse(call=call, error=error) for call in blocked),
            *self._settings.refuse(error),
            *self._checkpointing.refuse(error),
            *(Refuse(call=call, error=error) for call in cluster.waiting.take_data_calls()),
            *assurance.refuse(cluster, error),
            *self._models.refuse_completions(error),
            *self._models.settle(),
            *self.end_if_deserted(),
        ]

    def after_loss(self, now: float) -> list[Instruction]:
        """A participant is gone: perhaps it was the last."""
        cluster = self._cluster
        if cluster.state is ClusterState.TRAINING and not cluster.pending_finish and cluster.membership.last_left_in_peace():
            return self.finish_when_applied("all workers have left", now)
        return self.end_if_deserted()

    def end_if_deserted(self) -> list[Instruction]:
        """Ends the processes, once, if training is over and nobody takes part any more."""
        cluster = self._cluster
        if cluster.is_ended or cluster.is_saving_last or cluster.membership.num_live or cluster.state not in _OVER:
            return []
        cluster.is_ended = True
        return [EndProcesses(exit_code=1 if cluster.failure else 0, reason=cluster.failure or cluster.finish_reason)]
