"""How a participant asks its chief, finds it when it is silent, and registers. Knows the chief's seam and time; no session, no model."""

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ps_protocol.errors import Cancelled, DeadlineExceeded, PsError, Unavailable, WorkerIndexTaken
from ps_protocol.process import waiting
from ps_protocol.roles.chief import Chief, End, HeartbeatRequest, Participant, ParticipantKind, RegisterRequest, Registration, WorkerTraffic
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import ShardStatusRequest
from worker_client.cluster.threads import run_bounded
from worker_client.cluster.transport import Transport

log = logging.getLogger("lockstep.worker")

# A chief that is restarted where it was is back sooner, mostly.
SILENCE_S = 1.0
LOOK_WAIT_S = 1.5
CLOSE_WAIT_S = 0.25
# When a caller's time is up, a chief that is there may still answer: with what is waited for.
_LAST_ANSWER_S = 1.0
# Inode of the machine's own process-id namespace, fixed in the kernel (PROC_PID_INIT_INO).
_MACHINE_PID_NAMESPACE = "pid:[4026531836]"


class ChiefLink:
    """The chief, asked wherever it is. Thread-safe.

    `address`: where it is; empty: it never changes. If it is silent, the parameter servers are asked for the address of their chief.
    """

    def __init__(self, chief: Chief, transport: Transport, *, address: str = "", silence_s: float = SILENCE_S) -> None:
        self.transport = transport
        self.address = address
        self.chief = chief
        self._silence_s = silence_s
        self._shard_addresses: Sequence[str] = ()
        self._away_since_s: float | None = None
        self._lock = threading.Lock()

    @property
    def is_silent(self) -> bool:
        """Whether the last call to it failed."""
        return self._away_since_s is not None

    def ask(
        self,
        request: Request[Answer],
        *,
        what: str,
        timeout_s: float | None = None,
        before: Callable[[], None] | None = None,
    ) -> Answer:
        """Returns the chief's answer; asks again while it does not answer, for `timeout_s` or the transport's, whichever is less.

        `before` is called before each attempt. Raises Unavailable; DeadlineExceeded where `timeout_s` was the less.
        """
        subject = f"the chief: {what}"
        is_callers = timeout_s is not None and timeout_s < self.transport.timeout_s
        limit_s = timeout_s if is_callers and timeout_s is not None else self.transport.timeout_s
        # Each attempt is watched by itself: one that fails is spoken of between two of them.
        attempt = partial(self.ask_once, request, what=subject, before=before)
        try:
            return waiting.call(attempt, what=subject, timeout_s=limit_s, stood_still=self.transport.stood_still)
        except Unavailable as error:
            if is_callers:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:.3g} s: {error.message}", facts=error.facts) from None
            raise

    def ask_once(
        self,
        request: Request[Answer],
        left_s: float | None = None,
        *,
        what: str = "",
        before: Callable[[], None] | None = None,
    ) -> Answer:
        """Returns the chief's answer to one attempt, and to another one if the chief has moved meanwhile. Raises what that raises.

        `left_s`: how long an attempt may take, and a little more, if that is less than the chief's calls take anyway.
        """
        if before is not None:
            before()
        limit_s = None if left_s is None else left_s + _LAST_ANSWER_S
        # So long the chief may rightly be silent.
        expected_s = getattr(request, "max_wait_s", 0.0)
        try:
            with self.transport.watching(what, expected_s=expected_s, alarm=self.look_around):
                chief = self.chief
                try:
                    answer = chief.call(request, timeout_s=limit_s)
                except (Unavailable, DeadlineExceeded, Cancelled) as error:
                    if not isinstance(error, Cancelled):
                        self._note_failure(chief)
                    if self.chief is chief:
                        raise
                    if before is not None:
                        before()
                    answer = self.chief.call(request, timeout_s=limit_s)  # at once: a caller that repeats has paused long by now
        except DeadlineExceeded as error:  # one that is stopped, or cut off: it may come back, or another one in its place
            raise Unavailable(error.message, facts=error.facts) from None
        self._away_since_s = None
        return answer

    def beat(self, participant: Participant, *, transports: tuple[str, ...], traffic: WorkerTraffic) -> End:
        """Makes one attempt to renew the lease, and returns whether training has ended; in a thread of its own."""
        return self.ask_once(HeartbeatRequest(participant=participant, transports=transports, traffic=traffic))

    def register(self, *, kind: ParticipantKind, index: int | None, takeover: bool) -> Registration:
        """Takes the caller into the cluster. Raises WorkerIndexTaken, unless the holder was a process of this machine and is gone."""
        try:
            return self._ask_for_place(kind=kind, index=index, takeover=takeover)
        except WorkerIndexTaken as error:
            if not _is_holder_dead(error, host=machine_name()):
                raise
            whose = f"{kind.name.lower()} {error.facts.get('worker', index)}"  # facts are the chief's, and may lack one
            log.warning("taking over from %s: its process on this machine, pid %s, has ended", whose, error.facts["pid"])
        return self._ask_for_place(kind=kind, index=index, takeover=True)

    def register_again(self, former: Participant, *, held: tuple[int, ...] = ()) -> Registration:
        """Takes a participant in again: the same one, unless the epoch has risen or its lease had ended. Raises WorkerIndexTaken.

        `held`: ranges of the training data that it has; they stay its own, if it stays the same one.
        """
        return self._ask_for_place(kind=former.kind, index=former.index, takeover=False, former=former, held=held)

    def know_servers(self, addresses: Sequence[str]) -> None:
        """Sets the parameter servers to ask where the chief is."""
        self._shard_addresses = tuple(addresses)

    def look_around(self) -> None:
        """Has the chief looked for, in another thread: a call to it has not been answered. Whatever hangs there ends if it has moved."""
        if self.address:
            threading.Thread(target=self._search_alone, args=(self.chief,), name="lockstep-search", daemon=True).start()

    def _ask_for_place(
        self,
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
        registration = self.ask(request, what="register")
        registration = replace(registration, shard_addresses=tuple(one or self.address for one in registration.shard_addresses))
        self.know_servers([*registration.shard_addresses, *filter(None, registration.standby_addresses)])
        return registration

    # -- where it is

    def _note_failure(self, chief: Chief) -> None:
        now = time.monotonic()
        since_s = self._away_since_s
        if since_s is None:
            self._away_since_s = now
        elif now - since_s >= self._silence_s:
            self._search_alone(chief)

    def _search_alone(self, chief: Chief) -> None:
        """Searches, unless another thread does already; `chief`: the silent one."""
        if not self.address or not self._lock.acquire(blocking=False):
            return
        try:
            if self.chief is chief:
                self._search()
            self._away_since_s = time.monotonic()  # the next search comes after another while
        finally:
            self._lock.release()

    def _search(self) -> None:
        for address in self._newest():
            try:
                found = self.transport.open_chief(address)
            except PsError as error:
                log.info("a parameter server says that the chief is at %s, but it does not answer: %s", address, error.message)
                continue
            log.warning("the chief has moved from %s to %s", self.address, address)
            lost, self.chief, self.address = self.chief, found, address
            # Ends calls that still hang at the old address; they are then made at the new one.
            run_bounded([lost.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)
            return

    def _newest(self) -> list[str]:
        """Returns where the chief that came last is, as far as servers answer, if that is elsewhere.

        There are several addresses where two chiefs began at once, after everything was lost: one of them has given up, and a server that
        it had may still name it.
        """
        found: list[tuple[int, str]] = []
        looks = [partial(self._look_at, address, found) for address in self._shard_addresses if address != self.address]
        run_bounded(looks, name="lockstep-search", timeout_s=LOOK_WAIT_S)
        return other_addresses(found, than=self.address)

    def _look_at(self, address: str, found: list[tuple[int, str]]) -> None:
        try:
            with closing(self.transport.open_replica(None, address)) as shard:
                status = shard.call(ShardStatusRequest())
        except PsError as error:
            log.debug("asked for the chief, %s does not answer: %s", address, error.message)
            return
        if status.chief_address:
            found.append((status.fence.chief_incarnation, status.chief_address))


def other_addresses(found: Iterable[tuple[int, str]], *, than: str) -> list[str]:
    """Returns the addresses of the highest number that servers have named, without the one that is known; what most name comes first."""
    named = Counter(found)
    highest = max((number for number, _ in named), default=0)
    return [address for (number, address), _ in named.most_common() if number == highest and address != than]


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
