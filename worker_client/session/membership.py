"""A participant's place in its cluster, from registration to leaving, over changes of chief and epoch. Knows the chief; no model."""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ps_protocol.errors import DeadlineExceeded, PsError, ShuttingDown, Unavailable
from ps_protocol.process import waiting
from ps_protocol.roles.chief import (
    Chief,
    ClusterStatus,
    ClusterStatusRequest,
    CommitPushRequest,
    CommitResult,
    DeregisterRequest,
    End,
    HeartbeatRequest,
    ModelReply,
    Participant,
    RegisterModelRequest,
    Registration,
)
from ps_protocol.roles.fence import numbered
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.threads import run_bounded
from worker_client.core.place import Place
from worker_client.core.requests import Agree, AwaitRenewal, Beat, Count, Pause, Register, Renew, Status, run
from worker_client.shards.shards import CLOSE_WAIT_S, Shards, TrafficCount

log = logging.getLogger("lockstep.worker")


class SharedPlace:
    """A place that two threads take again, one of them at a time: the participant's own, and that of its heartbeat.

    `moved` is called, by whichever thread, after the holder has become another participant: in another epoch, or another incarnation.
    """

    def __init__(self, link: ChiefLink, registration: Registration, *, moved: Callable[[], None]) -> None:
        self.place = Place(registration)
        self.is_closed = False
        self._link = link
        self._moved = moved
        self._lock = threading.Lock()
        self._is_renewing = False
        self._acts: dict[type, Callable[[Any], Any]] = {Register: self._register, Agree: self._agree, Count: self._count}

    def await_renewal(self, _: AwaitRenewal | None = None) -> None:
        """Waits for another thread that is taking the place again, so that its messages to the chief come first."""
        if self._is_renewing:
            with self._lock:
                pass

    def renew(self, request: Renew) -> None:
        """Takes the place again, unless that has been done since.

        Blocks while the chief cannot be reached, at most for the link's timeout. Raises Superseded if another has taken the place, and
        what registering raises.
        """
        with self._lock:
            if self.place.generation != request.generation:
                return
            if self.is_closed:
                raise request.cause
            self._is_renewing = True
            try:
                has_moved = run(self.place.take_again(request.cause), self._acts)
                self.place.generation += 1
            finally:
                self._is_renewing = False
        if has_moved:
            self._moved()

    def ask_again(self, version: int) -> Registration:
        """Registers again to hear which servers hold the shards now, unless that has been done since `version` of that; returns what holds.

        Blocks and raises as `renew`.
        """
        place = self.place
        with self._lock:
            if place.registration.shards_version != version or self.is_closed:
                return place.registration
            cause = Unavailable("a parameter server does not answer")
            has_moved = run(place.take_again(cause, is_question=True), self._acts)
            place.generation += has_moved
        if has_moved:
            self._moved()
        return place.registration

    def _register(self, request: Register) -> Registration:
        former, found = request.former, self._link.register_again(request.former, held=request.held)
        if found.participant == former and found.chief_incarnation != self.place.registration.chief_incarnation:
            log.info("%s registered again epoch=%d chief=%d", former.name, former.era.epoch, found.chief_incarnation)
        return found

    def _agree(self, request: Agree) -> ModelReply:
        participant, model = request.participant, request.model
        return self._link.ask(
            RegisterModelRequest(participant=participant, model=model, max_wait_s=0.0, joins_only=True),
            what="the model again",
        )

    def _count(self, request: Count) -> CommitResult:
        participant, commit = request.participant, request.commit
        result = self._link.ask(
            CommitPushRequest(participant=participant, commit=commit),
            what=f"count a push to step {commit.step} again",
        )
        log.info("named a push to a new chief step=%d outcome=%s", commit.step, result.outcome.name)
        return result


# Keeps a participant's lease while its own thread computes.


# A third of the lease, so that one lost heartbeat does not end it.
BEATS_PER_LEASE = 3
STOP_WAIT_S = 0.25


class Heartbeat:
    """A daemon thread that renews the lease. It bears a chief that is away for a while, and ends once the place is lost.

    `beat` renews it once. `name`: of the participant.
    """

    def __init__(self, beat: Callable[[], object], *, name: str, lease_s: float) -> None:
        self._beat = beat
        self._name = name
        self._interval_s = lease_s / BEATS_PER_LEASE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lockstep-heartbeat-{name}", daemon=True)

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
                self._beat()
                is_reachable = True
            except (Unavailable, DeadlineExceeded, ShuttingDown) as error:
                if is_reachable and not self._stopped.is_set():
                    log.warning("%s: heartbeat failed, trying on cause=%s", self._name, error)
                is_reachable = False
            except PsError as error:
                # The next call of the worker itself raises this; here it would only be logged again and again.
                if not self._stopped.is_set():
                    log.warning("%s: heartbeat ended cause=%s", self._name, error)
                return


# How a participant leaves its cluster: quickly, in every state.


# With three waits of a quarter, and the end of an interpreter, Ctrl-C brings the prompt back within 2 s.
DEREGISTER_WAIT_S = 1.0
MAX_FAILURE_CHARACTERS = 500


def failure_text(error: BaseException | None) -> str:
    """Returns the text for the chief about an exception that ends a session; empty for none, and for an exit that is no failure."""
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
            log.warning("the chief did not hear that %s leaves; its lease will end by itself", participant.name)
    finally:
        if shards is not None:
            shards.close()
        link.transport.close()
        run_bounded([link.chief.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)


def _deregister(chief: Chief, participant: Participant, failure: str) -> None:
    try:
        waiting.call(
            lambda _: chief.call(DeregisterRequest(participant=participant, failure=failure)),
            what="the chief: leave",
            timeout_s=DEREGISTER_WAIT_S,
        )
    except PsError as error:
        # No caller is left to raise it to, and the lease ends by itself.
        log.debug("%s: deregistration failed cause=%s", participant.name, error)


# A participant's place in its cluster, from registration to leaving.


class Membership:
    """Keeps the lease until it is left, and the place when chief or epoch change; `acts` carry out what the place asks for.

    `what` names the holder in errors, `renewal` how to get another.
    """

    def __init__(self, link: ChiefLink, registration: Registration, *, what: str, renewal: str) -> None:
        self.link = link
        self._shared = SharedPlace(link, registration, moved=self._give_up_shards)
        self.place = self._shared.place
        self.await_renewal = self._shared.await_renewal
        self._what = what
        self._renewal = renewal
        self.traffic = TrafficCount()
        self._shards: Shards | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self.acts: Mapping[type, Callable[[Any], Any]] = {
            Renew: self._shared.renew,
            AwaitRenewal: self._shared.await_renewal,
            Beat: self._ask_beat,
            Status: lambda _: self.status(max_ledger_entries=0),
            Pause: lambda request: request.wait.pause(request.seconds),
        }
        # One attempt, in a thread that no other one waits for.
        self._acts_of_heartbeat = {**self.acts, Beat: self._beat_once}
        self._heartbeat: Heartbeat | None = None
        if not link.transport.is_in_process:
            self._heartbeat = Heartbeat(self._beat, name=self.participant.name, lease_s=registration.lease_s)
            self._heartbeat.start()

    @property
    def participant(self) -> Participant:
        """The present participant; the same object for as long as it is the same identity."""
        return self.place.participant

    @property
    def registration(self) -> Registration:
        """The chief's answer to the latest registration."""
        return self.place.registration

    @property
    def may_have_predecessor(self) -> bool:
        """Whether another program may have been here under this index: the first chief gives an index's first program this number alone."""
        return self.place.participant.incarnation != numbered(1, 1)

    @property
    def is_finished(self) -> bool:
        """Whether the answer to a heartbeat has reported that training is finished."""
        return self.place.is_finished

    def shards(self) -> Shards:
        """Returns the connections to all shards, for the holder's present identity; opens them when first asked."""
        if self._shards is not None and self._shards.participant is not self.participant:
            self._shards.close()
            self._shards = None
        if self._shards is None:
            self._shards = Shards(self.link.transport, self.registration, traffic=self.traffic, ask_again=self._shared.ask_again)
        return self._shards

    @property
    def transports(self) -> tuple[str, ...]:
        """How dense gradients and variables reach each shard, as far as connections have been opened; opens none."""
        if self._shards is not None:
            return self._shards.transports
        return tuple(map(self.link.transport.name, range(len(self.registration.shard_addresses))))

    def hear_of_shards(self, version: int) -> None:
        """Asks the chief which servers hold the shards, unless that is known of this version."""
        known = self.registration.shards_version
        if known != version:
            self._shared.ask_again(known)
            if self._shards is not None:
                self._shards.hear()

    def status(self, *, max_ledger_entries: int, timeout_s: float | None = None) -> ClusterStatus:
        """Returns the chief's report."""
        self.check_open()
        return self.link.ask(ClusterStatusRequest(max_ledger_entries=max_ledger_entries), what="status", timeout_s=timeout_s)

    def applies_on_arrival(self) -> bool:
        """Asks the chief whether shards apply each contribution at once and without a lock, so that they have no common steps."""
        return self.status(max_ledger_entries=0).policy.applies_on_arrival

    def leave(self, failure: str) -> None:
        """Ends the lease and all connections, in at most 2 s. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._shared.is_closed = True
        # A forked child has the parent's place, not its threads; leaving would end the parent's lease.
        if os.getpid() == self._process_id:
            leave(self.link, self.participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def check_open(self) -> None:
        """Raises RuntimeError once it is left, and in a forked child."""
        if self._is_closed:
            raise RuntimeError(f"{self._what} is closed; open a new one with {self._renewal}")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"{self._what} belongs to process {self._process_id}; a fork must connect anew")

    def _ask_beat(self, request: Beat) -> End:
        participant = request.participant
        return self.link.ask(HeartbeatRequest(participant=participant), what="the epoch", before=self.await_renewal)

    def _beat_once(self, request: Beat) -> End:
        # Each name once, however many servers there are.
        return self.link.beat(request.participant, transports=tuple(sorted({*self.transports})), traffic=self.traffic.report())

    def _beat(self) -> None:
        """One heartbeat, in its own thread."""
        run(self.place.beat(), self._acts_of_heartbeat)

    def _give_up_shards(self) -> None:
        """Ends calls at servers that are still under way in the name of a former identity."""
        shards = self._shards
        if shards is not None and shards.participant is not self.participant:
            shards.give_up()
