"""The model that the workers agree on, the worker that initialises it, and the calls about it. Knows no clock, thread or wire."""

from typing import TYPE_CHECKING

from chief.core.waiting import Blocked, Line, slice_s
from chief.core.wording import counted
from chief.policies.factory import check_model
from ps_protocol.errors import ModelMismatch, NotInitializer, PsError, TrainingFailed, Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement, layouts, place
from ps_protocol.roles.chief import (
    AgreedModel,
    CompleteInitializationRequest,
    GetModelRequest,
    ModelReply,
    ModelState,
    Participant,
    RegisterModelRequest,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments
from ps_protocol.roles.shard import ShardSpec, held_bytes

if TYPE_CHECKING:
    from chief.core.state import Cluster

_MAX_DIFFERENCES = 10

# Calls that wait for the model: of workers that presented their own, and of clients that want to know it.
_Ask = RegisterModelRequest | GetModelRequest


class ModelRegistry:
    """Agrees on a model and elects its initialiser: the first worker that presents it, or, if that is lost, the next one that asks."""

    def __init__(self, *, num_shards: int) -> None:
        self.model: ModelSpec | None = None
        self.placement: Placement = ()
        self.layouts: tuple[Layout, ...] = ()
        self.attempt = 0
        self.is_created = False
        self.is_ready = False
        self.initializer: tuple[int, int] | None = None  # worker, incarnation
        self._presenter: int | None = None  # the worker that presented the model, if it was presented to this chief
        # Names of the layouts that shards hold values of, while the model itself is unknown.
        self.held: tuple[str, ...] = ()
        self._num_shards = num_shards

    @property
    def state(self) -> ModelState:
        """ABSENT, WAIT (not initialised yet) or READY."""
        if self.model is None:
            return ModelState.ABSENT
        return ModelState.READY if self.is_ready else ModelState.WAIT

    def check_policy(self, policy: PolicySpec) -> None:
        """Raises InvalidSpec if the agreed model cannot be trained so."""
        if self.model is not None:
            check_model(policy, self.model)

    def check_placeable(self, model: ModelSpec) -> None:
        """Raises InvalidSpec if a model cannot lie on these shards."""
        place(model, num_shards=self._num_shards)

    def check(self, model: ModelSpec) -> None:
        """Raises ModelMismatch if another model is agreed."""
        if self.model is None or model == self.model:
            return
        differences = self.model.differences(model) or ["it differs"]
        rest = len(differences) - _MAX_DIFFERENCES
        text = "; ".join(differences[:_MAX_DIFFERENCES]) + (f"; and {rest} more differences" if rest > 0 else "")
        advice = (
            "To keep training with your numbers, say create_or_join(…, on_optimizer_change='adopt'); with the cluster's: 'keep'"
            if self.model.optimizer_changes(model) is not None
            else "If the cluster's is right, start this worker with it; if yours is, begin anew: restart the cluster, with --restore none"
            " if it has checkpoints"
        )
        raise ModelMismatch(f"your model is not the one that this cluster trains, {self._origin}: {text}. {advice}")

    @property
    def _origin(self) -> str:
        return "which a worker presented to an earlier chief" if self._presenter is None else f"which worker {self._presenter} presented"

    def join(self, worker: int, incarnation: int, model: ModelSpec) -> ModelState:
        """Presents a model; returns INITIALIZE, WAIT or READY. Raises ModelMismatch."""
        self.check(model)
        if self.is_ready:
            return ModelState.READY
        if self.model is None:
            self._place(model)
            self._presenter = worker
        if self.is_created:
            return ModelState.WAIT  # the shards have its values; they are about to work on
        if self.initializer is None:
            self.initializer = (worker, incarnation)
            self.attempt += 1
        return ModelState.INITIALIZE if self.initializer == (worker, incarnation) else ModelState.WAIT

    def complete(self, worker: int, incarnation: int, *, attempt: int) -> bool:
        """The initial values are there. False if that was known. Raises NotInitializer."""
        if self.initializer != (worker, incarnation) or attempt != self.attempt:
            now = "nobody has it now" if self.initializer is None else f"worker {self.initializer[0]} has it (attempt {self.attempt})"
            raise NotInitializer(
                f"worker {worker} (attempt {attempt}) does not have the task of initialising the model: {now}. Register the model again"
            )
        was_created, self.is_created = self.is_created, True
        return not was_created

    def restore(self, model: ModelSpec) -> None:
        """The shards hold this model's values, or are about to."""
        if self.model is None:
            self._place(model)
        self.is_created, self.is_ready = True, False

    def restart(self) -> None:
        """There is no model: the first worker that presents one initialises it."""
        self.model, self.placement, self.layouts, self.held = None, (), (), ()
        self.is_created = self.is_ready = False
        self.initializer = self._presenter = None

    def shard_specs(self, *, epoch: int, step: int, max_staged_per_worker: int) -> tuple[ShardSpec, ...]:
        """Returns the specification of each shard that goes back to this step, under this epoch; there must be a model."""
        model = self.model
        assert model is not None
        return tuple(
            ShardSpec(
                epoch=epoch,
                shard=index,
                layout=layout,
                optimizer=model.optimizer,
                initial_step=step,
                attempt=max(1, self.attempt),
                max_staged_per_worker=max_staged_per_worker,
                averages=model.averages,
                clip=model.clip,
            )
            for index, layout in enumerate(self.layouts)
        )

    def _place(self, model: ModelSpec) -> None:
        placement = place(model, num_shards=self._num_shards)
        found = layouts(placement, num_shards=self._num_shards)
        if self.held and self.held != tuple(layout.hash for layout in found):
            raise ModelMismatch(
                "your model is not the one whose values the parameter servers hold; start all workers with the same model,"
                " or restart the cluster"
            )
        self.placement, self.layouts, self.model = placement, found, model
        self.is_created = bool(self.held)

    def make_ready(self) -> None:
        """The shards work as they shall: training may begin."""
        self.is_ready = True

    def make_unready(self) -> None:
        """The shards are about to go back to a checkpoint."""
        self.is_ready = False

    def hold(self, layouts: tuple[str, ...]) -> None:
        """The shards hold values of these layouts; the model itself is unknown."""
        self.held = layouts

    def lose(self) -> None:
        """Notes that the shards' values of an unknown model are useless now."""
        self.held = ()

    def release(self, worker: int) -> bool:
        """Releases a lost worker; True if it was to initialise the model and another must."""
        if self.is_created or self.initializer is None or self.initializer[0] != worker:
            return False
        self.initializer = None
        return True


class ModelCalls:
    """Answers RegisterModel, CompleteInitialization and GetModel, now or when the model is there."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster, self._out = cluster, cluster.out
        self._registry, self._members, self._servers = cluster.model, cluster.members, cluster.servers
        self._line = cluster.waiting.line(self._expire)
        # Calls that report the first values as written, held until the shards have their settings.
        self._completions: Line[None] = cluster.waiting.line()

    def register(self, call: int, request: RegisterModelRequest, now: float) -> None:
        """Presents a model: the caller initialises it, waits for the initialiser, or finds it ready."""
        member = self._cluster.worker(request.participant, "register a model", now)
        reply = self._join(request)
        self._members.renew(member, now=now)
        self._answer(call, request, reply, now)

    def complete(self, call: int, request: CompleteInitializationRequest, now: float) -> None:
        """The shards hold their initial values: training begins."""
        member, registry = self._cluster.worker(request.participant, "initialise the model", now), self._registry
        self._refuse_if_over()
        if not registry.is_ready and self._servers.unreachable_since is not None:
            # It may be another process by now, which has lost this chief's number, and that another chief has: the values are that one's.
            raise Unavailable(f"the first values are not safe yet: {'; '.join(self._servers.explain_unreachable(now))}")
        is_news = registry.complete(member.index, member.incarnation, attempt=request.attempt)
        self._members.renew(member, now=now)
        if registry.is_ready:
            self._out.reply(call, None)
            return
        self._completions.block(call, None)
        if is_news:
            num_bytes = sum(held_bytes(layout) for layout in registry.layouts)
            self._out.note(f"{member.name} has initialised the model: {counted(len(registry.placement), 'slice')}, {num_bytes:,} bytes")
            self._cluster.training.begin()

    def model_ready(self) -> None:
        """Answers all that wait for the model: the shards hold its first values and their settings."""
        self._completions.answer_all(None)
        self.answer_waiting()

    def refuse_completions(self, error: PsError) -> None:
        """The shards could not be given their settings."""
        self._completions.refuse_all(error)

    def refuse_participants(self, error: PsError) -> None:
        """Refuses waiting participants with this error; callers that only ask for the model wait on."""
        self._completions.refuse_all(error)
        for blocked in self._line:
            if isinstance(blocked.ask, RegisterModelRequest):
                self._line.refuse(blocked.who, error)

    def get(self, call: int, request: GetModelRequest, now: float) -> None:
        """Tells the agreed model, once it is initialised."""
        self._cluster.ending.refuse_if_failed()
        self._answer(call, request, self._agreed_if_any(), now)

    def answer_waiting(self) -> None:
        """Answers callers that need not wait any longer; call it when the model, its initialiser or the shards have changed."""
        for blocked in self._line:
            try:
                reply = self._answer_to(blocked.ask)
            except PsError as error:
                self._line.refuse(blocked.who, error)
            else:
                if reply is not None:
                    self._line.answer(blocked.who, reply)

    def drop(self, participant: Participant, error: PsError) -> None:
        """Releases a lost worker: its calls are refused, and if it was to initialise the model, the next one that waits does."""
        for blocked in self._line:
            if isinstance(blocked.ask, RegisterModelRequest) and blocked.ask.participant == participant:
                self._line.refuse(blocked.who, error)
        if self._registry.release(participant.index):
            self.answer_waiting()

    def _expire(self, blocked: Blocked[_Ask], now: float) -> None:
        """Answers a call that has blocked as long as it may with the reason of the wait."""
        self._line.answer(blocked.who, self._so_far(blocked.ask, now))

    def _answer(self, call: int, ask: _Ask, reply: ModelReply | AgreedModel | None, now: float) -> None:
        if reply is None and slice_s(ask.max_wait_s):
            self._line.block(call, ask, until=now + slice_s(ask.max_wait_s))
        else:
            self._out.reply(call, self._so_far(ask, now) if reply is None else reply)

    def _answer_to(self, ask: _Ask) -> ModelReply | AgreedModel | None:
        """Returns the answer for a waiting call; None: none yet. Raises the error that refuses it."""
        self._cluster.ending.refuse_if_failed()
        return self._join(ask) if isinstance(ask, RegisterModelRequest) else self._agreed_if_any()

    def _agreed_if_any(self) -> AgreedModel | None:
        return self._agreed() if self._registry.is_ready or self._cluster.ending.is_finished else None

    def _join(self, ask: RegisterModelRequest) -> ModelReply | None:
        registry, model, participant, ending = self._registry, ask.model, ask.participant, self._cluster.ending
        registry.check(model)
        check_model(self._cluster.settings.config.policy, model)
        self._refuse_if_over()
        if not self._servers.are_adopted:
            return None
        if ask.joins_only and registry.initializer is None and not registry.held:
            return None  # waits for another worker's; where shards hold values of the model there is nothing to initialise
        state = registry.join(participant.index, participant.incarnation, model)
        if state is ModelState.WAIT:
            return None
        if state is not ModelState.READY:
            return self._reply(state)
        # Contributions that are counted and not applied when training ends are left out.
        attached = self._cluster.attachments.lasting_of(participant.index, only_applied=ending.is_finished)
        return self._reply(state, attached=attached)

    def _refuse_if_over(self) -> None:
        """Raises TrainingFailed if training was finished before there was a model: none begins any more."""
        ending = self._cluster.ending
        if ending.is_finished and not self._registry.is_ready:
            raise TrainingFailed(ending.words_before_a_model)

    def _so_far(self, ask: _Ask, now: float) -> ModelReply | AgreedModel:
        if isinstance(ask, GetModelRequest):
            return self._agreed()
        return self._reply(self._registry.state, waiting_for=self._cluster.explain(now))

    def _reply(self, state: ModelState, *, waiting_for: str = "", attached: Attachments = NO_ATTACHMENTS) -> ModelReply:
        config = self._cluster.settings.config
        return ModelReply(
            state=state,
            placement=self._registry.placement,
            attempt=self._registry.attempt,
            max_staged_per_worker=config.max_staged_per_worker,
            global_step=self._cluster.step,
            waiting_for=waiting_for,
            policy=config.policy,
            attached=attached,
            shards_version=self._servers.version_under(self._members.chief_incarnation),
        )

    def _agreed(self) -> AgreedModel:
        registry = self._registry
        return AgreedModel(
            state=registry.state,
            model=registry.model,
            placement=registry.placement,
            global_step=self._cluster.step,
            optimizers=self._cluster.settings.optimizers,
            policy=self._cluster.settings.config.policy,
        )
