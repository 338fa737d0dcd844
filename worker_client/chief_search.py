"""Where the chief is: it is asked there, and looked for at the servers when it is silent. Knows addresses and time; no session."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ps_protocol.chief import Chief
from ps_protocol.errors import Cancelled, DeadlineExceeded, PsError, Unavailable
from ps_protocol.shard import ShardStatus
from worker_client.bounded import run_bounded

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
