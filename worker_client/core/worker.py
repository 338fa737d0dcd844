"""One worker's part in the training: joining, reading, contributing, waiting, the end. Pure.

A place belongs to one participant. When the epoch rises (the cluster has rolled back to a checkpoint), or the chief has ended the worker's
lease, the worker takes its place again and continues at the step that is open then. Its earlier pushes are rolled back.
"""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from ps_protocol.errors import (
    EpochMismatch,
    InternalError,
    MalformedMessage,
    NotInitializer,
    PsError,
    StepGone,
    StepNotReady,
    Superseded,
    TooManyPushes,
    TrainingFailed,
)
from ps_protocol.model.data import DataRange
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import (
    ClusterState,
    ClusterStatusRequest,
    CommitPushRequest,
    CommitResult,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    ModelReply,
    ModelState,
    Participant,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId, contributions_named
from ps_protocol.roles.shard import PushResult
from worker_client.core.outcomes import Push, push_of
from worker_client.core.place import LOST, Place
from worker_client.core.sides import ChiefSide, Deadline, ModelSide, Result, WorkerSide
from worker_client.core.state import WorkerState
from worker_client.model.user_state import UserState

Model = TypeVar("Model", bound=ModelSide)

_TRY_AGAIN_S = 0.1
# How often one push is repeated to name contributions that shards may drop to make room: each shard may hold other ones.
_MAX_DROPS = 16
# StepNotReady: the worker has a token for its step, so a server at an earlier step has been restored.
_LOST_OR_BEHIND = (*LOST, StepNotReady)


class Worker(Generic[Model]):
    """The calls of one worker, one after the other. For one thread. `state`: its state at its present place.

    `chief`: the place's, and as the worker's own thread calls it. `timeout_s`: how long to wait for a server that does not answer.
    `num_rollbacks`: how often the worker has come back in another epoch, or another life of the cluster. `recovery_timeout_s`: how long a
    call waits until the worker has its model again (None: no limit); a shorter limit of the call counts instead.
    """

    def __init__(self, place: Place, *, chief: ChiefSide, own: WorkerSide[Model], timeout_s: float) -> None:
        self.place, self.chief, self.own = place, chief, own
        self.who = f"worker {place.participant.index}"
        self.state = WorkerState(place.participant, step=place.registration.global_step, commits=place.commits)
        self.num_rollbacks = 0
        # The agreed model. `place.model` is set later, after the first token.
        self._agreed: ModelSpec | None = None
        # The program's state. When the worker takes another place, it is replaced by the cluster's copy.
        self.user_state = UserState()
        self.recovery_timeout_s: float | None = None
        self._timeout_s = timeout_s
        # The model as the worker has it at its present place, or had it at the former one while it is coming back; None: no model yet.
        self.model_side: Model | None = None
        # The state that the variables belong to; differs from `state` if coming back failed half-way; None before there is a model.
        self._present: WorkerState | None = None
        # The registration with which the worker joined the model, or came back to it.
        self._joined = place.registration
        # After coming back, or if nothing was sent: the worker may compute for its present step, and gets no other token before it has.
        self._may_compute = False
        # Ranges of the training data: those that the next contribution is made from; whether some of these have gone back to the chief; and
        # those that the worker still holds of a contribution that was not sent for this reason.
        self._ranges: tuple[DataRange, ...] = ()
        self._has_lost_ranges = False
        self._unused: tuple[DataRange, ...] = ()

    @property
    def has_model(self) -> bool:
        """Whether the worker has joined a model."""
        return self._present is not None

    @property
    def participant(self) -> Participant:
        """The participant that the variables belong to: a former one until the worker has come back to the model at a new place."""
        assert self._present is not None
        return self._present.participant

    # -- to the model, and back to it

    async def join(self, model: ModelSpec, *, may_create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it.

        Blocks while another worker creates it; takes over if that worker is lost, unless `may_create` is False. Raises ModelMismatch,
        DeadlineExceeded.
        """
        place, wait = self.place, self.chief.begin_wait(f"{self.who} joins the model", timeout_s)
        while True:
            registration = place.registration
            try:
                self.model_side, has_created = await self._take_part(model, registration, wait, may_create=may_create)
                break
            except LOST as error:
                await self._await_other_turn(registration, error, wait)
        place.model, self._present, self._joined = model, self.state, registration
        return has_created

    async def _come_back(self, cause: PsError, *, timeout_s: float | None) -> None:
        """Joins the model again at the worker's new place; raises the cause if there is no new place.

        May be called again after an error.
        """
        place, present, left = self.place, self._present, self.model_side
        assert present is not None and place.model is not None and left is not None
        former = present.participant
        cause = await self._await_other(self._joined, cause)
        limits_s = [limit_s for limit_s in (timeout_s, self.recovery_timeout_s) if limit_s is not None]
        wait = self.chief.begin_wait(f"{self.who} comes back to the model", min(limits_s, default=None))
        while True:
            registration = place.registration
            try:
                self.model_side, _ = await self._take_part(place.model, registration, wait, may_create=False)
                break
            except LOST as error:
                await self._await_other_turn(registration, error, wait)
        self._present, self._joined, self._may_compute = self.state, registration, True
        self._has_lost_ranges, self._ranges, self._unused = self._has_lost_ranges or bool(self._ranges), (), ()
        if not registration.participant.shares_era(former):
            self.num_rollbacks += 1
        left.release()
        await self.own.came_back(former, cause)
        # The error's traceback holds this frame: unless it is deleted, the cycle keeps the variables of lost servers in memory.
        del cause

    async def _await_other(self, known: Registration, cause: PsError) -> PsError:
        wait = self.chief.begin_wait(f"the session of {self.who} asks what has become of its servers", self._timeout_s)
        return await self.place.await_other(known, cause, wait)

    async def _await_other_turn(self, known: Registration, cause: PsError, wait: Deadline) -> None:
        """Waits before the next attempt, within `wait`; returns at once if the worker already has another place."""
        await self._await_other(known, cause)
        wait.explain(cause.message)
        if self.place.participant is known.participant:
            # The chief has registered the worker and then refused it, so another attempt must not follow at once.
            await self.chief.pause(wait, _TRY_AGAIN_S)

    async def _take_part(self, model: ModelSpec, registration: Registration, wait: Deadline, *, may_create: bool) -> tuple[Model, bool]:
        """Agrees on the model, opens it, and in strict sync waits for a step that takes something from this worker.

        Returns the model as opened, and whether this worker wrote its first values.
        """
        reply, has_created = await self._agree(model, registration.participant, wait, may_create=may_create)
        self._agreed = model
        commits, participant = self.place.commits, registration.participant
        commits.begin(participant)
        # A registration from before a rollback may have the step that was open then.
        step = min(registration.global_step, reply.global_step)
        self.state = WorkerState(participant, step=step, global_step=reply.global_step, commits=commits, former=self.state)
        opened = await self.own.open(model, reply, has_created=has_created)
        if self.state.join(policy=reply.policy, global_step=reply.global_step, may_contribute=registration.may_contribute):
            await self._take_token(None, wait.left_s())
        return opened, has_created

    def _restore_state(self, text: str) -> None:
        try:
            self.user_state.restore(text)
        except MalformedMessage as error:
            # This SDK sends no such state, but another holder of a worker's token may have; raising would lock this index out.
            self.user_state.clear_unreadable(text)
            self.own.warn(f"{error.message}; it continues with an empty user_state")

    async def _agree(self, model: ModelSpec, participant: Participant, wait: Deadline, *, may_create: bool) -> tuple[ModelReply, bool]:
        """Waits until the variables have first values, and writes them if asked to.

        Returns the reply, and whether this worker wrote them.
        """
        has_created, num_attempts = False, 0
        while True:
            reply = await self._ask_to_agree(model, participant, wait, may_create=may_create)
            if reply.state in (ModelState.READY, ModelState.INITIALIZE) and reply.shards_version != self.place.registration.shards_version:
                # Other processes hold the shards than when the worker registered; they may change during recovery.
                await self._hear_shards()
                if self.place.participant is not participant:
                    raise EpochMismatch(f"{self.who} has registered again since it agreed on the model")
            if reply.state is ModelState.READY and reply.placement:
                self._restore_state(reply.attached.user_state)
                return reply, has_created
            if reply.state is ModelState.INITIALIZE and reply.placement:
                num_attempts += 1
                if num_attempts > 1:
                    wait.explain(f"the chief asks for the first values of the variables again and again, {num_attempts} times by now")
                    await self.chief.pause(wait, _TRY_AGAIN_S)
                await self.own.create(reply)
                has_created = await self._complete(participant, reply.attempt)
                continue
            if reply.state is ModelState.ABSENT and self._present is not None:
                status = await self.chief.ask(ClusterStatusRequest(), what="status")
                if status.state is ClusterState.WAITING_FOR_MODEL:
                    raise TrainingFailed(
                        "the cluster has begun anew, and its model is lost: there was no checkpoint to go back to; start the workers again"
                    )
            wait.explain(reply.waiting_for, is_of_all=True)

    async def _ask_to_agree(self, model: ModelSpec, participant: Participant, wait: Deadline | None, *, may_create: bool) -> ModelReply:
        """Presents the model; the answer comes at once if `wait` is None."""

        async def present() -> ModelReply:
            max_wait_s = 0.0 if wait is None else wait.slice_s()
            request = RegisterModelRequest(participant=participant, model=model, max_wait_s=max_wait_s, joins_only=not may_create)
            return await self.chief.ask(request, what="agree on the model")

        return await self.place.ask(participant, present)

    async def _complete(self, participant: Participant, attempt: int) -> bool:
        """Reports that the first values have been written; returns whether they came in time."""
        request = CompleteInitializationRequest(participant=participant, attempt=attempt)
        try:
            await self.place.ask(participant, lambda: self.chief.ask(request, what="complete the initialization"))
        except NotInitializer as error:
            self.own.warn(f"the first values came too late, another worker gives them: {error}")
            return False
        return True

    async def _hear_shards(self) -> None:
        """Learns which servers hold the shards, by another version of them than the worker knows."""
        await self.place.hear_shards(self.place.registration.shards_version)
        self.own.heard_of_shards()

    @property
    def _model(self) -> Model:
        assert self.model_side is not None
        return self.model_side

    def _check_present(self) -> None:
        """Raises one of LOST if the worker's variables do not belong to its present place."""
        state = self.state
        if self._present is not state:
            raise Superseded(f"{self.who} left its place and has no variables of its new one yet, at step {state.local_step}")

    def _check_place(self) -> None:
        if self.place.participant is not self.state.participant or self._present is not self.state:
            raise EpochMismatch(f"{self.who} has registered again since it read its variables")

    # -- reading

    async def do(self, act: Callable[[Model], Result], *, timeout_s: float | None = None) -> Result:
        """Returns the result of `act` with the model; repeats it if the worker has taken another place."""

        async def begin() -> Result:
            return act(self._model)

        return await self._repeat_if_moved(begin, timeout_s)

    async def read(self, *, is_copied: bool, names: Collection[str] | None = None, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the dense variables of the worker's step, or the newest; `is_copied`: as copies, else as views; `names` None: all."""
        return await self._repeat_if_moved(lambda: self._read(is_copied=is_copied, names=names), timeout_s)

    async def read_rows(self, name: str, indices: object, *, timeout_s: float | None = None) -> Array:
        """Returns rows of a table, of the worker's step, or the newest."""
        return await self._repeat_if_moved(lambda: self._read_rows(name, indices), timeout_s)

    async def check_place(self) -> None:
        """Comes back, if the worker has become another participant."""
        await self._repeat_if_moved(self._checked, None)

    async def _repeat_if_moved(self, begin: Callable[[], Awaitable[Result]], timeout_s: float | None) -> Result:
        while True:
            try:
                self._check_present()
                return await begin()
            except _LOST_OR_BEHIND as error:
                await self._come_back(error, timeout_s=timeout_s)

    async def _checked(self) -> None:
        self._check_place()

    async def _read(self, *, is_copied: bool, names: Collection[str] | None) -> dict[str, Array]:
        if self.place.is_finished and not self.state.is_finished:
            await self._learn_end()
        await self._fetch(names)
        self.state.has_newest = False  # the next read fetches anew
        wait: Deadline | None = None
        while True:
            try:
                given = await self._model.give(is_copied=is_copied, names=names)
            except StepGone as error:
                wait = wait or self.chief.begin_wait(f"{self.who} reads the variables", self._timeout_s)
                await self._move_on(wait, error)
                await self._fetch(names)
            else:
                return given

    async def _read_rows(self, name: str, indices: object) -> Array:
        if self.place.is_finished and not self.state.is_finished:
            await self._learn_end()
        state, wait = self.state, self.chief.begin_wait(f"{self.who} reads rows of {name!r}", self._timeout_s)
        while not state.reads_latest:
            try:
                found = await self._model.read_rows(name, indices, step=state.local_step, is_aligned=True)
            except StepGone as error:
                if self._model.held_step == state.local_step:
                    # The cluster is two steps past the variables that were read, so gradients computed from them will be dropped anyway.
                    break
                await self._move_on(wait, error)
            else:
                return found.values
        found = await self._model.read_rows(name, indices, step=None, is_aligned=not state.policy.applies_on_arrival)
        if found.step is not None and state.follows_reads and not self._model.has_dense:
            state.local_step = found.step
        return found.values

    async def _fetch_unless_finished(self, names: Collection[str] | None) -> None:
        """Fetches the variables of the worker's step, as `contribute` does; nothing once training is finished."""
        if not self.state.is_finished:
            await self._fetch(names)

    async def _fetch(self, names: Collection[str] | None) -> None:
        state = self.state
        wait: Deadline | None = None
        while not state.reads_latest:
            try:
                # After the end, the variables do not change any more, but the servers end.
                await self._model.fetch(state.local_step, may_view=not state.is_finished, names=names)
                return
            except StepGone as error:
                wait = wait or self.chief.begin_wait(f"{self.who} reads the variables", self._timeout_s)
                await self._move_on(wait, error)
        if not state.has_newest:
            state.read_newest(await self._model.fetch_newest(is_aligned=not state.policy.applies_on_arrival))

    async def _move_on(self, wait: Deadline, error: StepGone) -> None:
        """Moves to a newer step after StepGone: others continued without this worker, or the policy has no common steps now."""
        wait.explain(error.message)
        await self._learn_policy()
        if not self.state.reads_latest:
            await self._take_token(None, self._timeout_s)  # answered at once: the step has moved on

    async def _learn_end(self) -> None:
        """Learns the last step, after a heartbeat's answer that training is finished."""
        await self._take_token(None, self._timeout_s)  # answered at once

    # -- giving

    async def contribute(
        self,
        content: Any,
        *,
        is_waited_for: bool,
        timeout_s: float | None = None,
        skipped: tuple[DataRange, ...] = (),
        attached: Attachments = NO_ATTACHMENTS,
        weight: float = 1.0,
        names: Collection[str] | None = None,
    ) -> Push:
        """Pushes one contribution and has it counted; if `is_waited_for`, waits for a token and reads the variables, or those named.

        `content` None: a contribution without a gradient for any variable, which counts in no mean; with it, the ranges `skipped` count as
        done. `attached`: the program's attachments, to which its user state is added. `weight`: how much it counts in its step's mean.
        """
        state, present = self.state, self._present
        assert present is not None
        step = state.local_step
        if content is not None and self._has_lost_ranges:
            # It is made from samples that others may get now, and would count them twice.
            self._has_lost_ranges, self._unused, self._ranges, self._may_compute = False, self._ranges, (), True
            return state.rolled_back(step)
        commit: PushCommit | None = None
        ranges = tuple(given.id for given in (self._ranges if content is not None else skipped))
        try:
            self._check_place()
            commit = await self._push(content, is_waited_for=is_waited_for, ranges=ranges, attached=attached, weight=weight)
            self._may_compute = False
            if content is not None:
                self._ranges = ()
            if is_waited_for:
                if not state.reads_latest:
                    self._model.expect(step + 1, names)
                result = await self._take_token(commit, timeout_s)
                if result is None:
                    raise InternalError("the chief granted a token without the outcome of the contribution sent with the request")
                if not state.is_finished:
                    await self._fetch(names)
            else:
                result = await self._count(commit)
            return push_of(result, step=step, is_finished=state.is_finished)
        except _LOST_OR_BEHIND as error:
            accepted = state.commits.accepted(commit) if commit is not None else None
            if content is not None:
                self._ranges = ()  # the ranges share the outcome of this contribution
            await self._come_back(error, timeout_s=timeout_s)
            outcome = await self._outcome_at_move(commit, step=step, giver=present.participant, accepted=accepted)
        while is_waited_for:
            before = self.state.participant
            await self._repeat_if_moved(partial(self._fetch_unless_finished, names), timeout_s)
            if self.state.participant.shares_era(before):
                return replace(outcome, is_finished=self.state.is_finished)
            # The cluster has rolled back once more, perhaps to a step before the accepted contribution.
            outcome = await self._outcome_at_move(commit, step=step, giver=before, accepted=None)
        return outcome

    async def wait(self, *, timeout_s: float | None) -> bool:
        """Waits for a token, or the end; after a rollback there is a token for the present step. Returns whether training continues."""
        if self._may_compute:
            self._check_present()
            self._may_compute = False  # once only: a worker that skips that step waits for the next one
            return not self.state.is_finished
        return await self.follow(timeout_s=timeout_s)

    async def follow(self, *, timeout_s: float | None) -> bool:
        """Waits for a token, or the end, even if this worker may compute for its present step. Returns whether training continues."""
        try:
            self._check_present()
            if not self.state.is_finished:
                await self._take_token(None, timeout_s)
        except LOST as error:
            await self._come_back(error, timeout_s=timeout_s)
            self._may_compute = False  # this wait has ended with that error
        return not self.state.is_finished

    async def _push(
        self, content: Any, *, is_waited_for: bool, ranges: tuple[int, ...], attached: Attachments, weight: float
    ) -> PushCommit:
        """Sends all shards their parts of a contribution, and returns the commit that makes it count."""
        state = self.state
        step = state.local_step
        staged = await self._model.stage(content, step, is_waited_for=is_waited_for)
        push_id = state.number_push()
        try:
            try:
                results = await self._push_once(staged, push_id, step)
            except TooManyPushes as error:
                if not state.policy.accepts_stale:
                    raise
                results = await self._push_when_there_is_room(staged, push_id, step, error.message)
        except BaseException:
            state.refused.append(push_id.sequence)
            raise
        user_state = self.user_state.to_send()
        if user_state:
            attached = replace(attached, user_state=user_state)
        return state.pushed(push_id, results, step=step, ranges=ranges, attached=attached, weight=weight)

    async def _push_once(self, staged: Any, push_id: PushId, step: int) -> list[PushResult]:
        """Sends all shards their parts; a shard full of uncommitted contributions is told to drop them first. Raises TooManyPushes."""
        state, num_tries = self.state, 0
        while True:
            try:
                results = await self._model.push(staged, push_id, step, refused=tuple(state.refused))
            except TooManyPushes as error:
                num_tries += 1
                if num_tries > _MAX_DROPS or not state.refuse_uncommitted(contributions_named(error.facts)):
                    raise
            else:
                state.refused.clear()
                return results

    async def _push_when_there_is_room(self, staged: Any, push_id: PushId, step: int, why: str) -> list[PushResult]:
        """Repeats a push until the shards have room for it.

        Under policies that do not wait, earlier contributions may not be applied yet; a token comes when they are.
        """
        state, wait = self.state, self.chief.begin_wait(f"{self.who} pushes to step {step}", self._timeout_s)
        while True:
            wait.explain(why)
            await self._take_token(None, wait.left_s())
            if state.is_finished or not state.policy.accepts_stale:
                return [PushResult.STALE]  # it will never be applied
            try:
                return await self._push_once(staged, push_id, step)
            except TooManyPushes as error:
                why = error.message

    # -- counting and waiting

    async def _count(self, commit: PushCommit) -> CommitResult:
        state = self.state
        state.has_newest = False
        state.commits.sent(commit)
        self.own.counts(commit)
        result = await self._ask_to_count(commit)
        self._counted(commit, result)
        return result

    async def _ask_to_count(self, commit: PushCommit) -> CommitResult:
        participant = self.state.participant
        request = CommitPushRequest(participant=participant, commit=commit)
        return await self.place.ask(participant, lambda: self.chief.ask(request, what=f"count a push to step {commit.step}"))

    def _counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Notes the chief's outcome of a contribution."""
        self.own.counted(commit, result)
        self.state.counted(commit, result)
        if commit.attached.user_state and result.original_outcome is PushOutcome.ACCEPTED:
            self.user_state.counted(commit.attached.user_state)

    async def _take_token(self, commit: PushCommit | None, timeout_s: float | None) -> CommitResult | None:
        """Has the contribution counted, waits for a token or the end, and moves on to its step. Raises DeadlineExceeded.

        `commit` None: commits the contribution of an earlier call that ended before the chief had answered, if there is one.
        """
        state, place = self.state, self.place
        state.has_newest = False
        commit = commit or state.commits.unanswered()
        if commit is not None:
            state.commits.sent(commit)
        participant, local_step, request_id = state.participant, state.local_step, state.request_id
        wait = self.chief.begin_wait(f"{self.who} wants a token after step {local_step}", timeout_s)
        result: CommitResult | None = None
        sent = commit

        async def ask_for_token() -> TokenReply:
            request = DequeueTokenRequest(
                participant=participant, local_step=local_step, request_id=request_id, max_wait_s=wait.slice_s(), commit=sent
            )
            return await self.chief.ask(request, what=f"a token after step {local_step}", wait=wait)

        try:
            while True:
                if sent is not None:
                    self.own.counts(sent)
                reply = await place.ask(participant, ask_for_token)
                if sent is not None and reply.commit is not None:
                    result = reply.commit
                    self._counted(sent, result)
                    sent = None
                if reply.result is not TokenResult.WAIT:
                    break
                wait.explain(reply.waiting_for, is_of_all=True)
            has_other_policy = state.granted(reply)
            if reply.shards_version != place.registration.shards_version:
                await self._hear_shards()
            # By the heartbeat, before a late answer, or in hearing of the shards.
            if place.participant is not participant and not state.is_finished:
                raise EpochMismatch(f"{self.who} has registered again since it asked for this token")
            if has_other_policy:
                await self._learn_policy()
            state.move_on(reply)
        except BaseException:
            if self.model_side is not None:
                self.model_side.protect_gradients()
            raise
        if self.model_side is not None:
            await self.model_side.free_gradients(timeout_s)
        return result

    async def _learn_policy(self) -> None:
        """Learns the policy, which another client may have set, by presenting the agreed model again. Requests no token."""
        state, model = self.state, self._agreed
        assert model is not None
        reply = await self._ask_to_agree(model, state.participant, None, may_create=False)
        state.hear_policy(reply.policy, global_step=reply.global_step)

    async def _outcome_at_move(self, commit: PushCommit | None, *, step: int, giver: Participant, accepted: CommitResult | None) -> Push:
        """Returns the outcome of a contribution whose worker has lost its place."""
        state = self.state
        found = state.outcome_at_move(commit, step=step, giver=giver, accepted=accepted)
        if isinstance(found, Push):
            return found
        try:
            result = await self._ask_to_count(found)
        except LOST:
            return state.rolled_back(step)
        return state.outcome_of(result, step=step)

    # -- the training data

    def use(self, given: DataRange) -> None:
        """Notes that the next contribution is made from this range as well."""
        self._ranges += (given,)

    def take_back(self) -> tuple[DataRange, ...]:
        """Returns and forgets the ranges that this worker still holds and whose contribution was not sent."""
        unused, self._unused = self._unused, ()
        return unused

    @property
    def num_unnamed(self) -> int:
        """The number of ranges that no contribution has been made from yet."""
        return len(self._ranges)

    async def skip(self, *, timeout_s: float | None) -> Push:
        """Makes the unused ranges count as done, with a contribution that has no gradient for any variable."""
        ranges, self._ranges = self._ranges, ()
        return await self.contribute(None, is_waited_for=True, timeout_s=timeout_s, skipped=ranges)
