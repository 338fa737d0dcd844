"""A participant's place in its cluster: its identity, and registering again when chief or epoch have changed. Pure: yields requests."""

from dataclasses import replace
from typing import Any

from ps_protocol.errors import Cancelled, EpochMismatch, LeaseExpired, NotInitialized, PsError, Superseded, TrainingFailed, WorkerIndexTaken
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import End, Participant, Registration
from worker_client.core.requests import Agree, Asking, AwaitRenewal, Beat, Count, Deadline, Pause, Register, Renew
from worker_client.core.state import OpenCommits

# Errors of a call whose caller has lost its place, at the chief or at servers that were restarted or restored. Superseded: another process
# has taken the place, or another thread of this process has registered again with a new incarnation.
LOST = (EpochMismatch, LeaseExpired, NotInitialized, Cancelled, Superseded)
_ENDED = "its lease had ended, and it has registered again since"
_RETRY_S = 0.1
# The most chiefs that may take over, one after the other, during one request.
_MAX_RENEWALS = 3


class Place:
    """The participant as it is registered at present, with the model and the open commits, which a new chief has to learn.

    The worker's thread and its heartbeat's make requests as this participant, and either may take the place again; the runner lets only one
    at a time into `take_again`. `generation` grows each time.
    """

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.commits = OpenCommits(registration.participant)
        # The model, once the participant has joined one.
        self.model: ModelSpec | None = None
        self.generation = 0
        self.end = End.NOT_YET  # how training has ended, by the answers to heartbeats
        self.has_failed = False  # whether training has failed, by the chief's answers

    @property
    def is_finished(self) -> bool:
        """Whether training has ended, by the answers to heartbeats."""
        return bool(self.end)

    @property
    def participant(self) -> Participant:
        """The identity to call with; the same object for as long as it is the same identity."""
        return self.registration.participant

    def ask(self, request: Any, participant: Participant) -> Asking[Any]:
        """Makes a request to the chief as this participant. If another chief has taken over, takes the place again and asks that one.

        Raises EpochMismatch or LeaseExpired if the worker has thereby become another participant, or if the chief registers it as the same
        one but keeps refusing its requests.
        """
        num_renewals = 0
        while True:
            generation = self.generation
            try:
                return (yield request)
            except TrainingFailed:
                self.has_failed = True
                raise
            except (EpochMismatch, LeaseExpired) as error:
                yield Renew(generation, error)
                num_renewals += 1
                if self.participant is not participant or num_renewals > _MAX_RENEWALS:
                    raise
            except Superseded:
                yield AwaitRenewal()
                if self.participant is participant:
                    raise
                raise LeaseExpired(_ENDED) from None

    def beat(self) -> Asking[None]:
        """Renews the lease, or takes the place again. Called by the heartbeat, because the worker may compute for a long time."""
        generation, participant = self.generation, self.participant
        try:
            end: End = yield Beat(participant)
            self.end = self.end or end
        except TrainingFailed:
            self.has_failed = True
            raise
        except (EpochMismatch, LeaseExpired) as error:
            yield Renew(generation, error)
        except Superseded:
            yield AwaitRenewal()
            if self.participant is participant:
                raise

    def take_again(self, cause: PsError, *, is_question: bool = False) -> Asking[bool]:
        """Registers again; returns whether this place has another participant now. If not, repeats model and open commits to the chief.

        `is_question`: only asks which servers hold the shards, and repeats nothing unless the chief is a new one. Raises Superseded if
        another process has taken the place.
        """
        former, chief_incarnation = self.participant, self.registration.chief_incarnation
        try:
            registration: Registration = yield Register(former, self.commits.held if self.commits.owner is former else ())
        except WorkerIndexTaken as error:
            raise Superseded(f"{cause.message}; and meanwhile {error.message}", facts=error.facts) from None
        if registration.participant != former:
            self.registration = registration
            return True
        # The same object, which shows that nothing else has changed.
        self.registration = replace(registration, participant=former)
        if not is_question or registration.chief_incarnation != chief_incarnation:
            yield from self._repeat_commits(former)
        return False

    def _repeat_commits(self, participant: Participant) -> Asking[None]:
        """Repeats to a new chief the model, and the commits that its predecessor may have counted and had not applied."""
        try:
            if self.model is not None:
                yield Agree(participant, self.model, None, may_create=False)
            # Contributions of an earlier epoch count in no later one; the worker's thread asks for their outcomes.
            for commit in self.commits.all() if self.commits.owner is participant else ():
                yield Count(participant, commit)
        except (EpochMismatch, LeaseExpired, NotInitialized, Superseded):
            return  # the next request ends with the same error, and its caller handles it

    def await_other(self, known: Registration, cause: PsError, wait: Deadline) -> Asking[PsError]:
        """Waits until the place is another than the one `known`: a server has been restarted or restored, and the chief will soon notice.

        That is another participant, or the same one at another chief: where the chief before brought the server back before it ended, the
        next one finds nothing to do. Returns the chief's error about that if there is one, else the cause. Raises the cause if the chief
        has not noticed by the end of the wait.
        """
        participant = known.participant
        if self.participant is not participant:
            return cause
        if isinstance(cause, Cancelled):
            raise cause
        while self.participant is participant and self.registration.chief_incarnation == known.chief_incarnation:
            try:
                yield from self.ask(Beat(participant), participant)
            except (EpochMismatch, LeaseExpired) as error:
                return error
            if isinstance(cause, Superseded) or wait.left_s() == 0:
                raise cause
            wait.explain(f"the chief has not heard of it yet: {cause.message}")
            yield Pause(wait, _RETRY_S)
        return cause
