"""A participant's place in its cluster: its identity, and registering again when chief or epoch have changed. Pure."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from ps_protocol.errors import (
    Cancelled,
    EpochMismatch,
    LeaseExpired,
    NotInitialized,
    PsError,
    Superseded,
    TrainingFailed,
    Unavailable,
    WorkerIndexTaken,
)
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import CommitPushRequest, End, HeartbeatRequest, Participant, RegisterModelRequest, Registration
from worker_client.core.sides import ChiefSide, Deadline, Result
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

    The worker's thread and its heartbeat's make requests as this participant, and either may take the place again, one at a time.
    `generation` grows each time; `is_renewing` is set meanwhile, and other requests wait.
    """

    def __init__(self, registration: Registration, chief: ChiefSide) -> None:
        self.registration, self.chief = registration, chief
        self.commits = OpenCommits(registration.participant)
        # The model, once the participant has joined one.
        self.model: ModelSpec | None = None
        self.generation = 0
        self.is_renewing = self.is_left = False
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

    async def ask(self, participant: Participant, call: Callable[[], Awaitable[Result]]) -> Result:
        """Makes a call to the chief as this participant. If another chief has taken over, takes the place again and calls that one.

        Raises EpochMismatch or LeaseExpired if the worker has thereby become another participant, or if the chief registers it as the same
        one but keeps refusing its requests.
        """
        num_renewals = 0
        while True:
            generation = self.generation
            try:
                return await call()
            except TrainingFailed:
                self.has_failed = True
                raise
            except (EpochMismatch, LeaseExpired) as error:
                await self._renew(generation, error)
                num_renewals += 1
                if self.participant is not participant or num_renewals > _MAX_RENEWALS:
                    raise
            except Superseded:
                await self.chief.await_turn()
                if self.participant is participant:
                    raise
                raise LeaseExpired(_ENDED) from None

    async def beat(self) -> None:
        """Renews the lease, or takes the place again. Called by the heartbeat, because the worker may compute for a long time."""
        generation, participant = self.generation, self.participant
        try:
            end = await self.chief.beat(participant)
            self.end = self.end or end
        except TrainingFailed:
            self.has_failed = True
            raise
        except (EpochMismatch, LeaseExpired) as error:
            await self._renew(generation, error)
        except Superseded:
            await self.chief.await_turn()
            if self.participant is participant:
                raise

    async def _renew(self, generation: int, cause: PsError) -> None:
        """Takes the place again, unless that has been done since this generation; raises the cause if the place has been left."""
        async with self.chief.turn():
            if self.generation != generation:
                return
            if self.is_left:
                raise cause
            self.is_renewing = True
            try:
                has_moved = await self._take_again(cause, is_question=False)
                self.generation += 1
            finally:
                self.is_renewing = False
        if has_moved:
            self.chief.moved()

    async def hear_shards(self, version: int) -> Registration:
        """Registers again to hear which servers hold the shards, unless that has been done since `version` of them; returns what holds.

        Blocks while the chief cannot be reached. Raises Superseded if another process has taken the place, and what registering raises.
        """
        async with self.chief.turn():
            if self.registration.shards_version != version or self.is_left:
                return self.registration
            has_moved = await self._take_again(Unavailable("a parameter server does not answer"), is_question=True)
            self.generation += has_moved
        if has_moved:
            self.chief.moved()
        return self.registration

    async def _take_again(self, cause: PsError, *, is_question: bool) -> bool:
        """Registers again; returns whether this place has another participant now. If not, repeats model and open commits to the chief.

        `is_question`: only asks which servers hold the shards, and repeats nothing unless the chief is a new one. Raises Superseded if
        another process has taken the place.
        """
        known, former = self.registration, self.participant
        try:
            registration = await self.chief.register(known, self.commits.held if self.commits.owner is former else ())
        except WorkerIndexTaken as error:
            raise Superseded(f"{cause.message}; and meanwhile {error.message}", facts=error.facts) from None
        if registration.participant != former:
            self.registration = registration
            return True
        # The same object, which shows that nothing else has changed.
        self.registration = replace(registration, participant=former)
        if not is_question or registration.chief_incarnation != known.chief_incarnation:
            await self._repeat_commits(former)
        return False

    async def _repeat_commits(self, participant: Participant) -> None:
        """Repeats to a new chief the model, and the commits that its predecessor may have counted and had not applied."""
        try:
            if self.model is not None:
                request = RegisterModelRequest(participant=participant, model=self.model, max_wait_s=0.0, joins_only=True)
                await self.chief.ask(request, what="the model again", takes_place=True)
            # Contributions of an earlier epoch count in no later one; the worker's thread asks for their outcomes.
            for commit in self.commits.all() if self.commits.owner is participant else ():
                again = CommitPushRequest(participant=participant, commit=commit)
                await self.chief.ask(again, what=f"count a push to step {commit.step} again", takes_place=True)
        except (EpochMismatch, LeaseExpired, NotInitialized, Superseded):
            return  # the next request ends with the same error, and its caller handles it

    async def await_other(self, known: Registration, cause: PsError, wait: Deadline) -> PsError:
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
                await self.ask(participant, lambda: self.chief.ask(HeartbeatRequest(participant=participant), what="the epoch"))
            except (EpochMismatch, LeaseExpired) as error:
                return error
            if isinstance(cause, Superseded) or wait.left_s() == 0:
                raise cause
            wait.explain(f"the chief has not heard of it yet: {cause.message}")
            await self.chief.pause(wait, _RETRY_S)
        return cause
