"""Looks at the cluster once a second and remembers what it saw. Owns its threads and its lock; changes nothing, and shows nothing.

A look takes the chief's lock for as long as a status does. No step waits for anything else here.
"""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from chief.page.cost import CostCount
from chief.page.curves import Curves, Point
from chief.page.event_log import Entry
from chief.page.look import Look
from chief.page.story import Story
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind, WorkerTraffic
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import KeepStoryRequest, MetricCell, ReadMetricsRequest
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.shard import GrpcShard

log = logging.getLogger("lockstep.page")

NUM_STEPS = 200
_INTERVAL_S = 1.0
# Speeds are those of so many looks.
_NUM_LOOKS = 10
# Metrics are read less often where that takes long: this part of the time at most.
_MOST_OF_TIME = 1 / 20
_MAX_INTERVAL_S = 60.0
_NOTHING = WorkerTraffic()


class StatusSource(Protocol):
    """The chief, as the page sees it. For all threads."""

    def status(self, *, max_ledger_entries: int) -> ClusterStatus:
        """Reports the cluster."""


@light_dataclass(frozen=True, slots=True)
class _Counts:
    """Counters at one moment: the step, and by worker its contributions that counted and the bytes that it has read."""

    at: float
    step: int
    accepted: Mapping[int, int]
    traffic: Mapping[int, WorkerTraffic]


class Recorder:
    """Looks and remembers from `start` to `stop`. Thread-safe.

    `read_metrics` returns what workers have reported; it may wait, and may raise PsError.
    """

    def __init__(
        self,
        cluster: StatusSource,
        *,
        read_metrics: Callable[[ClusterStatus], Sequence[MetricCell]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster, self._read_metrics, self._clock, self._wall = cluster, read_metrics, clock, wall
        self._lock = threading.Lock()
        self._curves = Curves()
        self._cost = CostCount()
        self._looks: deque[_Counts] = deque(maxlen=_NUM_LOOKS)
        self._last: Look | None = None
        # The metrics that workers have reported, as read last.
        self.cells: Sequence[MetricCell] = ()
        self._ending = threading.Event()

    def start(self) -> None:
        """Begins to look."""
        for name, run in (("page-look", self._look_again_and_again), ("page-metrics", self.keep_reading_metrics)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Ends; does not wait for an answer that is under way."""
        self._ending.set()

    def look(self, *, max_age_s: float = 0.0) -> Look:
        """Returns a look that is no older."""
        with self._lock:
            last, now = self._last, self._clock()
            if last is not None and now - last.at <= max_age_s:
                return last
            self._last = self._look_locked(last, now)
            return self._last

    def speed(self, *, after: float) -> list[Point]:
        """Returns the steps a second after a moment, by the time of day."""
        with self._lock:
            return self._curves.speed.points(after=after)

    def metrics(self, *, after: float) -> tuple[dict[str, Sequence[Point]], int]:
        """Returns the metrics after a moment, and how many are left out since there are too many."""
        with self._lock:
            return self._curves.metrics(after=after), self._curves.num_left_out

    def story(self, events: Sequence[Entry]) -> Story:
        """Returns what the next chief's page needs to show the past as this one does, with these events."""
        status = self.look(max_age_s=_INTERVAL_S).status
        with self._lock:
            return Story(events=events, counts=status.counts, speed=self._curves.speed.sums(), metrics=self._curves.sums_of_metrics)

    def join(self, story: Story) -> None:
        """Puts the curves of the chiefs before this one before its own."""
        with self._lock:
            self._last = None
            self._curves.join(story.speed, story.metrics)

    def read_metrics_now(self) -> None:
        """Reads the metrics, as far as there are any. Raises PsError."""
        status = self.look(max_age_s=_INTERVAL_S).status
        if status.state is ClusterState.TRAINING:
            cells = self._read_metrics(status)
            with self._lock:
                self.cells = cells
                self._curves.add_metrics(cells, step=status.global_step, at=self._wall())

    def _look_locked(self, last: Look | None, now: float) -> Look:
        status = self._cluster.status(max_ledger_entries=NUM_STEPS)
        wall = self._wall()
        workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
        accepted = {one.index: one.num_accepted for one in workers}
        traffic = {one.index: one.traffic for one in workers if one.traffic is not None}
        # After a wait the speed is that of the steps since, and not of the time that was waited.
        if self._looks and (
            status.global_step < self._looks[-1].step or (last is not None and last.status.waiting_for and not status.waiting_for)
        ):
            self._looks.clear()
        if not self._looks or now - self._looks[-1].at >= _INTERVAL_S / 2:
            self._looks.append(_Counts(now, status.global_step, accepted, traffic))
            if status.state is ClusterState.TRAINING:
                self._curves.add_step(status.global_step, at=wall)
        then = self._looks[0]
        before, passed_s = then.accepted, now - then.at
        is_known = passed_s >= _INTERVAL_S / 2
        rates = {index: (number - before[index]) / passed_s for index, number in accepted.items() if index in before} if is_known else {}
        return Look(
            number=last.number + 1 if last else 1,
            at=now,
            wall=wall,
            status=status,
            cost=self._cost.add(status, at=now),
            steps_per_s=(status.global_step - then.step) / passed_s if is_known else None,
            contributions_per_s=rates,
            read_s={index: _read_s(then.traffic.get(index, _NOTHING), one) for index, one in traffic.items() if one.num_reads},
            num_last=Counter(entry.last_worker for entry in status.ledger),
        )

    def _look_again_and_again(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            try:
                self.look(max_age_s=_INTERVAL_S / 2)
            except Exception:
                log.exception("the page cannot look at the cluster; it shows what it saw before")
                return

    def keep_reading_metrics(self) -> None:
        """Reads the metrics again and again, until `stop`."""
        pause_s = _INTERVAL_S
        while not self._ending.wait(pause_s):
            began = self._clock()
            try:
                self.read_metrics_now()
            except PsError as error:
                # Nothing that a reader of the page could do about, and the cluster says itself what is wrong with it.
                log.debug("cannot read the metrics cause=%s", error.message)
            except Exception:
                log.exception("the page cannot read metrics any more")
                return
            pause_s = min(_MAX_INTERVAL_S, max(_INTERVAL_S, (self._clock() - began) / _MOST_OF_TIME))


def _read_s(before: WorkerTraffic, now: WorkerTraffic) -> float:
    """Returns how long a read took in the mean, between two reports; if nothing was read since, or the worker began again, of all."""
    if now.num_reads <= before.num_reads or now.reading_s < before.reading_s:
        before = _NOTHING
    return (now.reading_s - before.reading_s) / (now.num_reads - before.num_reads)


class FirstServer:
    """The first parameter server, which keeps what workers have reported, and the past of the page. For one thread."""

    def __init__(self, access: Access, *, cluster: str) -> None:
        self._access, self._cluster = access, cluster
        self._shard: GrpcShard | None = None

    def read_metrics(self, status: ClusterStatus) -> Sequence[MetricCell]:
        """Returns the metrics. Raises PsError."""
        return self._ask(status, ReadMetricsRequest(epoch=status.epoch))

    def exchange_story(self, status: ClusterStatus, story: bytes) -> bytes:
        """Has the past of a page kept, unless it is empty, and returns what was kept before. Raises PsError."""
        return self._ask(status, KeepStoryRequest(story=story))

    def _ask(self, status: ClusterStatus, request: Request[Answer]) -> Answer:
        first = status.shards[0]
        if self._shard is None or self._shard.address != first.address:
            self.close()
            self._shard = GrpcShard(first.address, index=0, cluster=self._cluster, access=self._access)
        try:
            return self._shard.call(request)
        except PsError:
            # Another process may be there next time.
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        shard, self._shard = self._shard, None
        if shard is not None:
            with contextlib.suppress(PsError):
                shard.close()
