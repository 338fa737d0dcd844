"""Has the past that a page shows kept at the first parameter server, for the next chief's page. Owns its thread; no step waits for it."""

import logging
import math
import threading
import time
from collections.abc import Callable

from chief.page.event_log import EventLog
from chief.page.recorder import FirstServer, Recorder
from chief.page.story import Story, pack, unpack
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterState, ContributionCounts

log = logging.getLogger("lockstep.page")

_INTERVAL_S = 1.0
# Besides with each event.
_KEEP_EVERY_S = 10.0
# How long the end of the page may wait for the last time.
_LAST_S = 0.5
_WITHOUT_SERVERS = (ClusterState.CONNECTING, ClusterState.FINISHED, ClusterState.FAILED)


class StoryKeeper:
    """Keeps events, counters and curves from `start` to `stop`, and first gets those of the chief before. For one thread."""

    def __init__(
        self,
        recorder: Recorder,
        event_log: EventLog,
        server: FirstServer,
        *,
        join_counts: Callable[[ContributionCounts], None],
    ) -> None:
        self._join_counts = join_counts
        self._recorder, self._event_log, self._server = recorder, event_log, server
        # Whether the chief before has been asked for, and has left something.
        self._has_asked = self.has_joined = False
        # How many events were kept, and when.
        self._num_kept, self._kept_at = -1, -math.inf
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_again_and_again, name="page-story", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, if possible with the latest kept."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_LAST_S)
        self._server.close()

    def keep(self) -> None:
        """Keeps the past if there is an event, or some time has passed. Raises PsError."""
        status = self._recorder.look(max_age_s=_INTERVAL_S).status
        if status.state in _WITHOUT_SERVERS:
            return
        if not self._has_asked:
            self._join(unpack(self._server.exchange_story(status, b"")))
        events, now = self._event_log.since(0), time.monotonic()
        newest = events[-1].number if events else 0
        if newest != self._num_kept or now - self._kept_at >= _KEEP_EVERY_S:
            self._server.exchange_story(status, pack(self._recorder.story(events)))
            self._num_kept, self._kept_at = newest, now

    def _join(self, story: Story) -> None:
        self._join_counts(story.counts)
        self._recorder.join(story)
        self._event_log.join(story.events)
        self._has_asked, self.has_joined = True, story != Story()

    def _keep_again_and_again(self) -> None:
        is_ending = False
        while not is_ending:
            is_ending = self._ending.wait(_INTERVAL_S)
            try:
                self.keep()
            except PsError as error:
                log.debug("cannot keep the past of the page cause=%s", error.message)
            except Exception:
                log.exception("the past of the page is not kept any more")
                return
