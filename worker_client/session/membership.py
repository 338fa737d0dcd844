"""A participant's place in its cluster, from registration to leaving, over changes of chief and epoch. Knows the chief; no model."""

import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ps_protocol.errors import DeadlineExceeded, PsError, ShuttingDown, Unavailable
from ps_protocol.process import waiting
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import (
    ClusterStatus,
    ClusterStatusRequest,
    DeregisterRequest,
    End,
    LeaseRangesRequest,
    LeaseReply,
    Participant,
    ParticipantKind,
    Registration,
)
from ps_protocol.roles.fence import numbered
from ps_protocol.roles.request import Answer, Request
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.threads import Job, Lane, run_bounded
from worker_client.core.place import Place
from worker_client.core.sides import Deadline, run
from worker_client.shards.shards import CLOSE_WAIT_S, Shards, TrafficCount

log = logging.getLogger("lockstep.worker")


# Keeps a participant's lease while its own thread computes.


# A third of the lease, so that one lost heartbeat does not end it.
BEATS_PER_LEASE = 3
STOP_WAIT_S = 0.25


class Heartbeat:
    """A daemon thread that renews the lease. It bears a chief that is away for a while, and ends once the place is lost.

    `beat` renews it once. `name`: of the participant.
    """

    def __init__(self, beat: Callable[[], object], *, name: str, interval_s: float) -> None:
        self._beat = beat
        self._name = name
        self._interval_s = interval_s
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


# A participant's place in its cluster, from registration to leaving.


class Membership:
    """Keeps the lease until it is left, and the place when chief or epoch change; implements ChiefSide over gRPC and in this process.

    `what` names the holder in errors, `renewal` how to get another. `max_beat_s`: from one heartbeat to the next, at most.
    """

    def __init__(self, link: ChiefLink, registration: Registration, *, what: str, renewal: str, max_beat_s: float = math.inf) -> None:
        self.link = link
        self.place = Place(registration, self)
        self._turn = threading.Lock()  # held while a thread takes the place again
        self._what = what
        self._renewal = renewal
        self.traffic = TrafficCount()
        self._shards: Shards | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._lane: Lane | None = None
        self._lease: tuple[LeaseRangesRequest, Job] | None = None  # that is asked for in the lane
        self._heartbeat: Heartbeat | None = None
        if not link.transport.is_in_process:
            interval_s = min(registration.lease_s / BEATS_PER_LEASE, max_beat_s)
            self._heartbeat = Heartbeat(self._beat, name=self.participant.name, interval_s=interval_s)
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
            self._shards = Shards(self.link.transport, self.registration, traffic=self.traffic, ask_again=self._hear_shards)
        return self._shards

    @property
    def transports(self) -> tuple[str, ...]:
        """How dense gradients and variables reach each shard, as far as connections have been opened; opens none."""
        return self._shards.transports if self._shards is not None else ()

    def heard_of_shards(self) -> None:
        """Has the connections follow, where other servers hold the shards than before."""
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
        """Stops the heartbeat, ends the lease and all connections, in at most 2 s; a silent chief only misses the news. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self.place.is_left = True
        if self._lane is not None:
            self._lane.close()  # ranges that are leased there go back
        # A forked child has the parent's place, not its threads; leaving would end the parent's lease.
        if os.getpid() != self._process_id:
            return
        if self.link.transport.is_in_process:
            self._deregister(failure, timeout_s=DEREGISTER_WAIT_S)  # there is nothing else to release
            return
        # The lease that an observer leaves behind holds nobody up, so a chief that is known to be away is not waited for.
        is_in_vain = self.link.is_silent and self.participant.kind is ParticipantKind.OBSERVER
        wait_s = CLOSE_WAIT_S if is_in_vain else DEREGISTER_WAIT_S
        try:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            if not run_bounded([lambda: self._deregister(failure, timeout_s=wait_s)], name="lockstep-farewell", timeout_s=wait_s):
                log.warning("the chief did not hear that %s leaves; its lease will end by itself", self.participant.name)
        finally:
            if self._shards is not None:
                self._shards.close()
            self.link.transport.close()
            run_bounded([self.link.chief.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def check_open(self) -> None:
        """Raises RuntimeError once it is left, and in a forked child."""
        if self._is_closed:
            raise RuntimeError(f"{self._what} is closed; open a new one with {self._renewal}")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"{self._what} belongs to process {self._process_id}; a fork must connect anew")

    # -- the chief's side of the core

    async def ask(self, request: Request[Answer], *, what: str, wait: Deadline | None = None, takes_place: bool = False) -> Answer:
        """Returns the chief's answer; asks again while it cannot be reached, for the link's timeout or until the end of `wait`."""
        if takes_place:
            log.info("%s tells the chief %s", self.participant.name, what)
        timeout_s = None if wait is None else wait.left_s()
        return self.link.ask(request, what=what, timeout_s=timeout_s, before=None if takes_place else self._await_renewal)

    async def register(self, known: Registration, held: tuple[int, ...]) -> Registration:
        """Registers again."""
        former, found = known.participant, self.link.register_again(known.participant, held=held)
        if found.participant == former and found.chief_incarnation != known.chief_incarnation:
            log.info("%s registered again epoch=%d chief=%d", former.name, former.era.epoch, found.chief_incarnation)
        return found

    async def beat(self, participant: Participant) -> End:
        """Renews the lease in one attempt, in a thread that no other one waits for."""
        # Each name once, however many servers there are.
        return self.link.beat(participant, transports=tuple(sorted({*self.transports})), traffic=self.traffic.report())

    async def lease(self, request: LeaseRangesRequest, wait: Deadline) -> LeaseReply:
        """Leases ranges of the training data, or takes what was leased ahead."""
        begun, self._lease = self._lease, None
        if begun is None or (begun[0].participant, begun[0].data, begun[0].request_id) != (
            request.participant,
            request.data,
            request.request_id,
        ):
            return self._ranges(request, timeout_s=wait.left_s())
        job = begun[1]
        job.wait()
        if job.error is not None:
            raise job.error
        reply: LeaseReply = job.result
        return reply

    def lease_ahead(self, request: LeaseRangesRequest) -> None:
        """Leases ranges in another thread, unless it does already."""
        if self._lease is None and not self.link.transport.is_in_process:
            if self._lane is None:
                self._lane = Lane(f"lockstep-{request.participant.index}-data")
            self._lease = request, self._lane.submit(lambda: self._ranges(request, timeout_s=None))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Returns one thread's turn to take the place again."""
        with self._turn:
            yield

    async def await_turn(self) -> None:
        """Blocks while another thread takes the place again."""
        self._await_renewal()

    def moved(self) -> None:
        """Ends calls at servers that are still under way in the name of a former identity."""
        shards = self._shards
        if shards is not None and shards.participant is not self.participant:
            shards.give_up()

    def begin_wait(self, what: str, timeout_s: float | None) -> Wait:
        """Begins a wait whose reasons are logged."""
        return Wait(what, timeout_s)

    async def pause(self, wait: Deadline, seconds: float) -> None:
        """Blocks for so long, at most until the deadline of a wait."""
        left_s = wait.left_s()
        time.sleep(seconds if left_s is None else min(seconds, left_s))

    def _await_renewal(self) -> None:
        """Waits for another thread that is taking the place again, so that its messages to the chief come first."""
        if self.place.is_renewing:
            with self._turn:
                pass

    def _ranges(self, request: LeaseRangesRequest, *, timeout_s: float | None) -> LeaseReply:
        return self.link.ask(request, what=f"ranges of {request.data.name!r}", timeout_s=timeout_s, before=self._await_renewal)

    def _hear_shards(self, version: int) -> Registration:
        return run(self.place.hear_shards(version))

    def _deregister(self, failure: str, *, timeout_s: float) -> None:
        request = DeregisterRequest(participant=self.participant, failure=failure)
        try:
            waiting.call(lambda _: self.link.chief.call(request), what="the chief: leave", timeout_s=timeout_s)
        except PsError as error:
            # No caller is left to raise it to, and the lease ends by itself.
            log.debug("%s: deregistration failed cause=%s", self.participant.name, error)

    def _beat(self) -> None:
        """One heartbeat, in its own thread."""
        run(self.place.beat())
