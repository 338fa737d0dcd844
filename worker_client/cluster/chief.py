"""How a participant asks its chief, finds it when it is silent, and registers. Knows the chief's seam and time; no session, no model."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from ps_protocol.errors import Cancelled, DeadlineExceeded, PsError, Unavailable, WorkerIndexTaken
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process import history as history_events
from ps_protocol.process import waiting
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.waiting import SilenceWatch
from ps_protocol.roles.chief import (
    Chief,
    CommitResult,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterRequest,
    Registration,
)
from ps_protocol.roles.shard import PushHeader, PushReply, Shard, ShardStatus
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from worker_client.cluster.threads import run_bounded
from worker_client.model.wire_format import WireFormat

# Where the chief is: it is asked there, and looked for at the servers when it is silent. Knows addresses and time; no session.


log = logging.getLogger("lockstep.worker")

Result = TypeVar("Result")

# A chief that is restarted where it was is back sooner, mostly.
PATIENCE_S = 1.0
LOOK_WAIT_S = 1.5
CLOSE_WAIT_S = 0.25
# No call to a chief takes longer by itself: it waits for 20 s at most, and is then given 10 s.
LONGEST_CALL_S = 30.0


class ChiefSearch:
    """The chief at its present address. Thread-safe.

    `open_chief` returns the chief at an address once it has answered; `look` returns the status of the parameter server at an address.
    Both make one attempt and take some seconds at most. `bounded` returns a chief whose calls take so many seconds at most.
    """

    def __init__(
        self,
        chief: Chief,
        *,
        address: str,
        open_chief: Callable[[str], Chief],
        look: Callable[[str], ShardStatus],
        bounded: Callable[[Chief, float], Chief] = lambda chief, _: chief,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._chief = chief
        self.address = address
        self._open = open_chief
        self._look = look
        self._bounded = bounded
        self._patience_s = patience_s
        self._shard_addresses: Sequence[str] = ()
        self._away_since_s: float | None = None
        self._lock = threading.Lock()

    @property
    def chief(self) -> Chief:
        """The chief where it was found last."""
        return self._chief

    def begin(self, shard_addresses: Sequence[str]) -> None:
        """Takes note of the servers to ask."""
        self._shard_addresses = tuple(shard_addresses)

    def ask(self, question: Callable[[Chief], Result], *, within_s: float | None = None) -> Result:
        """Returns the chief's answer to one attempt, and to another one if the chief has moved meanwhile. Raises what that raises.

        `within_s`: how long an attempt may take, if that is less than the chief's calls take anyway.
        """
        chief = self._chief
        try:
            answer = question(self._at_most(chief, within_s))
        except (Unavailable, DeadlineExceeded, Cancelled) as error:
            if not isinstance(error, Cancelled):
                self._note_failure(chief)
            if self._chief is chief:
                raise
            answer = question(self._at_most(self._chief, within_s))  # at once: whoever repeats calls has made long pauses by now
        self._away_since_s = None
        return answer

    def _at_most(self, chief: Chief, within_s: float | None) -> Chief:
        return chief if within_s is None or within_s >= LONGEST_CALL_S else self._bounded(chief, within_s)

    def look_around(self) -> None:
        """Has the chief looked for, in another thread: a call to it has not been answered. Whatever hangs there ends if it has moved."""
        threading.Thread(target=self._search_alone, args=(self._chief,), name="lockstep-search", daemon=True).start()

    def _search_alone(self, chief: Chief) -> None:
        """Searches, unless another thread is at it; `chief` is the one that was silent."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._chief is chief:
                self._search()
            self._away_since_s = time.monotonic()  # the next search comes after another while
        finally:
            self._lock.release()

    def _note_failure(self, chief: Chief) -> None:
        now = time.monotonic()
        since_s = self._away_since_s
        if since_s is None:
            self._away_since_s = now
        elif now - since_s >= self._patience_s:
            self._search_alone(chief)

    def _search(self) -> None:
        address = self._newest()
        if not address or address == self.address:
            return
        try:
            found = self._open(address)
        except PsError as error:
            log.info("a parameter server says that the chief is at %s, but it does not answer: %s", address, error.message)
            return
        log.warning("the chief has moved from %s to %s", self.address, address)
        lost, self._chief, self.address = self._chief, found, address
        # Ends what still hangs at the old place; those calls are then made at the new one.
        run_bounded([lost.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def _newest(self) -> str:
        """The address of the chief that came last, as far as servers answer; empty: none says."""
        found: list[tuple[int, str]] = []
        looks = [partial(self._look_at, address, found) for address in self._shard_addresses]
        run_bounded(looks, name="lockstep-search", timeout_s=LOOK_WAIT_S)
        return max(found, default=(0, ""))[1]

    def _look_at(self, address: str, found: list[tuple[int, str]]) -> None:
        try:
            status = self._look(address)
        except PsError as error:
            log.debug("asked for the chief, %s does not answer: %s", address, error.message)
            return
        if status.chief_address:
            found.append((status.chief_incarnation, status.chief_address))


# How a participant reaches its cluster, and how it joins it. Knows the chief's seam, the machine's name and process ids; no transport.


# Inode of the machine's own process-id namespace, fixed in the kernel (PROC_PID_INIT_INO).
_MACHINE_PID_NAMESPACE = "pid:[4026531836]"
_UNWATCHED = nullcontext()
# When a caller's time is up, a chief that is there may still answer: with what is waited for.
_LAST_ANSWER_S = 1.0
AS_IS = WireFormat()


class SharingShard(Shard, Protocol):
    """A shard that shares memory with the caller, until that ends."""

    @property
    def is_shared(self) -> bool:
        """Whether it still does."""

    @property
    def unshared(self) -> Shard:
        """The same shard without shared memory."""

    def kept_memory(self) -> Array | None:
        """Returns an arena to write gradients into that is always the same; None once memory is not shared. Raises TooManyPushes."""

    def push_locally(self, header: PushHeader, gradients: Segments) -> PushReply | None:
        """Does what `push_gradients` does if nobody has to be asked for it; else returns None, and has done nothing."""


class MemorySharing(Protocol):
    """How a participant comes to share memory with a shard."""

    def __call__(self, shard: Shard, *, where: str, participant: Participant, layout: Layout, timeout_s: float) -> SharingShard | None:
        """Returns a shard that takes the place of `shard` and shares memory; None if that cannot be. `where` names it in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """The chief, and how to reach a shard by its index and address; `timeout_s` is how long a server that does not answer is waited for.

    `open_shard` returns once the shard has answered; `open_replica`, for one of several processes that hold a shard, makes no call (None:
    `open_shard` does). `is_in_process`: nothing can be cut off or die alone, so no lease need be kept. `watch` speaks for calls that hang;
    None in process. `sharing` None: memory is never shared. `know_layout` tells a shard's client how its variables lie. `wire`: how
    gradients travel. `search` finds a chief that has moved; None: it stays where it is. `access`: what clients prove with who they are.
    `history`: where contributions are noted, for `lockstep verify`; None: nowhere.
    """

    chief: Chief
    open_shard: Callable[[int, str], Shard]
    open_replica: Callable[[int, str], Shard] | None = None
    is_in_process: bool
    timeout_s: float
    watch: SilenceWatch | None = None
    sharing: MemorySharing | None = None
    know_layout: Callable[[Shard, Layout], None] | None = None
    wire: WireFormat = AS_IS
    access: Access = DEFAULT_ACCESS
    search: ChiefSearch | None = None
    history: HistoryWriter | None = None

    @property
    def present_chief(self) -> Chief:
        """The chief where it is now, as far as is known."""
        return self.chief if self.search is None else self.search.chief

    def ask_once(self, question: Callable[[Chief], Result], *, within_s: float | None = None) -> Result:
        """Returns the chief's answer to one attempt, which takes `within_s` seconds at most."""
        return question(self.chief) if self.search is None else self.search.ask(question, within_s=within_s)

    def beat(self, participant: Participant) -> bool:
        """Makes one attempt to renew the lease, and returns whether training is finished; in a thread that nobody waits for."""
        with self.watching("", alarm=self._look_around):
            return self.ask_once(lambda chief: chief.heartbeat(participant))

    def ask(self, question: Callable[[Chief], Result], *, what: str, timeout_s: float | None = None, expected_s: float = 0.0) -> Result:
        """Returns the chief's answer; asks again while it does not answer, for `timeout_s` or the link's timeout, whichever is less.

        `expected_s` is how long the chief may rightly be silent. Raises Unavailable; DeadlineExceeded where `timeout_s` was the less.
        """
        is_callers = timeout_s is not None and timeout_s < self.timeout_s
        limit_s, subject = timeout_s if is_callers and timeout_s is not None else self.timeout_s, f"the chief: {what}"

        def attempt(left_s: float) -> Result:
            try:
                # Each by itself: one that fails is spoken of between two of them.
                with self.watching(subject, expected_s=expected_s, alarm=self._look_around):
                    return self.ask_once(question, within_s=left_s + _LAST_ANSWER_S)
            except DeadlineExceeded as error:  # one that is stopped, or cut off: it may come back, or another one in its place
                raise Unavailable(error.message, facts=error.facts) from None

        try:
            return waiting.call(attempt, what=subject, timeout_s=limit_s)
        except Unavailable as error:
            if is_callers:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:.3g} s: {error.message}", facts=error.facts) from None
            raise

    def _look_around(self) -> None:
        if self.search is not None:
            self.search.look_around()

    def note_contribution(self, header: PushHeader, gradients: Segments, *, shard: int) -> None:
        """Writes into the history, if there is one, what a shard is about to be sent."""
        if self.history is not None:
            history_events.note_contribution(self.history, header, gradients, shard=shard)

    def note_outcome(self, commit: PushCommit, result: CommitResult, *, epoch: int) -> None:
        """Writes into the history, if there is one, what the chief has said of a contribution."""
        if self.history is not None:
            outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE and result.first_outcome else result.outcome
            history_events.note_outcome(
                self.history, commit.push_id, epoch=epoch, outcome=outcome.name, step=commit.step, applied_step=result.applied_step
            )

    def watching(self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None) -> AbstractContextManager[None]:
        """Has the enclosed call spoken for while it hangs; `alarm` as `SilenceWatch.expecting` has it."""
        return _UNWATCHED if self.watch is None else self.watch.expecting(what, expected_s=expected_s, alarm=alarm)


def register(link: ClusterLink, *, kind: ParticipantKind, index: int | None, takeover: bool) -> Registration:
    """Takes the caller into the cluster. Raises WorkerIndexTaken, but not for a holder that was a process of this machine and is gone."""
    try:
        return _ask_for_place(link, kind=kind, index=index, takeover=takeover)
    except WorkerIndexTaken as error:
        if not _is_holder_dead(error, host=machine_name()):
            raise
        log.warning("taking over from a process that is gone: %s", error)
    return _ask_for_place(link, kind=kind, index=index, takeover=True)


def register_again(link: ClusterLink, former: Participant, *, held: tuple[int, ...] = ()) -> Registration:
    """Takes a participant in again: the same one, unless the epoch has risen or its lease had ended. Raises WorkerIndexTaken.

    `held`: ranges of the training data that it has; they stay its own, if it stays the same one.
    """
    return _ask_for_place(link, kind=former.kind, index=former.index, takeover=False, former=former, held=held)


def _ask_for_place(
    link: ClusterLink,
    *,
    kind: ParticipantKind,
    index: int | None,
    takeover: bool,
    former: Participant | None = None,
    held: tuple[int, ...] = (),
) -> Registration:
    # The number is the same in repetitions, so that the chief gives one place for all of them.
    request = RegisterRequest(
        kind=kind,
        index=index,
        host=machine_name(),
        pid=os.getpid(),
        request_id=secrets.randbits(63),
        takeover=takeover,
        former=former,
        held=held,
    )
    registration = link.ask(lambda chief: chief.register_worker(request), what="register")
    if link.search is not None:
        link.search.begin([*registration.shard_addresses, *filter(None, registration.standby_addresses)])
    return registration


def machine_name() -> str:
    """Returns a name for the machine as far as process ids go: containers that share a host name but not their process ids differ."""
    host = socket.gethostname()
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return host
    return host if namespace == _MACHINE_PID_NAMESPACE else f"{host}/{''.join(filter(str.isdigit, namespace))}"


def _is_holder_dead(error: WorkerIndexTaken, *, host: str) -> bool:
    pid = error.facts.get("pid", "")
    return error.facts.get("host") == host and pid.isdigit() and int(pid) > 0 and _is_process_gone(int(pid))


def _is_process_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    try:
        # After the command's closing parenthesis comes the state; a zombie has ended and only awaits its parent.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return False
