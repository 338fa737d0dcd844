"""Where the shards of a cluster with standbys are at present, as the chief says. Knows registrations and time; no shard, no call to one."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ps_protocol.chief import Registration
from ps_protocol.errors import PsError

log = logging.getLogger("lockstep.worker")

# A call that has not ended after this may be one to a server that is not counted on any more.
_SLOW_S = 0.7
_LOOK_INTERVAL_S = 0.3
# The chief is not asked more often than this about what a server has refused.
_PAUSE_S = 0.2


class ShardPlaces:
    """The addresses of all shards. Thread-safe. `ask_again` registers again, unless that has been done since a version of the addresses.

    `on_change` is called, by whichever thread, when other processes hold the shards than before. While a call is under way that takes
    long, a thread of its own asks the chief now and then: whoever has called could not.
    """

    def __init__(self, registration: Registration, *, ask_again: Callable[[int], Registration]) -> None:
        self._registration = registration
        self._ask_again = ask_again
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._asked_at = 0.0
        self._calls: dict[int, float] = {}  # those under way, by their number, and when they began
        self._num_calls = 0
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def version(self) -> int:
        """Grows with each change."""
        return self._registration.shards_version

    def addresses(self, index: int) -> tuple[str, ...]:
        """Returns where a shard is: first where it is asked, then its standby, if one goes along."""
        registration = self._registration
        standbys = registration.standby_addresses
        return (registration.shard_addresses[index], *([standbys[index]] if index < len(standbys) and standbys[index] else []))

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a listener told of changes."""
        self._listeners.append(on_change)

    def hear(self, version: int, *, is_urgent: bool = False) -> bool:
        """Asks the chief, unless that has been done since `version`, or just now; returns whether it is another version by now.

        Blocks while the chief cannot be reached. Raises what registering raises.
        """
        now = time.monotonic()
        if self.version == version and (is_urgent or now - self._asked_at >= _PAUSE_S):
            self._asked_at = now
            found = self._ask_again(version)
            with self._lock:
                has_changed = found.shards_version != self.version
                self._registration = found
            if has_changed:
                for listener in self._listeners:
                    listener()
        return self.version != version

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Has the enclosed call watched."""
        with self._lock:
            number = self._num_calls = self._num_calls + 1
            self._calls[number] = time.monotonic()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="lockstep-shards", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            with self._lock:
                is_slow = any(now - began >= _SLOW_S for began in self._calls.values())
            if is_slow and now - self._asked_at >= _SLOW_S:
                try:
                    self.hear(self.version, is_urgent=True)
                except PsError as error:
                    log.debug("the chief was not heard of who holds the shards: %s", error.message)
