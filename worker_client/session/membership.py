"""A participant's place in its cluster, from registration to leaving, over changes of chief and epoch. Knows the chief; no model."""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    EpochMismatch,
    LeaseExpired,
    NotInitialized,
    PsError,
    ShuttingDown,
    Superseded,
    Unavailable,
    WorkerIndexTaken,
)
from ps_protocol.model.spec import ModelSpec
from ps_protocol.process import waiting
from ps_protocol.roles.chief import Chief, ClusterStatus, Participant, Registration
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.threads import run_bounded
from worker_client.cluster.waiting import Wait
from worker_client.session.state import OpenCommits
from worker_client.shards.shards import CLOSE_WAIT_S, Shards

# A participant's place in its cluster, taken again when chief or epoch have changed.


log = logging.getLogger("lockstep.worker")

# What a call ends with when its caller's place is no longer what it was: at the chief, and at servers that have begun again. Superseded: by
# another process, or by this very one, whose other thread has come back as another incarnation.
LOST = (EpochMismatch, LeaseExpired, NotInitialized, Cancelled, Superseded)


class Place:
    """Who the participant is at present. Thread-safe: its own thread and that of its heartbeat take the place again, one of them at a time.

    `moved` is called, by whichever thread, after it has become another participant: in another epoch, or another incarnation.
    """

    def __init__(self, link: ChiefLink, registration: Registration, *, moved: Callable[[], None]) -> None:
        self.registration = registration
        self.commits = OpenCommits(registration.participant)
        # The model of a participant that has joined one: another chief may have to learn it.
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

    def await_renewal(self) -> None:
        """Waits for another thread that is taking the place again, so that what it tells the chief comes first."""
        if self._is_renewing:
            with self._lock:
                pass

    def check_superseded(self, participant: Participant, error: Superseded) -> None:
        """Raises the error unless the other thread has taken the place again meanwhile, as the one that supersedes this participant."""
        self.await_renewal()
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
            registration = self._link.register_again(former, held=self.commits.held if self.commits.owner is former else ())
        except WorkerIndexTaken as error:
            raise Superseded(f"{cause.message}; and meanwhile {error.message}", facts=error.facts) from None
        if registration.participant == former:
            is_same_chief = registration.chief_incarnation == self.registration.chief_incarnation
            if is_question and is_same_chief:
                self.registration = replace(registration, participant=former)
                return False
            log.info("registered again index=%d epoch=%d chief=%d", former.index, former.epoch, registration.chief_incarnation)
            # The same object, which shows that nothing else has changed.
            self.registration = replace(registration, participant=former)
            self._tell_again(former)
            return False
        self.registration = registration
        return True

    def _tell_again(self, participant: Participant) -> None:
        """Another chief may know neither the model nor what its predecessor had counted and not applied."""
        model, ask = self.model, self._link.ask
        try:
            if model is not None:
                ask(lambda chief: chief.register_model(participant, model, max_wait_s=0.0, joins_only=True), what="the model again")
            # Those of an epoch that is over wait for the worker's thread, which finds out what became of them; they count in no other.
            for commit in self.commits.all() if self.commits.owner is participant else ():
                what = f"count a push to step {commit.step} again"
                result = ask(lambda chief, commit=commit: chief.commit_push(participant, commit), what=what)  # type: ignore[misc]
                log.info("named a push to a new chief step=%d outcome=%s", commit.step, result.outcome.name)
        except (EpochMismatch, LeaseExpired, NotInitialized, Superseded) as error:
            # What is asked next ends in the same way, and finds out what to do about it.
            log.info("the new chief does not know everything that was registered with the one before: %s", error)


# Keeps a participant's lease while its own thread computes.


# A third of the lease, so that one lost heartbeat does not end it.
BEATS_PER_LEASE = 3
STOP_WAIT_S = 0.25


class Heartbeat:
    """A daemon thread that renews the lease. It bears a chief that is away for a while, and ends once the place is lost.

    `beat` renews it once and returns whether training is finished.
    """

    def __init__(self, beat: Callable[[], bool], *, index: int, lease_s: float) -> None:
        self._beat = beat
        self._index = index
        self._interval_s = lease_s / BEATS_PER_LEASE
        self._stopped = threading.Event()
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name=f"lockstep-heartbeat-{index}", daemon=True)

    @property
    def is_finished(self) -> bool:
        """Whether the chief has said that training is finished."""
        return self._is_finished

    def start(self) -> None:
        """Begins to renew the lease."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for it at most a quarter of a second. Can be called at any time, and again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        is_reachable = True
        while not self._stopped.wait(self._interval_s):
            try:
                self._is_finished = self._beat() or self._is_finished
                is_reachable = True
            except (Unavailable, DeadlineExceeded, ShuttingDown) as error:
                if is_reachable and not self._stopped.is_set():
                    log.warning("heartbeat failed, trying on worker=%d: %s", self._index, error)
                is_reachable = False
            except PsError as error:
                # The next call of the worker itself raises this; here it would only be said again and again.
                if not self._stopped.is_set():
                    log.warning("heartbeat ended worker=%d: %s", self._index, error)
                return


# How a participant leaves its cluster: quickly, whatever the state of things.


# With three waits of a quarter, and the end of an interpreter, Ctrl-C brings the prompt back within 2 s.
DEREGISTER_WAIT_S = 1.0
MAX_FAILURE_CHARACTERS = 500


def failure_text(error: BaseException | None) -> str:
    """Returns what to tell the chief about an exception that ends a session; empty for none, and for an exit that is no failure."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = str(error)
    return f"{type(error).__name__}: {text}"[:MAX_FAILURE_CHARACTERS] if text else type(error).__name__


def leave(link: ChiefLink, participant: Participant, *, heartbeat: Heartbeat | None, shards: Shards | None, failure: str) -> None:
    """Stops the heartbeat, ends the lease, releases all connections. Takes 2 s at most; a silent chief only misses the news."""

    def deregister() -> None:
        _deregister(link.chief, participant, failure)

    if link.transport.is_in_process:
        deregister()  # there is nothing else to release
        return
    try:
        if heartbeat is not None:
            heartbeat.stop()
        if not run_bounded([deregister], name="lockstep-farewell", timeout_s=DEREGISTER_WAIT_S):
            log.warning("the chief did not take note that worker=%d leaves; its lease will end by itself", participant.index)
    finally:
        if shards is not None:
            shards.close()
        link.transport.close()
        run_bounded([link.chief.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)


def _deregister(chief: Chief, participant: Participant, failure: str) -> None:
    try:
        waiting.call(lambda _: chief.deregister_worker(participant, failure=failure), what="the chief: leave", timeout_s=DEREGISTER_WAIT_S)
    except PsError as error:
        # No caller is left to raise it to, and the lease ends by itself.
        log.debug("deregistration failed worker=%d: %s", participant.index, error)


# A participant's place in its cluster, from registration to leaving.


Result = TypeVar("Result")

_LOOK_AGAIN_S = 0.1
_ENDED = "its lease had ended, and it has registered again since"


class Membership:
    """Keeps the lease until it is left, and the place when chief or epoch change. `what` names the holder in errors, `renewal` how to get
    another.
    """

    def __init__(self, link: ChiefLink, registration: Registration, *, what: str, renewal: str) -> None:
        self.link = link
        self._place = Place(link, registration, moved=self._give_up_shards)
        self._what = what
        self._renewal = renewal
        self._shards: Shards | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._heartbeat: Heartbeat | None = None
        if not link.transport.is_in_process:
            self._heartbeat = Heartbeat(self._beat, index=self.participant.index, lease_s=registration.lease_s)
            self._heartbeat.start()

    @property
    def participant(self) -> Participant:
        """Who the holder is at present; the same object for as long as it is the same identity."""
        return self._place.participant

    @property
    def registration(self) -> Registration:
        """What the chief has said at the latest registration."""
        return self._place.registration

    @property
    def commits(self) -> OpenCommits:
        """The contributions that another chief would have to hear of; for the holder's own thread."""
        return self._place.commits

    @property
    def is_finished(self) -> bool:
        """Whether the chief has said with a heartbeat that training is finished."""
        return self._heartbeat is not None and self._heartbeat.is_finished

    def ask(
        self,
        question: Callable[[Chief], Result],
        *,
        participant: Participant,
        what: str,
        timeout_s: float | None = None,
        expected_s: float = 0.0,
    ) -> Result:
        """Asks the chief something as this participant; where another chief has taken over, registers again and asks that one.

        Raises EpochMismatch or LeaseExpired if the holder has become another participant by that, and what `link.ask` raises.
        """
        place = self._place

        while True:
            generation = place.generation
            try:
                return self.link.ask(question, what=what, timeout_s=timeout_s, expected_s=expected_s, before=place.await_renewal)
            except (EpochMismatch, LeaseExpired) as error:
                place.renew(generation, error)
                if place.participant is not participant:
                    raise
            except Superseded as error:
                place.check_superseded(participant, error)
                raise LeaseExpired(_ENDED) from None

    def note_model(self, model: ModelSpec) -> None:
        """Takes note of the model that was joined, for a chief that does not know it."""
        self._place.model = model

    def await_new_place(self, participant: Participant, cause: PsError) -> PsError:
        """Returns once the holder is no longer this participant: a server has begun again, and the chief will soon know, too.

        What it returns is what the chief says of that, if it says anything. Raises the cause if the chief knows of nothing for as long as
        the link's timeout.
        """
        wait = Wait(f"{self._what} asks what has become of its servers", timeout_s=self.link.transport.timeout_s)
        while participant is self.participant:
            try:
                self.ask(lambda chief: chief.heartbeat(participant), participant=participant, what="the epoch")
            except (EpochMismatch, LeaseExpired) as error:
                return error
            if isinstance(cause, Superseded) or not wait.left_s():
                raise cause
            wait.explain(f"the chief has not heard of it yet: {cause.message}")
            wait.pause(_LOOK_AGAIN_S)
        return cause

    def shards(self) -> Shards:
        """Returns the connections to all shards, for the holder's present identity; opens them when first asked."""
        if self._shards is not None and self._shards.participant is not self.participant:
            self._shards.close()
            self._shards = None
        if self._shards is None:
            self._shards = Shards(self.link.transport, self.registration, ask_again=self._place.ask_again)
        return self._shards

    @property
    def transports(self) -> tuple[str, ...]:
        """How dense gradients and variables reach each shard, as far as connections have been opened; opens none."""
        if self._shards is not None:
            return self._shards.transports
        return ("local" if self.link.transport.is_in_process else "grpc",) * len(self.registration.shard_addresses)

    def hear_of_shards(self, version: int | None = None) -> None:
        """Asks the chief which servers hold the shards, if that may be others than is known here: not of `version` (None: in any case)."""
        known = self.registration.shards_version
        if self._shards is not None and known != version and (known or version):
            self._shards.hear()

    def status(self, *, max_ledger_entries: int, timeout_s: float | None = None) -> ClusterStatus:
        """Returns the chief's report."""
        self.check_open()
        return self.link.ask(lambda chief: chief.status(max_ledger_entries=max_ledger_entries), what="status", timeout_s=timeout_s)

    def applies_on_arrival(self) -> bool:
        """Asks the chief whether shards apply each contribution at once and without a lock, so that they have no common steps."""
        return self.status(max_ledger_entries=0).policy.applies_on_arrival

    def leave(self, failure: str) -> None:
        """Ends the lease and all connections, in at most 2 s. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._place.is_closed = True
        # A forked child has the parent's place, not its threads; leaving would end the parent's lease.
        if os.getpid() == self._process_id:
            leave(self.link, self.participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def check_open(self) -> None:
        """Raises RuntimeError once it is left, and in a forked child."""
        if self._is_closed:
            raise RuntimeError(f"{self._what} is closed; open a new one with {self._renewal}")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"{self._what} belongs to process {self._process_id}; a fork must connect anew")

    def _beat(self) -> bool:
        """One heartbeat, in its own thread, which takes the place again as well: the holder may compute for long."""
        place = self._place
        generation, participant = place.generation, place.participant
        try:
            return self.link.beat(participant)
        except (EpochMismatch, LeaseExpired) as error:
            place.renew(generation, error)
        except Superseded as error:
            place.check_superseded(participant, error)
        return False

    def _give_up_shards(self) -> None:
        """What is still tried at servers in the name of a former identity is of no use."""
        shards = self._shards
        if shards is not None and shards.participant is not self.participant:
            shards.give_up()
