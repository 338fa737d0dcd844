"""How training ends, and this process: finished, failed, deserted, or asked to leave the training to another chief."""

import enum
import math
from typing import TYPE_CHECKING

from chief.core.messages import AskedToEnd, EndProcesses, NoteKind
from chief.core.waiting import Line
from chief.core.wording import printable
from ps_protocol.errors import TrainingFailed
from ps_protocol.roles.chief import ClusterState, End, FinishTrainingRequest

if TYPE_CHECKING:
    from chief.core.state import Cluster

# A step that is being applied when training is finished is the last one, if the shards manage it within this time.
_FINISH_GRACE_S = 1.0
# Workers that have not come yet when training is finished have so long to come and hear it: as long as `connect()` tries by default.
_LATECOMERS_S = 60.0
# Once this process is asked to end: how long participants of a training that is over may take to leave, and a checkpoint to become whole.
_LEAVE_GRACE_S = 1.5
_SAVE_GRACE_S = 7.0
_LOOK_AGAIN_S = 0.05


class _Stage(enum.Enum):
    """FINISHING: a step is being applied that shall be the last one."""

    NOT_YET = 1
    FINISHING = 2
    FINISHED = 3
    FAILED = 4


class Ending:
    """Whether and why training is over, and when the processes end."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster, self._out = cluster, cluster.out
        self._stage = _Stage.NOT_YET
        # Why training is over, or is about to be; and what is to be told once it is finished.
        self._why, self._end = "", End.FINISHED
        # The calls that wait for the last step.
        self._calls: Line[None] = cluster.waiting.line()
        self._finish_timer = cluster.timers.timer(self.finish_as_asked)
        # Set while workers may still come to a training that is finished.
        self._latecomers_timer = cluster.timers.timer(lambda now: self.end_if_deserted())
        self._is_asked = False
        # The order to end the processes, once it is given.
        self.ended: EndProcesses | None = None
        # Set once this process is asked to end: no checkpoint holds it up beyond the one, no participant of a training that is over
        # beyond the other.
        self._save_by = self._leave_by = math.inf
        self._end_timer = cluster.timers.timer(self._end_in_time)

    @property
    def is_failed(self) -> bool:
        """Whether the cluster cannot continue."""
        return self._stage is _Stage.FAILED

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""
        return self._stage is _Stage.FINISHED

    @property
    def is_over(self) -> bool:
        """Whether training is finished, or has failed."""
        return self.is_finished or self.is_failed

    @property
    def is_finishing(self) -> bool:
        """Whether training is finished as soon as the step is applied that is being applied."""
        return self._stage is _Stage.FINISHING

    @property
    def end(self) -> End:
        """Whether training is finished, and how it has ended."""
        return self._end if self.is_finished else End.NOT_YET

    @property
    def reason(self) -> str:
        """Why training is over; empty: it is not."""
        return self._why if self.is_over else ""

    @property
    def awaited_workers(self) -> str:
        """A description of the workers that may still come to a training that is finished; empty: none."""
        num_awaited = (self._cluster.settings.config.num_workers or 1) - self._cluster.members.num_known_workers
        if self._latecomers_timer.due is None or num_awaited <= 0:
            return ""
        return "1 worker" if num_awaited == 1 else f"{num_awaited} workers"

    @property
    def words_before_a_model(self) -> str:
        """What callers are told that wait for a model once training is finished."""
        return f"training was finished ({self._why}) before a model was initialised; start the cluster again"

    def refuse_if_failed(self) -> None:
        """Raises TrainingFailed once the cluster cannot continue."""
        if self.is_failed:
            raise TrainingFailed(self._why)

    def refuse_changes_if_over(self) -> None:
        """Raises TrainingFailed once training is over."""
        self.refuse_if_failed()
        if self.is_finished:
            raise TrainingFailed(f"training is finished ({self._why}); its settings cannot be changed any more")

    # -- training

    def ask(self, call: int | None, request: FinishTrainingRequest, now: float) -> None:
        """A client ends training."""
        if self.is_over:
            if call is not None:
                self._out.reply(call, self._cluster.step)
            self._latecomers_timer.clear()
            self.end_if_deserted()
            return
        self._is_asked = True
        if call is not None:
            self._calls.block(call, None)
        if not self.is_finishing:
            self._end = End.INTERRUPTED if request.interrupts else End.FINISHED
        self._finish_when_applied(printable(request.reason) or "finished by request", now)

    def _finish_when_applied(self, reason: str, now: float) -> None:
        """Finishes at once, or as soon as the step is applied that is being applied now, or soon, if this chief has no servers yet."""
        policy = self._cluster.policy
        if policy.is_in_grace:
            policy.end_grace()  # what is accepted is applied
            self._out.afterwards(self._cluster.proceed)
        if not policy.is_complete and self._cluster.state is not ClusterState.CONNECTING:
            self.finish(reason, now)
        elif not self.is_finishing:
            self._stage, self._why = _Stage.FINISHING, reason
            if policy.is_complete:
                policy.finish()
            self._finish_timer.set(now + _FINISH_GRACE_S)  # servers that have not been adopted would take no order to end

    def finish_as_asked(self, now: float) -> None:
        """Ends training as requested: with the step that has been applied, or without the step that is being applied."""
        self.finish(self._why, now)

    def finish(self, reason: str, now: float) -> None:
        """Finishes training: answers all that wait. Unless it was asked for, the processes stay for workers that have not come yet."""
        cluster = self._cluster
        self._stage, self._why = _Stage.FINISHED, reason
        self._finish_timer.clear()
        cluster.checkpoints.finish(now, is_idle=cluster.training.is_idle)
        cluster.recovery.give_up()
        how = "was interrupted" if self._end is End.INTERRUPTED else "is finished"
        self._out.note(f"training {how} at step {cluster.step}: {reason}", kind=NoteKind.FINISHED)
        self._calls.answer_all(cluster.step)
        cluster.training.release()
        cluster.settings.refuse(TrainingFailed(f"training was finished ({reason}) before its settings were changed"))
        cluster.model_calls.refuse_completions(TrainingFailed(self.words_before_a_model))
        cluster.model_calls.answer_waiting()
        if not self._is_asked:
            self._latecomers_timer.set(now + _LATECOMERS_S)
        if self.awaited_workers and not cluster.members.num_live:
            self._out.note(f"waiting for {self.awaited_workers} to come and hear it, for {_LATECOMERS_S:.0f} s")
        self.end_if_deserted()

    def fail(self, reason: str) -> None:
        """Fails the cluster, which cannot continue: all that wait get the reason."""
        if self.is_over:
            return
        cluster, error = self._cluster, TrainingFailed(reason)
        self._stage, self._why = _Stage.FAILED, reason
        cluster.recovery.give_up()
        self._finish_timer.clear()
        self._out.note(f"training has failed: {reason}", kind=NoteKind.FINISHED, is_warning=True)
        self._calls.refuse_all(error)
        cluster.training.refuse_tokens(error)
        cluster.settings.refuse(error)
        cluster.checkpoints.refuse(error)
        cluster.training.refuse_the_rest(error)
        cluster.model_calls.refuse_completions(error)
        cluster.model_calls.answer_waiting()
        cluster.joining.welcome()
        self.end_if_deserted()

    def lost_somebody(self, now: float) -> None:
        """Handles the loss of a participant: perhaps it was the last."""
        cluster = self._cluster
        if cluster.state is ClusterState.TRAINING and not self.is_finishing and cluster.members.last_left_in_peace():
            self._finish_when_applied("all workers have left", now)
        else:
            self.end_if_deserted()

    # -- this process

    def end_if_deserted(self) -> None:
        """Ends the processes, once, if training is over and all participants have left."""
        if self.is_over and not (self._cluster.checkpoints.is_saving_last or self._cluster.members.num_live or self.awaited_workers):
            self._end_processes()

    def _end_processes(self) -> None:
        if self.ended is None:
            why = self.reason or f"asked to; training continues with another chief, at step {self._cluster.step}"
            self.ended = EndProcesses(exit_code=int(self.is_failed), reason=why, has_successor=not self.is_over)
            self._out.add(self.ended)
            self._cluster.joining.welcome()

    def leave(self, event: AskedToEnd, now: float) -> None:
        """Ends this process soon, and no training: a later chief continues it. Asked again, ends this process at once.

        A step is saved first, unless a server is lost: then its part cannot be saved.
        """
        is_again = self._save_by < math.inf
        self._save_by = now if is_again else now + _SAVE_GRACE_S
        self._leave_by = now if is_again else math.inf
        if not self.is_over and not self.is_finishing:
            self._out.note(f"{event.why}: this chief ends, and leaves the training to its successor", kind=NoteKind.CHIEF)
            if self._cluster.model.is_ready and all(server.is_reachable for server in self._cluster.servers):
                self._cluster.checkpoints.save_before_end()
        self._end_in_time(now)

    def _end_in_time(self, now: float) -> None:
        """Ends this process, unless a checkpoint may become whole in time, or participants have had no time to hear that all is over."""
        if self.is_over:
            self._leave_by = min(self._leave_by, now + _LEAVE_GRACE_S)
        is_saving = (self._cluster.checkpoints.is_saving or self.is_finishing) and now < self._save_by
        if is_saving or (self.is_over and self._cluster.members.num_live and now < self._leave_by):
            self._end_timer.set(now + _LOOK_AGAIN_S)
        else:
            self._end_processes()
