"""Makes a trace in Chrome's format of a cluster's steps, from reports of its chief. Pure: knows reports and times; no call, no file.

Tracks: the chief's has the steps and their phases; each worker's its contributions; each parameter server's the applies. All times are the
chief's: a worker's contribution begins as early as it can, and ends when the chief counts it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ps_protocol.roles.chief import ClusterStatus, LedgerEntry, ParticipantKind, ParticipantStatus

CHIEF, WORKERS, SERVERS = 1, 2, 3
_PROCESSES = {CHIEF: "chief", WORKERS: "workers", SERVERS: "parameter servers"}
# The most workers, and the most servers, that get a track; with more, a viewer becomes slow.
MAX_TRACKS = 1_000

Event = dict[str, Any]


class Timeline:
    """Collects a cluster's reports in the order in which they were made."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tracks: set[tuple[int, int]] = set()
        # The newest step in the trace, and when it ended, which is when the next one began.
        self._last: tuple[int, float] | None = None
        self._free_at: dict[int, float] = {}
        self._seen: ClusterStatus | None = None
        self.num_steps = self.num_missed = 0

    @property
    def is_empty(self) -> bool:
        """Whether no step has been seen."""
        return not self.num_steps

    def add(self, status: ClusterStatus, *, at_s: float) -> None:
        """Adds the events that this report has and earlier ones did not. The first report only marks the beginning."""
        self._note_changes(status, at_s)
        newest_end = at_s - status.step_age_s
        if self._last is None:
            self._last = status.global_step - 1, newest_end
            return
        if status.global_step <= self._last[0]:  # the cluster has rolled back
            self._last = status.global_step - 1, newest_end
            return
        new = sorted((entry for entry in status.ledger if entry.step > self._last[0]), key=lambda entry: entry.step)
        if not new:
            return
        if new[0].step == self._last[0] + 1:
            begin = self._last[1]
        else:
            self.num_missed += new[0].step - self._last[0] - 1
            begin = newest_end - sum(entry.duration_s for entry in new)
        servers = [shard.index for shard in status.shards[:MAX_TRACKS]]
        for entry in new:
            self._add_step(entry, begin, has_common_steps=status.policy.has_common_steps, servers=servers)
            begin += entry.duration_s
        self._last = new[-1].step, begin
        for shard in status.shards[:MAX_TRACKS]:
            if shard.report is not None:
                self._counter(SERVERS, f"ps {shard.index} allocated bytes", at_s, shard.report.allocated_bytes)

    def trace(self, *, cluster: str) -> dict[str, Any]:
        """Returns the collected events, as values for JSON."""
        names = [_named("process_name", pid, 0, name) for pid, name in _PROCESSES.items()]
        for pid, tid in sorted(self._tracks):
            words = {CHIEF: "steps", WORKERS: f"worker {tid - 1}", SERVERS: f"ps {tid - 1}"}[pid]
            names.append(_named("thread_name", pid, tid, words))
            names.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        start = min((event["ts"] for event in self._events), default=0)
        events = [{**event, "ts": event["ts"] - start} for event in self._events]
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"cluster": cluster, "made by": "lockstep trace"}}

    def _add_step(self, entry: LedgerEntry, begin: float, *, has_common_steps: bool, servers: Sequence[int]) -> None:
        self.num_steps += 1
        end, completed = begin + entry.duration_s, begin + entry.duration_s - entry.apply_duration_s
        first = max(begin, completed - entry.wait_duration_s)
        about = {
            "step": entry.step,
            "contributors": " ".join(str(push.worker) for push in entry.contributors),
            "last worker": entry.last_worker,
            "stale": entry.num_stale,
            "late": entry.num_late,
        }
        self._span(CHIEF, 1, f"step {entry.step}", begin, end, about)
        self._span(CHIEF, 1, "reading and computing", begin, first)
        self._span(CHIEF, 1, f"waiting for worker {entry.last_worker}", first, completed)
        self._span(CHIEF, 1, "apply", completed, end)
        for server in servers:
            self._span(SERVERS, server + 1, f"apply {entry.step}", completed, end, {"step": entry.step})
        self._add_contributions(entry, begin, end, has_common_steps=has_common_steps)

    def _add_contributions(self, entry: LedgerEntry, begin: float, end: float, *, has_common_steps: bool) -> None:
        arrived: dict[int, float] = {}
        weights = dict(zip(entry.contributors, entry.weights, strict=False))
        for push, arrival_us in zip(entry.contributors, entry.arrivals_us, strict=False):
            worker, at = push.worker, begin + arrival_us / 1e6
            if worker >= MAX_TRACKS:
                continue
            # A worker that makes several contributions to a step begins the next one at once.
            since = max(begin if has_common_steps else 0.0, arrived.get(worker, self._free_at.get(worker, begin)))
            about = {"step": entry.step, "sequence": push.sequence, "weight": weights.get(push, 1.0)}
            self._span(WORKERS, worker + 1, f"contribution to {entry.step}", min(since, at), at, about)
            arrived[worker] = self._free_at[worker] = at
        if has_common_steps:
            for worker, at in arrived.items():
                self._span(WORKERS, worker + 1, "waiting for the step", at, end, {"step": entry.step})
                self._free_at[worker] = end

    def _note_changes(self, status: ClusterStatus, at_s: float) -> None:
        seen, self._seen = self._seen, status
        if seen is None:
            return
        if status.epoch != seen.epoch:
            self._instant(f"epoch {status.epoch}: {status.last_rollback or 'a new one'}", at_s)
        if status.state is not seen.state:
            self._instant(status.state.name.lower(), at_s)
        if (tag := _tag(status)) != _tag(seen):
            self._instant(f"checkpoint {tag}", at_s)
        known = _workers(seen)
        for index, one in _workers(status).items():
            before = known.get(index)
            if before is None or before.incarnation != one.incarnation:
                self._instant(f"worker {index} joined", at_s)
            elif before.state != one.state:
                self._instant(f"worker {index}: {one.state}", at_s)

    def _span(self, pid: int, tid: int, name: str, begin: float, end: float, about: Mapping[str, object] | None = None) -> None:
        if end > begin:
            self._tracks.add((pid, tid))
            event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(begin), "dur": _us(end) - _us(begin)}
            self._events.append({**event, "cat": _PROCESSES[pid], "args": dict(about or {})})

    def _instant(self, name: str, at_s: float) -> None:
        self._tracks.add((CHIEF, 1))
        self._events.append({"ph": "i", "name": name, "pid": CHIEF, "tid": 1, "ts": _us(at_s), "s": "g", "cat": "events"})

    def _counter(self, pid: int, name: str, at_s: float, value: float) -> None:
        self._events.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at_s), "args": {"bytes": value}})


def _tag(status: ClusterStatus) -> str:
    return "" if status.checkpoint is None else status.checkpoint.tag


def _workers(status: ClusterStatus) -> dict[int, ParticipantStatus]:
    return {one.index: one for one in status.participants if one.kind is ParticipantKind.WORKER}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> int:
    """Rounds to whole microseconds, so that a span does not overlap the next one."""
    return round(seconds * 1e6)
