"""A session's way through the training, on which it goes on where the cluster goes on. Knows the place, the training and its results.

A training belongs to one participant. When the epoch rises (the cluster was brought back to a checkpoint), or the worker had been taken
for gone, its place is taken again, and a new training begins at the step that stands then. What was pushed before that is rolled back.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ps_protocol.chief import CommitResult, Participant, PushCommit, PushOutcome
from ps_protocol.data_ranges import DataRange
from ps_protocol.errors import Cancelled, PsError, StepNotReady
from worker_client.declarations import Declared
from worker_client.gradients import Gradients, Updates, no_gradients
from worker_client.joining import join_again, join_model
from worker_client.membership import Membership
from worker_client.outcomes import Push, push_of
from worker_client.outgoing import Metrics
from worker_client.patience import Patience
from worker_client.progress import Progress
from worker_client.rejoining import LOST
from worker_client.training import Training

log = logging.getLogger("lockstep.worker")

Result = TypeVar("Result")

# What a worker's own reading ends with besides: it has a token for its step, so a server that has come less far has begun anew.
_LOST_OR_BEHIND = (*LOST, StepNotReady)
# How long the chief may take to say why it has gone back.
_STATUS_S = 1.0


class Course:
    """Does what a user asks of the training, at the worker's present place. For one thread.

    `num_rollbacks`: how often it has begun again in another epoch, or another life of the cluster.
    """

    def __init__(self, member: Membership) -> None:
        self.progress = Progress(member)
        self.num_rollbacks = 0
        # Of the training data: what the next contribution is made from, whether some of it has gone back to the chief, and what the worker
        # still has of a contribution that was not sent for that.
        self._ranges: tuple[DataRange, ...] = ()
        self._has_lost_ranges = False
        self._unused: tuple[DataRange, ...] = ()
        self._skipped: tuple[DataRange, ...] = ()
        self._member = member
        self._who = f"worker {member.participant.index}"
        self.training: Training | None = None  # at the present place; None before there is a model

    def use(self, given: DataRange) -> None:
        """The next contribution is made from this range as well."""
        self._ranges += (given,)

    def take_back(self) -> tuple[DataRange, ...]:
        """Returns the ranges that no contribution is going to be made from, though this worker has them still; forgets them."""
        unused, self._unused = self._unused, ()
        return unused

    def join(self, declared: Declared, *, create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it."""
        member, patience = self._member, Patience(f"{self._who} joins the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_model(declared, member=member, create=create, patience=patience)
                self.progress.begin(joined, may_contribute=registration.may_contribute, timeout_s=timeout_s)
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
                self.progress = Progress(member)
        self.training = Training(joined, member=member, progress=self.progress)
        member.note_model(joined.model)
        return joined.has_initialized

    def do(self, act: Callable[[Training], Result]) -> Result:
        """Returns what `act` returns; does it again where the worker has come back elsewhere."""
        while True:
            training = self._present()
            try:
                return act(training)
            except _LOST_OR_BEHIND as error:
                self._come_back(training, error, timeout_s=None)

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits for a token; after a rollback there is one for the step that stands."""
        training = self._present()
        try:
            training.wait(timeout_s=timeout_s)
        except LOST as error:
            self._come_back(training, error, timeout_s=timeout_s)

    def push(self, gradients: Gradients, *, updates: Updates | None, metrics: Metrics | None) -> Push:
        """Gives one contribution and has it counted."""
        if gradients is None:
            raise no_gradients()

        def give(training: Training, commit: PushCommit) -> Push:
            return push_of(self.progress.commit(commit), step=commit.step)

        return self._contribute(give, gradients, updates=updates, metrics=metrics, is_waited_for=False, timeout_s=None)

    def step(
        self, gradients: Gradients, *, updates: Updates | None = None, metrics: Metrics | None = None, timeout_s: float | None = None
    ) -> Push:
        """Gives one contribution, has it counted, waits for a token and reads."""
        if gradients is None:
            raise no_gradients()
        give = partial(Training.step, timeout_s=timeout_s)
        return self._contribute(give, gradients, updates=updates, metrics=metrics, is_waited_for=True, timeout_s=timeout_s)

    def step_with_nothing(self, *, timeout_s: float | None) -> Push:
        """As `step()`, with a contribution that has no gradient for any variable, and so counts in no mean."""
        give = partial(Training.step, timeout_s=timeout_s)
        return self._contribute(give, None, updates=None, metrics=None, is_waited_for=True, timeout_s=timeout_s)

    @property
    def num_unnamed(self) -> int:
        """How many ranges have no contribution made from them yet."""
        return len(self._ranges)

    def skip(self, *, timeout_s: float | None) -> None:
        """Has the ranges count as done that no contribution was made from: with one that has no gradient for any variable."""
        ranges, self._ranges = self._ranges, ()
        self._skipped = ranges
        try:
            self.step_with_nothing(timeout_s=timeout_s)
        finally:
            self._skipped = ()

    def _contribute(
        self,
        give: Callable[[Training, PushCommit], Push],
        gradients: Gradients | None,
        *,
        updates: Updates | None,
        metrics: Metrics | None,
        is_waited_for: bool,
        timeout_s: float | None,
    ) -> Push:
        training, step = self._present(), self.progress.local_step
        if gradients is not None and self._has_lost_ranges:
            # Made from samples that others may get now: it would count them twice.
            self._has_lost_ranges, self._unused, self._ranges = False, self._ranges, ()
            return Push(outcome=PushOutcome.ROLLED_BACK, step=step, global_step=self.progress.global_step)
        commit: PushCommit | None = None
        ranges = self._ranges if gradients is not None else self._skipped
        try:
            ids = tuple(given.id for given in ranges)
            commit = training.stage(gradients, updates=updates, metrics=metrics, is_waited_for=is_waited_for, ranges=ids)
            if gradients is not None:
                self._ranges = ()
            return give(training, commit)
        except _LOST_OR_BEHIND as error:
            known = commit is not None and self._member.commits.is_accepted(commit)
            if gradients is not None:
                self._ranges = ()  # what becomes of this contribution becomes of them
            self._come_back(training, error, timeout_s=timeout_s)
            push = self._fate(commit, step=step, giver=training.participant, is_known=known)
        if is_waited_for:
            self.do(Training.look)
        return push

    def _fate(self, commit: PushCommit | None, *, step: int, giver: Participant, is_known: bool) -> Push:
        """What became of a contribution whose participant is no more."""
        progress = self.progress
        result: CommitResult | None = None
        if commit is not None and commit.staged and giver.era == progress.participant.era and is_known:
            # The chief has said so, and no epoch has risen since, nor has the cluster begun anew.
            result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=progress.global_step, applied_step=commit.step)
        elif commit is not None and commit.staged and step < progress.local_step and not progress.reads_latest:
            result = self._asked_fate(commit)
        if result is not None:
            push = push_of(result, step=step)
            if push.is_accepted:
                return push
        return Push(outcome=PushOutcome.ROLLED_BACK, step=step, global_step=progress.global_step)

    def _asked_fate(self, commit: PushCommit) -> CommitResult | None:
        """The checkpoint may be of a step that has it, whose answer was on its way."""
        participant = self.progress.participant
        if (commit.push_id.worker, commit.push_id.incarnation) != (participant.index, participant.incarnation):
            return None
        try:
            return self.progress.fate(commit)
        except LOST:
            return None

    def _present(self) -> Training:
        training = self.training
        assert training is not None
        return training

    def _come_back(self, training: Training, cause: PsError, *, timeout_s: float | None) -> None:
        """Takes the training up at the worker's new place; raises the cause if it has none. May be called again after an error."""
        cause = self._leave_place_of(training.participant, cause)
        member, former = self._member, training.participant
        patience = Patience(f"{self._who} comes back to the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_again(training.joined, member=member, patience=patience)
                self.progress.begin_again(joined, registration, timeout_s=patience.left_s())
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
        training.release()
        self._has_lost_ranges, self._ranges, self._unused = self._has_lost_ranges or bool(self._ranges), (), ()
        self.training = Training(joined, member=member, progress=self.progress, num_pushes=training.num_pushes)
        if registration.participant.era != former.era:
            self.num_rollbacks += 1
        log.warning("%s: %s", self._who, self._words(registration.participant, former, cause))
        # It holds the frames that it came through, and so this one: if that held it too, the variables of servers that are gone would stay.
        del cause

    def _words(self, participant: Participant, former: Participant, cause: PsError) -> str:
        """Says where the worker goes on, and why there."""
        step = self.progress.local_step
        if participant.era == former.era:
            # What was closed under it was closed because of that.
            why = "its lease had ended" if isinstance(cause, Cancelled) else _without_advice(cause)
            return f"goes on at step {step} as incarnation {participant.incarnation}: {why}"
        with suppress(PsError):
            found = self._member.status(max_ledger_entries=0, timeout_s=_STATUS_S)
            if found.epoch == participant.epoch and f"(epoch {found.epoch})" in found.last_rollback:
                is_there = found.last_rollback.startswith(f"rolled back to step {step} ")
                return found.last_rollback if is_there else f"{found.last_rollback}; goes on at step {step}"
        return f"rolled back to step {step} (epoch {participant.epoch}): {_without_advice(cause)}"

    def _leave_place_of(self, participant: Participant, cause: PsError) -> PsError:
        """Returns, with the best words for why, once the member is another participant; raises the cause if it stays this one."""
        member = self._member
        if member.participant is not participant:
            return cause
        if isinstance(cause, Cancelled):
            raise cause
        return member.await_new_place(participant, cause)


def _without_advice(cause: PsError) -> str:
    """What its last words ask for has been done."""
    return cause.message.removesuffix(" Connect again").removesuffix(" Register again").rstrip(".")
