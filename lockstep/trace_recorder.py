"""Computing times of a running cluster, by what its chief's status says again and again. Knows statuses; no chief, file or clock.

The chief doesn't know when a worker computes. But it counts each worker's contributions, and says when the open step was opened: the
workers that had given theirs began then. So a time runs from there to the status that first counts the contribution, and has reading and
pushing in it. What can't be told for sure is left out.
"""

from dataclasses import dataclass

from lockstep.trace import TraceRow
from ps_protocol.chief import ClusterStatus, ParticipantKind, ParticipantStatus
from ps_protocol.errors import InvalidSpec


@dataclass(slots=True, kw_only=True)
class _Seen:
    """One incarnation of a worker: its counts, and since when it computes from the variables of `step` (None: unknown, or it waits)."""

    incarnation: int
    num_contributions: int
    num_stale: int
    began_at: float | None = None
    step: int = 0
    waits_in: int | None = None  # step that it has contributed to


class TraceRecorder:
    """Is shown statuses in order of time, and says what they reveal. Only under the policy sync with strict tokens."""

    def __init__(self) -> None:
        self._workers: dict[int, _Seen] = {}
        self._last_at = 0.0
        self._last_step = 0

    def observe(self, status: ClusterStatus, *, at: float) -> list[TraceRow]:
        """Returns the computations that have ended since the status before; `at` is any clock, in seconds.

        Raises InvalidSpec where workers don't begin when a step is opened.
        """
        _check(status)
        rows = []
        for one in status.participants:
            if one.kind is not ParticipantKind.WORKER or one.state != "live":
                continue
            seen = self._workers.get(one.index)
            if seen is None or seen.incarnation != one.incarnation:
                self._workers[one.index] = _first_seen(one, status)
                continue
            if (row := self._see(seen, one, status, at)) is not None:
                rows.append(row)
            if seen.waits_in is not None and status.global_step > seen.waits_in:
                # It was let go when the step after its own was opened: the time is known if that is still the open one.
                seen.began_at = at - status.step_age_s if status.global_step == seen.waits_in + 1 else None
                seen.step, seen.waits_in = status.global_step, None
        self._last_at, self._last_step = at, status.global_step
        return rows

    def _see(self, seen: _Seen, one: ParticipantStatus, status: ClusterStatus, at: float) -> TraceRow | None:
        is_stale, num_new = one.num_stale > seen.num_stale, _count(one) - seen.num_contributions
        if not num_new:
            return None
        began_at, ended_at, step = seen.began_at, (self._last_at + at) / 2, seen.step
        seen.num_contributions, seen.num_stale, seen.began_at = _count(one), one.num_stale, None
        seen.waits_in = status.global_step if one.is_waiting else self._last_step
        if num_new > 1:
            seen.waits_in = status.global_step if one.is_waiting else None
            return None
        if is_stale and not one.is_waiting:
            # A stale contribution is answered with a token at once.
            seen.began_at, seen.step, seen.waits_in = ended_at, status.global_step, None
        if began_at is None or ended_at <= began_at:
            return None
        return TraceRow(worker=one.index, step=step, seconds=ended_at - began_at)


def _check(status: ClusterStatus) -> None:
    if status.policy != "sync":
        raise InvalidSpec(
            f"the cluster's policy is {status.policy}: times can be recorded under sync only; let the program write them itself"
        )
    if status.total_num_replicas and status.replicas_to_aggregate > status.total_num_replicas:
        needs = f"{status.replicas_to_aggregate} contributions of {status.total_num_replicas} workers"
        raise InvalidSpec(f"a step needs {needs}: when each begins can't be told; let the program write the times itself")


def _first_seen(one: ParticipantStatus, status: ClusterStatus) -> _Seen:
    waits_in = status.global_step if one.is_waiting else None
    return _Seen(incarnation=one.incarnation, num_contributions=_count(one), num_stale=one.num_stale, waits_in=waits_in)


def _count(one: ParticipantStatus) -> int:
    return one.num_accepted + one.num_stale + one.num_late
