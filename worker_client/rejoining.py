"""A participant's place in its cluster, taken again when chief or epoch have changed. Knows the link and a lock; no model and no step."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from ps_protocol.chief import Participant, Registration
from ps_protocol.errors import Cancelled, EpochMismatch, LeaseExpired, NotInitialized, PsError, Superseded, Unavailable, WorkerIndexTaken
from ps_protocol.model import ModelSpec
from worker_client.cluster_link import ClusterLink, register_again
from worker_client.open_commits import OpenCommits

log = logging.getLogger("lockstep.worker")

# What a call ends with when its caller's place is no longer what it was: at the chief, and at servers that have begun again. Superseded: by
# another process, or by this very one, whose other thread has come back as another incarnation.
LOST = (EpochMismatch, LeaseExpired, NotInitialized, Cancelled, Superseded)


class Place:
    """Who the participant is at present. Thread-safe: its own thread and that of its heartbeat take the place again, one of them at a time.

    `moved` is called, by whichever thread, after it has become another participant: in another epoch, or another incarnation.
    """

    def __init__(self, link: ClusterLink, registration: Registration, *, moved: Callable[[], None]) -> None:
        self.registration = registration
        self.commits = OpenCommits(registration.participant)
        # The model of whoever has joined one: another chief may have to learn it.
        self.model: ModelSpec | None = None
        self.generation = 0
        self.is_closed = False
        self._link = link
        self._moved = moved
        self._lock = threading.Lock()
        self._is_renewing = False

    @property
    def participant(self) -> Participant:
        """The identity to call with; the same object for as long as it is the same identity."""
        return self.registration.participant

    def settle(self) -> None:
        """Waits for another thread that is taking the place again, so that what it tells the chief comes first."""
        if self._is_renewing:
            with self._lock:
                pass

    def check_superseded(self, participant: Participant, error: Superseded) -> None:
        """Raises the error unless the other thread has taken the place again meanwhile, as the one that supersedes this participant."""
        self.settle()
        if self.participant is participant:
            raise error

    def renew(self, generation: int, cause: PsError) -> None:
        """Registers again, unless that has been done since `generation`. Where it is still the same, tells the chief what is open.

        Blocks while the chief cannot be reached, at most for the link's timeout. Raises Superseded if another has taken the place, and
        what registering raises.
        """
        with self._lock:
            if self.generation != generation:
                return
            if self.is_closed:
                raise cause
            self._is_renewing = True
            try:
                has_moved = self._take(cause)
                self.generation += 1
            finally:
                self._is_renewing = False
        if has_moved:
            self._moved()

    def ask_again(self, version: int) -> Registration:
        """Registers again to hear which servers hold the shards now, unless that has been done since `version` of that; returns what holds.

        Blocks and raises as `renew`.
        """
        with self._lock:
            if self.registration.shards_version != version or self.is_closed:
                return self.registration
            has_moved = self._take(Unavailable("a parameter server does not answer"), is_question=True)
            self.generation += has_moved
        if has_moved:
            self._moved()
        return self.registration

    def _take(self, cause: PsError, *, is_question: bool = False) -> bool:
        former = self.participant
        try:
            registration = register_again(self._link, former, held=self.commits.held if self.commits.owner is former else ())
        except WorkerIndexTaken as error:
            raise Superseded(f"{cause.message}; and meanwhile {error.message}", facts=error.facts) from None
        if registration.participant == former:
            is_same_chief = registration.chief_incarnation == self.registration.chief_incarnation
            if is_question and is_same_chief:
                self.registration = replace(registration, participant=former)
                return False
            log.info("registered again index=%d epoch=%d chief=%d", former.index, former.epoch, registration.chief_incarnation)
            # The same object, by which everybody sees that nothing else has changed.
            self.registration = replace(registration, participant=former)
            self._retell(former)
            return False
        self.registration = registration
        return True

    def _retell(self, participant: Participant) -> None:
        """Another chief may know neither the model nor what its predecessor had counted and not applied."""
        model, ask = self.model, self._link.ask
        try:
            if model is not None:
                ask(lambda chief: chief.register_model(participant, model, max_wait_s=0.0, may_initialize=False), what="the model again")
            # Those of an epoch that is over wait for the worker's thread, which finds out what became of them; they count in no other.
            for commit in self.commits.all() if self.commits.owner is participant else ():
                what = f"count a push to step {commit.step} again"
                result = ask(lambda chief, commit=commit: chief.commit_push(participant, commit), what=what)  # type: ignore[misc]
                log.info("told a new chief of a push step=%d outcome=%s", commit.step, result.outcome.name)
        except (EpochMismatch, LeaseExpired, NotInitialized, Superseded) as error:
            # What is asked next ends in the same way, and finds out what to do about it.
            log.info("a new chief was not told of all that was counted: %s", error)
