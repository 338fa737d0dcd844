"""One worker's part in the training: joining, reading, contributing, waiting, the end. Pure: yields requests.

A place belongs to one participant. When the epoch rises (the cluster has rolled back to a checkpoint), or the chief has ended the worker's
lease, the worker takes its place again and continues at the step that is open then. Its earlier pushes are rolled back.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

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
    ClusterStatus,
    CommitResult,
    ModelReply,
    ModelState,
    Participant,
    PushCommit,
    PushOutcome,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId, contributions_named
from ps_protocol.roles.shard import PushResult
from worker_client.core.outcomes import Push as Outcome
from worker_client.core.outcomes import push_of
from worker_client.core.place import LOST, Place
from worker_client.core.requests import (
    Agree,
    Arrived,
    Asking,
    AwaitToken,
    Complete,
    Count,
    Create,
    Deadline,
    Do,
    Expect,
    Fetch,
    FetchNewest,
    FreeGradients,
    Give,
    HearShards,
    Held,
    Open,
    Pause,
    ProtectGradients,
    PushParts,
    ReadRows,
    Stage,
    StateUnreadable,
    Status,
)
from worker_client.core.state import WorkerState
from worker_client.model.user_state import UserState

Result = TypeVar("Result")

_TRY_AGAIN_S = 0.1
# How often one push is repeated to name contributions that shards may drop to make room: each shard may hold other ones.
_MAX_DROPS = 16
# StepNotReady: the worker has a token for its step, so a server at an earlier step has been restored.
_LOST_OR_BEHIND = (*LOST, StepNotReady)


class Worker:
    """The calls of one worker, one after the other. For one thread. `state`: its state at its present place.

    `begin_wait` begins a wait with a description and a limit in seconds (None: no limit). `timeout_s`: how long to wait for a server that
    does not answer. `num_rollbacks`: how often the worker has come back in another epoch, or another life of the cluster.
    `recovery_timeout_s`: how long a call waits until the worker has its model again (None: no limit); a shorter limit of the call counts
    instead.
    """

    def __init__(self, place: Place, *, begin_wait: Callable[[str, float | None], Deadline], timeout_s: float) -> None:
        self.place = place
        self.who = f"worker {place.participant.index}"
        self.state = WorkerState(place.participant, step=place.registration.global_step, commits=place.commits)
        self.num_rollbacks = 0
        # The agreed model. `place.model` is set later, after the first token.
        self._agreed: ModelSpec | None = None
        # The program's state. When the worker takes another place, it is replaced by the cluster's copy.
        self.user_state = UserState()
        self.recovery_timeout_s: float | None = None
        self._begin_wait, self._timeout_s = begin_wait, timeout_s
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

    def join(self, model: ModelSpec, *, may_create: bool, timeout_s: float | None) -> Asking[bool]:
        """Creates or joins the model; returns whether it created it.

        Blocks while another worker creates it; takes over if that worker is lost, unless `may_create` is False. Raises ModelMismatch,
        DeadlineExceeded.
        """
        place, wait = self.place, self._begin_wait(f"{self.who} joins the model", timeout_s)
        while True:
            registration = place.registration
            try:
                has_created = yield from self._take_part(model, registration, wait, may_create=may_create)
                break
            except LOST as error:
                yield from self._await_other_turn(registration, error, wait)
        place.model, self._present, self._joined = model, self.state, registration
        yield Arrived(None, None)
        return has_created

    def _come_back(self, cause: PsError, *, timeout_s: float | None) -> Asking[None]:
        """Joins the model again at the worker's new place; raises the cause if there is no new place.

        May be called again after an error.
        """
        place, present = self.place, self._present
        assert present is not None and place.model is not None
        former = present.participant
        cause = yield from self._await_other(self._joined, cause)
        limits_s = [limit_s for limit_s in (timeout_s, self.recovery_timeout_s) if limit_s is not None]
        wait = self._begin_wait(f"{self.who} comes back to the model", min(limits_s, default=None))
        while True:
            registration = place.registration
            try:
                yield from self._take_part(place.model, registration, wait, may_create=False)
                break
            except LOST as error:
                yield from self._await_other_turn(registration, error, wait)
        self._present, self._joined, self._may_compute = self.state, registration, True
        self._has_lost_ranges, self._ranges, self._unused = self._has_lost_ranges or bool(self._ranges), (), ()
        if not registration.participant.shares_era(former):
            self.num_rollbacks += 1
        yield Arrived(former, cause)
        # The error's traceback holds this frame: unless it is deleted, the cycle keeps the variables of lost servers in memory.
        del cause

    def _await_other(self, known: Registration, cause: PsError) -> Asking[PsError]:
        wait = self._begin_wait(f"the session of {self.who} asks what has become of its servers", self._timeout_s)
        return (yield from self.place.await_other(known, cause, wait))

    def _await_other_turn(self, known: Registration, cause: PsError, wait: Deadline) -> Asking[None]:
        """Waits before the next attempt, within `wait`; returns at once if the worker already has another place."""
        yield from self._await_other(known, cause)
        wait.explain(cause.message)
        if self.place.participant is known.participant:
            # The chief has registered the worker and then refused it, so another attempt must not follow at once.
            yield Pause(wait, _TRY_AGAIN_S)

    def _take_part(self, model: ModelSpec, registration: Registration, wait: Deadline, *, may_create: bool) -> Asking[bool]:
        """Agrees on the model, opens it, and in strict sync waits for a step that takes something from this worker."""
        reply, has_created = yield from self._agree(model, registration.participant, wait, may_create=may_create)
        self._agreed = model
        commits, participant = self.place.commits, registration.participant
        commits.begin(participant)
        # A registration from before a rollback may have the step that was open then.
        step = min(registration.global_step, reply.global_step)
        self.state = WorkerState(participant, step=step, global_step=reply.global_step, commits=commits, former=self.state)
        yield Open(model, reply, has_created)
        if self.state.join(policy=reply.policy, global_step=reply.global_step, may_contribute=registration.may_contribute):
            yield from self._take_token(None, wait.left_s())
        return has_created

    def _restore_state(self, text: str) -> Asking[None]:
        try:
            self.user_state.restore(text)
        except MalformedMessage as error:
            # This SDK sends no such state, but another holder of a worker's token may have; raising would lock this index out.
            self.user_state.clear_unreadable(text)
            yield StateUnreadable(error)

    def _agree(self, model: ModelSpec, participant: Participant, wait: Deadline, *, may_create: bool) -> Asking[tuple[ModelReply, bool]]:
        """Waits until the variables have first values, and writes them if asked to.

        Returns the reply, and whether this worker wrote them.
        """
        has_created, num_attempts = False, 0
        while True:
            reply: ModelReply = yield from self.place.ask(Agree(participant, model, wait, may_create), participant)
            if reply.state in (ModelState.READY, ModelState.INITIALIZE) and reply.shards_version != self.place.registration.shards_version:
                # Other processes hold the shards than when the worker registered; they may change during recovery.
                yield HearShards(reply.shards_version)
                if self.place.participant is not participant:
                    raise EpochMismatch(f"{self.who} has registered again since it agreed on the model")
            if reply.state is ModelState.READY and reply.placement:
                yield from self._restore_state(reply.attached.user_state)
                return reply, has_created
            if reply.state is ModelState.INITIALIZE and reply.placement:
                num_attempts += 1
                if num_attempts > 1:
                    wait.explain(f"the chief asks for the first values of the variables again and again, {num_attempts} times by now")
                    yield Pause(wait, _TRY_AGAIN_S)
                yield Create(reply)
                try:
                    yield from self.place.ask(Complete(participant, reply.attempt), participant)
                    has_created = True
                except NotInitializer:
                    has_created = False  # the values came too late: another worker writes them
                continue
            if reply.state is ModelState.ABSENT and self._present is not None:
                status: ClusterStatus = yield Status()
                if status.state is ClusterState.WAITING_FOR_MODEL:
                    raise TrainingFailed(
                        "the cluster has begun anew, and its model is lost: there was no checkpoint to go back to; start the workers again"
                    )
            wait.explain(reply.waiting_for, is_of_all=True)

    def _check_present(self) -> None:
        """Raises one of LOST if the worker's variables do not belong to its present place."""
        state = self.state
        if self._present is not state:
            raise Superseded(f"{self.who} left its place and has no variables of its new one yet, at step {state.local_step}")

    def _check_place(self) -> None:
        if self.place.participant is not self.state.participant or self._present is not self.state:
            raise EpochMismatch(f"{self.who} has registered again since it read its variables")

    # -- reading

    def do(self, act: Callable[[Any], Result], *, timeout_s: float | None = None) -> Asking[Result]:
        """Returns the result of `act`; repeats it if the worker has taken another place."""
        return self._repeat_if_moved(lambda: self._ask(Do(act)), timeout_s)

    def read(self, *, is_copied: bool, timeout_s: float | None = None) -> Asking[dict[str, Array]]:
        """Returns the dense variables of the worker's step, or the newest; `is_copied`: as copies, else as views."""
        return self._repeat_if_moved(lambda: self._read(is_copied=is_copied), timeout_s)

    def read_rows(self, name: str, indices: object, *, timeout_s: float | None = None) -> Asking[Array]:
        """Returns rows of a table, of the worker's step, or the newest."""
        return self._repeat_if_moved(lambda: self._read_rows(name, indices), timeout_s)

    def check_place(self) -> Asking[None]:
        """Comes back, if the worker has become another participant."""
        return self._repeat_if_moved(self._checked, None)

    def _repeat_if_moved(self, begin: Callable[[], Asking[Result]], timeout_s: float | None) -> Asking[Result]:
        while True:
            try:
                self._check_present()
                return (yield from begin())
            except _LOST_OR_BEHIND as error:
                yield from self._come_back(error, timeout_s=timeout_s)

    def _ask(self, request: Any) -> Asking[Any]:
        return (yield request)

    def _checked(self) -> Asking[None]:
        self._check_place()
        yield from ()

    def _read(self, *, is_copied: bool) -> Asking[dict[str, Array]]:
        if self.place.is_finished and not self.state.is_finished:
            yield from self._learn_end()
        yield from self._fetch()
        self.state.has_newest = False  # the next read fetches anew
        wait: Deadline | None = None
        while True:
            try:
                given: dict[str, Array] = yield Give(is_copied)
            except StepGone as error:
                wait = wait or self._begin_wait(f"{self.who} reads the variables", self._timeout_s)
                yield from self._move_on(wait, error)
                yield from self._fetch()
            else:
                return given

    def _read_rows(self, name: str, indices: object) -> Asking[Array]:
        if self.place.is_finished and not self.state.is_finished:
            yield from self._learn_end()
        state, wait = self.state, self._begin_wait(f"{self.who} reads rows of {name!r}", self._timeout_s)
        while not state.reads_latest:
            try:
                found = yield ReadRows(name, indices, state.local_step, is_aligned=True)
            except StepGone as error:
                if (yield Held())[0] == state.local_step:
                    # The cluster is two steps past the variables that were read, so gradients computed from them will be dropped anyway.
                    break
                yield from self._move_on(wait, error)
            else:
                rows: Array = found.values
                return rows
        found = yield ReadRows(name, indices, None, is_aligned=not state.policy.applies_on_arrival)
        if found.step is not None and state.follows_reads and not (yield Held())[1]:
            state.local_step = found.step
        rows = found.values
        return rows

    def _fetch_unless_finished(self) -> Asking[None]:
        """Fetches the variables of the worker's step, as `contribute` does; nothing once training is finished."""
        if not self.state.is_finished:
            yield from self._fetch()

    def _fetch(self) -> Asking[None]:
        state = self.state
        wait: Deadline | None = None
        while not state.reads_latest:
            try:
                # After the end, the variables do not change any more, but the servers end.
                yield Fetch(state.local_step, not state.is_finished)
                return
            except StepGone as error:
                wait = wait or self._begin_wait(f"{self.who} reads the variables", self._timeout_s)
                yield from self._move_on(wait, error)
        if not state.has_newest:
            state.read_newest((yield FetchNewest(not state.policy.applies_on_arrival)))

    def _move_on(self, wait: Deadline, error: StepGone) -> Asking[None]:
        """Moves to a newer step after StepGone: others continued without this worker, or the policy has no common steps now."""
        wait.explain(error.message)
        yield from self._learn_policy()
        if not self.state.reads_latest:
            yield from self._take_token(None, self._timeout_s)  # answered at once: the step has moved on

    def _learn_end(self) -> Asking[None]:
        """Learns the last step, after a heartbeat's answer that training is finished."""
        yield from self._take_token(None, self._timeout_s)  # answered at once

    # -- giving

    def contribute(
        self,
        content: Any,
        *,
        is_waited_for: bool,
        timeout_s: float | None = None,
        skipped: tuple[DataRange, ...] = (),
        attached: Attachments = NO_ATTACHMENTS,
    ) -> Asking[Outcome]:
        """Pushes one contribution and has it counted; if `is_waited_for`, waits for a token and reads the variables.

        `content` None: a contribution without a gradient for any variable, which counts in no mean; with it, the ranges `skipped` count as
        done. `attached`: the program's attachments, to which its user state is added.
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
            commit = yield from self._push(content, is_waited_for=is_waited_for, ranges=ranges, attached=attached)
            self._may_compute = False
            if content is not None:
                self._ranges = ()
            if is_waited_for:
                if not state.reads_latest:
                    yield Expect(step + 1)
                result = yield from self._take_token(commit, timeout_s)
                if result is None:
                    raise InternalError("the chief granted a token without the outcome of the contribution sent with the request")
                if not state.is_finished:
                    yield from self._fetch()
            else:
                result = yield from self._count(commit)
            return push_of(result, step=step, is_finished=state.is_finished)
        except _LOST_OR_BEHIND as error:
            accepted = state.commits.accepted(commit) if commit is not None else None
            if content is not None:
                self._ranges = ()  # the ranges share the outcome of this contribution
            yield from self._come_back(error, timeout_s=timeout_s)
            outcome = yield from self._outcome_at_move(commit, step=step, giver=present.participant, accepted=accepted)
        while is_waited_for:
            before = self.state.participant
            yield from self._repeat_if_moved(self._fetch_unless_finished, timeout_s)
            if self.state.participant.shares_era(before):
                return replace(outcome, is_finished=self.state.is_finished)
            # The cluster has rolled back once more, perhaps to a step before the accepted contribution.
            outcome = yield from self._outcome_at_move(commit, step=step, giver=before, accepted=None)
        return outcome

    def wait(self, *, timeout_s: float | None) -> Asking[bool]:
        """Waits for a token, or the end; after a rollback there is a token for the present step. Returns whether training continues."""
        if self._may_compute:
            self._check_present()
            self._may_compute = False  # once only: a worker that skips that step waits for the next one
            return not self.state.is_finished
        return (yield from self.follow(timeout_s=timeout_s))

    def follow(self, *, timeout_s: float | None) -> Asking[bool]:
        """Waits for a token, or the end, even if this worker may compute for its present step. Returns whether training continues."""
        try:
            self._check_present()
            if not self.state.is_finished:
                yield from self._take_token(None, timeout_s)
        except LOST as error:
            yield from self._come_back(error, timeout_s=timeout_s)
            self._may_compute = False  # this wait has ended with that error
        return not self.state.is_finished

    def _push(self, content: Any, *, is_waited_for: bool, ranges: tuple[int, ...], attached: Attachments) -> Asking[PushCommit]:
        """Sends all shards their parts of a contribution, and returns the commit that makes it count."""
        state = self.state
        step = state.local_step
        staged = yield Stage(content, step, is_waited_for)
        push_id = state.number_push()
        try:
            try:
                results = yield from self._push_once(staged, push_id, step)
            except TooManyPushes as error:
                if not state.policy.accepts_stale:
                    raise
                results = yield from self._push_when_there_is_room(staged, push_id, step, error.message)
        except BaseException:
            state.refused.append(push_id.sequence)
            raise
        user_state = self.user_state.to_send()
        if user_state:
            attached = replace(attached, user_state=user_state)
        return state.pushed(push_id, results, step=step, ranges=ranges, attached=attached)

    def _push_once(self, staged: Any, push_id: PushId, step: int) -> Asking[list[PushResult]]:
        """Sends all shards their parts; a shard full of uncommitted contributions is told to drop them first. Raises TooManyPushes."""
        state, num_tries = self.state, 0
        while True:
            try:
                results: list[PushResult] = yield PushParts(staged, push_id, step, tuple(state.refused))
            except TooManyPushes as error:
                num_tries += 1
                if num_tries > _MAX_DROPS or not state.refuse_uncommitted(contributions_named(error.facts)):
                    raise
            else:
                state.refused.clear()
                return results

    def _push_when_there_is_room(self, staged: Any, push_id: PushId, step: int, why: str) -> Asking[list[PushResult]]:
        """Repeats a push until the shards have room for it.

        Under policies that do not wait, earlier contributions may not be applied yet; a token comes when they are.
        """
        state, wait = self.state, self._begin_wait(f"{self.who} pushes to step {step}", self._timeout_s)
        while True:
            wait.explain(why)
            yield from self._take_token(None, wait.left_s())
            if state.is_finished or not state.policy.accepts_stale:
                return [PushResult.STALE]  # it will never be applied
            try:
                return (yield from self._push_once(staged, push_id, step))
            except TooManyPushes as error:
                why = error.message

    # -- counting and waiting

    def _count(self, commit: PushCommit) -> Asking[CommitResult]:
        state = self.state
        state.has_newest = False
        state.commits.sent(commit)
        result: CommitResult = yield from self.place.ask(Count(state.participant, commit), state.participant)
        self._counted(commit, result)
        return result

    def _counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Notes the chief's outcome of a contribution."""
        self.state.counted(commit, result)
        if commit.attached.user_state and result.original_outcome is PushOutcome.ACCEPTED:
            self.user_state.counted(commit.attached.user_state)

    def _take_token(self, commit: PushCommit | None, timeout_s: float | None) -> Asking[CommitResult | None]:
        """Has the contribution counted, waits for a token or the end, and moves on to its step. Raises DeadlineExceeded.

        `commit` None: commits the contribution of an earlier call that ended before the chief had answered, if there is one.
        """
        state, place = self.state, self.place
        state.has_newest = False
        commit = commit or state.commits.unanswered()
        if commit is not None:
            state.commits.sent(commit)
        participant, local_step, request_id = state.participant, state.local_step, state.request_id
        wait = self._begin_wait(f"{self.who} wants a token after step {local_step}", timeout_s)
        result: CommitResult | None = None
        try:
            while True:
                sent = commit if result is None else None
                reply: TokenReply = yield from place.ask(AwaitToken(participant, local_step, request_id, sent, wait), participant)
                if sent is not None and reply.commit is not None:
                    result = reply.commit
                    self._counted(sent, result)
                if reply.result is not TokenResult.WAIT:
                    break
                wait.explain(reply.waiting_for, is_of_all=True)
            has_other_policy = state.granted(reply)
            if reply.shards_version != place.registration.shards_version:
                yield HearShards(reply.shards_version)
            # By the heartbeat, before a late answer, or in hearing of the shards.
            if place.participant is not participant and not state.is_finished:
                raise EpochMismatch(f"{self.who} has registered again since it asked for this token")
            if has_other_policy:
                yield from self._learn_policy()
            state.move_on(reply)
        except GeneratorExit:
            raise
        except BaseException:
            yield ProtectGradients()
            raise
        yield FreeGradients(timeout_s)
        return result

    def _learn_policy(self) -> Asking[None]:
        """Learns the policy, which another client may have set, by presenting the agreed model again. Requests no token."""
        state, model = self.state, self._agreed
        assert model is not None
        reply: ModelReply = yield from self.place.ask(Agree(state.participant, model, None, may_create=False), state.participant)
        state.hear_policy(reply.policy, global_step=reply.global_step)

    def _outcome_at_move(
        self, commit: PushCommit | None, *, step: int, giver: Participant, accepted: CommitResult | None
    ) -> Asking[Outcome]:
        """Returns the outcome of a contribution whose worker has lost its place."""
        state = self.state
        found = state.outcome_at_move(commit, step=step, giver=giver, accepted=accepted)
        if isinstance(found, Outcome):
            return found
        try:
            result: CommitResult = yield from self.place.ask(Count(state.participant, found, is_question=True), state.participant)
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

    def skip(self, *, timeout_s: float | None) -> Asking[Outcome]:
        """Makes the unused ranges count as done, with a contribution that has no gradient for any variable."""
        ranges, self._ranges = self._ranges, ()
        return (yield from self.contribute(None, is_waited_for=True, timeout_s=timeout_s, skipped=ranges))
