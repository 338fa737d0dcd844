"""A worker's loop over all its places: it goes on where the cluster goes on. Knows the place and the training; no user's words.

A training belongs to one participant. When the epoch rises (the cluster was brought back to a checkpoint), or the worker had been taken for
gone, its place is taken again, and a new training begins at the step that stands then. What was pushed before that is rolled back.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ps_protocol.errors import Cancelled, PsError, StepNotReady, Superseded
from ps_protocol.model.data import DataRange
from ps_protocol.roles.chief import Participant, PushCommit, Registration
from worker_client.cluster.waiting import Wait
from worker_client.model.declarations import Declared
from worker_client.model.gradients import Gradients, Metrics, Updates
from worker_client.session.joining import Joined, join_again, join_model
from worker_client.session.membership import LOST, Membership
from worker_client.session.outcomes import Push
from worker_client.session.state import WorkerState
from worker_client.session.training import Training

log = logging.getLogger("lockstep.worker")

Result = TypeVar("Result")

# What a worker's own reading ends with besides: it has a token for its step, so a server that has come less far has begun anew.
_LOST_OR_BEHIND = (*LOST, StepNotReady)
# How long the chief may take to say why it has gone back.
_STATUS_S = 1.0


class WorkerLoop:
    """Does what a user asks of the training, at the worker's present place. For one thread.

    `num_rollbacks`: how often it has begun again in another epoch, or another life of the cluster.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._who = f"worker {member.participant.index}"
        self.state = WorkerState(member.participant, step=member.registration.global_step, commits=member.commits)
        self.training: Training | None = None  # at the present place; None before there is a model
        self.num_rollbacks = 0
        # Of the training data: what the next contribution is made from, whether some of it has gone back to the chief, and what the worker
        # still has of a contribution that was not sent for that.
        self._ranges: tuple[DataRange, ...] = ()
        self._has_lost_ranges = False
        self._unused: tuple[DataRange, ...] = ()

    def join(self, declared: Declared, *, create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it."""
        member, wait = self._member, Wait(f"{self._who} joins the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_model(declared, member=member, create=create, wait=wait)
                training = Training(joined, member=member, state=self.state)
                training.begin(may_contribute=registration.may_contribute, timeout_s=timeout_s)
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
                member.commits.begin(member.participant)
                step = member.registration.global_step
                self.state = WorkerState(member.participant, step=step, commits=member.commits, former=self.state)
        self.training = training
        member.note_model(joined.model)
        return joined.has_initialized

    def do(self, act: Callable[[Training], Result]) -> Result:
        """Returns what `act` returns; does it again where the worker has come back elsewhere."""
        while True:
            training = self._present()
            try:
                self._check_is_whole(training)
                return act(training)
            except _LOST_OR_BEHIND as error:
                self._come_back(training, error, timeout_s=None)

    def wait(self, *, timeout_s: float | None) -> None:
        """Waits for a token; after a rollback there is one for the step that stands."""
        training = self._present()
        try:
            self._check_is_whole(training)
            training.wait(timeout_s=timeout_s)
        except LOST as error:
            self._come_back(training, error, timeout_s=timeout_s)

    def contribute(
        self,
        gradients: Gradients | None,
        *,
        updates: Updates | None = None,
        metrics: Metrics | None = None,
        is_waited_for: bool,
        timeout_s: float | None = None,
        skipped: tuple[DataRange, ...] = (),
    ) -> Push:
        """Gives one contribution and has it counted; if it is waited for, waits for a token and reads.

        `gradients` None: one that has no gradient for any variable, and so counts in no mean, and has these ranges `skipped`.
        """
        training, step = self._present(), self.state.local_step
        if gradients is not None and self._has_lost_ranges:
            # Made from samples that others may get now: it would count them twice.
            self._has_lost_ranges, self._unused, self._ranges = False, self._ranges, ()
            return self.state.rolled_back(step)
        commit: PushCommit | None = None
        ranges = tuple(given.id for given in (self._ranges if gradients is not None else skipped))
        try:
            commit = training.stage(gradients, updates=updates, metrics=metrics, is_waited_for=is_waited_for, ranges=ranges)
            if gradients is not None:
                self._ranges = ()
            return training.step(commit, timeout_s=timeout_s) if is_waited_for else training.count(commit)
        except _LOST_OR_BEHIND as error:
            is_accepted = commit is not None and self._member.commits.is_accepted(commit)
            if gradients is not None:
                self._ranges = ()  # what becomes of this contribution becomes of them
            self._come_back(training, error, timeout_s=timeout_s)
            push = self._outcome_at_move(commit, step=step, giver=training.participant, is_accepted=is_accepted)
        if not is_waited_for:
            return push
        self.do(Training.look)
        return replace(push, is_finished=self.state.is_finished)

    # -- the training data

    def use(self, given: DataRange) -> None:
        """The next contribution is made from this range as well."""
        self._ranges += (given,)

    def take_back(self) -> tuple[DataRange, ...]:
        """Returns the ranges that no contribution is going to be made from, though this worker has them still; forgets them."""
        unused, self._unused = self._unused, ()
        return unused

    @property
    def num_unnamed(self) -> int:
        """How many ranges have no contribution made from them yet."""
        return len(self._ranges)

    def skip(self, *, timeout_s: float | None) -> None:
        """Has the ranges count as done that no contribution was made from: with one that has no gradient for any variable."""
        ranges, self._ranges = self._ranges, ()
        self.contribute(None, is_waited_for=True, timeout_s=timeout_s, skipped=ranges)

    # -- over to another place

    def _outcome_at_move(self, commit: PushCommit | None, *, step: int, giver: Participant, is_accepted: bool) -> Push:
        """What became of a contribution whose giver is no more."""
        found = self.state.outcome_at_move(commit, step=step, giver=giver, is_accepted=is_accepted)
        if isinstance(found, Push):
            return found
        try:
            return self.state.outcome_of(self._present().outcome_of(found), step=step)
        except LOST:
            return self.state.rolled_back(step)

    def _present(self) -> Training:
        training = self.training
        assert training is not None
        return training

    def _check_is_whole(self, training: Training) -> None:
        """Raises one of LOST if coming back failed half-way: the state is the new place's, the variables are the old one's."""
        if training.state is not self.state:
            raise Superseded(f"{self._who} left its place at step {training.state.local_step} and has no variables of its new one yet")

    def _come_back(self, training: Training, cause: PsError, *, timeout_s: float | None) -> None:
        """Takes the training up at the worker's new place; raises the cause if it has none. May be called again after an error."""
        cause = self._leave_place_of(training.participant, cause)
        member, former = self._member, training.participant
        wait = Wait(f"{self._who} comes back to the model", timeout_s=timeout_s)
        while True:
            registration = member.registration
            try:
                joined = join_again(training.joined, member=member, wait=wait)
                present = self._begin_again(joined, registration, timeout_s=wait.left_s())
                break
            except LOST as error:
                self._leave_place_of(registration.participant, error)
        training.release()
        self._has_lost_ranges, self._ranges, self._unused = self._has_lost_ranges or bool(self._ranges), (), ()
        self.training = present
        if registration.participant.era != former.era:
            self.num_rollbacks += 1
        log.warning("%s: %s", self._who, self._words(registration.participant, former, cause))
        # It holds the frames that it came through, and so this one: if that held it too, the variables of servers that are gone would stay.
        del cause

    def _begin_again(self, joined: Joined, registration: Registration, *, timeout_s: float | None) -> Training:
        """Comes to the step that the cluster has gone back to, or for a new incarnation to the open one."""
        member, participant = self._member, registration.participant
        member.commits.begin(participant)
        # Registered before the servers were brought back, it may have been given the step that was open then.
        step = min(registration.global_step, joined.global_step)
        self.state = WorkerState(participant, step=step, global_step=joined.global_step, commits=member.commits, former=self.state)
        training = Training(joined, member=member, state=self.state)
        training.begin(may_contribute=registration.may_contribute, timeout_s=timeout_s)
        return training

    def _words(self, participant: Participant, former: Participant, cause: PsError) -> str:
        """Says where the worker goes on, and why there."""
        step = self.state.local_step
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
