"""How a model is agreed on, and how training ends: finished or failed. Knows no thread or wire."""

from chief.core import replies
from chief.core.checkpoints import Checkpointing
from chief.core.cluster import Cluster
from chief.core.messages import (
    CompleteInitialization,
    EndProcesses,
    FinishTraining,
    GetModel,
    Instruction,
    Note,
    Refuse,
    RegisterModel,
    Reply,
)
from chief.core.model import check_clip
from chief.core.parameter_servers import held_bytes
from chief.core.replies import finished
from chief.core.settings import Settings
from chief.core.waiting import Key, ModelCall, slice_s
from chief.core.wording import printable
from ps_protocol.errors import PsError, TrainingFailed, Unavailable
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import AgreedModel, ClusterState, LeaseReply, LeaseResult, ModelReply, ModelState, Participant

# How workers agree on the model and who initialises it: methods of the coordinator. Knows the cluster; no clock, thread or wire.


class ModelCalls:
    """Answers RegisterModel, CompleteInitialization and GetModel, now or when the model is there."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        # Calls that say that the shards hold their first values, while those are told how to work.
        self._completions: list[int] = []

    def register(self, event: RegisterModel, now: float) -> list[Instruction]:
        """Presents a model: the caller initialises it, waits for who does, or finds it ready."""
        cluster = self._cluster
        member = cluster.check_worker(event.participant, "register a model", now=now)
        # As the chief knows it: the caller may know of no life.
        participant = cluster.membership.participant(member)
        waiting = ModelCall(call=event.call, participant=participant, model=event.model, may_initialize=event.may_initialize)
        reply = self._join(participant, event.model, may_initialize=event.may_initialize)
        cluster.renew(member, now=now)
        return self._answer(waiting, reply, event.max_wait_s, now)

    def complete(self, event: CompleteInitialization, now: float) -> list[Instruction]:
        """The shards hold their initial values: training begins."""
        cluster = self._cluster
        member = cluster.check_worker(event.participant, "initialise the model", now=now)
        if not cluster.registry.is_ready and cluster.shards.unreachable_since is not None:
            # It may be another process by now, which has lost this chief's number, and that another chief has: the values are that one's.
            raise Unavailable(f"the first values cannot be counted on yet: {'; '.join(cluster.shards.explain_unreachable(now))}")
        is_news = cluster.registry.complete(member.index, member.incarnation, attempt=event.attempt)
        cluster.renew(member, now=now)
        if cluster.registry.is_ready:
            return [Reply(call=event.call, value=None)]
        self._completions.append(event.call)
        if not is_news:
            return []
        num_bytes = sum(held_bytes(layout) for layout in cluster.registry.layouts)
        words = f"{member.name} has initialised the model: slices={len(cluster.registry.placement)} bytes={num_bytes}"
        return [Note(text=words), *(self._settings.open_model() or self.open(now))]

    def open(self, now: float) -> list[Instruction]:
        """The shards hold their initial values and work as they shall: all who wait for that are told."""
        cluster = self._cluster
        cluster.registry.open()
        cluster.has_opened = True
        cluster.ledger.open_step(cluster.policy.step, now=now)
        completions, self._completions = self._completions, []
        return [*(Reply(call=call, value=None) for call in completions), *self.settle(), replies.keep(cluster)]

    def refuse_completions(self, error: PsError) -> list[Instruction]:
        """The shards cannot be told how to work."""
        completions, self._completions = self._completions, []
        return [Refuse(call=call, error=error) for call in completions]

    def get(self, event: GetModel, now: float) -> list[Instruction]:
        """Tells the agreed model, once it is initialised."""
        self._cluster.refuse_if_failed()
        reply = self._agreed() if self._cluster.registry.is_ready or self._cluster.is_finished else None
        return self._answer(ModelCall(call=event.call), reply, event.max_wait_s, now)

    def settle(self) -> list[Instruction]:
        """Answers those who wait and need not any longer; to be called when the model, its initialiser or the shards have changed."""
        instructions: list[Instruction] = []
        for waiting in self._cluster.waiting.model_calls():
            try:
                reply = self._settled(waiting)
                instruction: Instruction | None = Reply(call=waiting.call, value=reply) if reply is not None else None
            except PsError as error:
                instruction = Refuse(call=waiting.call, error=error)
            if instruction is not None:
                self._cluster.waiting.take_model_call(waiting.call)
                instructions.append(instruction)
        return instructions

    def drop(self, participant: Participant, error: PsError) -> list[Instruction]:
        """A worker is gone: its calls are refused, and if it was to initialise the model, the next one that waits does."""
        instructions: list[Instruction] = []
        for waiting in self._cluster.waiting.model_calls():
            if waiting.participant == participant:
                self._cluster.waiting.take_model_call(waiting.call)
                instructions.append(Refuse(call=waiting.call, error=error))
        if self._cluster.registry.release(participant.index):
            instructions += self.settle()
        return instructions

    def expire(self, call: int, now: float) -> list[Instruction]:
        """A call has blocked as long as it may: its caller is told what it waits for."""
        waiting = self._cluster.waiting.take_model_call(call)
        return [self._told(waiting, now)] if waiting is not None else []

    def _answer(self, waiting: ModelCall, reply: ModelReply | AgreedModel | None, max_wait_s: float, now: float) -> list[Instruction]:
        if reply is not None:
            return [Reply(call=waiting.call, value=reply)]
        if not slice_s(max_wait_s):
            return [self._told(waiting, now)]
        self._cluster.waiting.add_model_call(waiting, until=now + slice_s(max_wait_s))
        return []

    def _settled(self, waiting: ModelCall) -> ModelReply | AgreedModel | None:
        self._cluster.refuse_if_failed()
        if waiting.participant is not None and waiting.model is not None:
            return self._join(waiting.participant, waiting.model, may_initialize=waiting.may_initialize)
        return self._agreed() if self._cluster.registry.is_ready or self._cluster.is_finished else None

    def _join(self, participant: Participant, model: ModelSpec, *, may_initialize: bool) -> ModelReply | None:
        cluster = self._cluster
        cluster.registry.check(model)
        check_clip(model, cluster.config.policy)
        if cluster.is_finished and not cluster.registry.is_ready:
            raise TrainingFailed(f"training was finished ({cluster.finish_reason}) before a model was initialised; start the cluster again")
        if not cluster.shards.are_adopted:
            return None
        if not may_initialize and cluster.registry.initializer is None and not cluster.registry.held:
            return None  # waits for somebody else's; where shards hold values of the model there is nothing to initialise
        state = cluster.registry.join(participant.index, participant.incarnation, model)
        return None if state is ModelState.WAIT else self._reply(state)

    def _told(self, waiting: ModelCall, now: float) -> Instruction:
        if waiting.model is None:
            return Reply(call=waiting.call, value=self._agreed())
        return Reply(call=waiting.call, value=self._reply(self._cluster.registry.state, waiting_for=self._cluster.explain(now)))

    def _reply(self, state: ModelState, *, waiting_for: str = "") -> ModelReply:
        cluster = self._cluster
        return ModelReply(
            state=state,
            placement=cluster.registry.placement,
            attempt=cluster.registry.attempt,
            max_staged_per_worker=cluster.config.max_staged_per_worker,
            global_step=cluster.policy.step,
            waiting_for=waiting_for,
            policy=cluster.config.policy,
        )

    def _agreed(self) -> AgreedModel:
        registry = self._cluster.registry
        return AgreedModel(state=registry.state, model=registry.model, placement=registry.placement, global_step=self._cluster.policy.step)


# How training ends, well or badly: the coordinator's methods for that. Knows the cluster; no clock, thread or wire.


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
            *replies.release(cluster),
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
            *replies.refuse(cluster, error),
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
