"""The record of the latest steps: their contributions, their durations, and counters. Knows no worker's state; `now` is an argument."""

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import field

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import LedgerEntry, PushOutcome, StepTotals
from ps_protocol.roles.contribution import PushId

# The usual duration of a step is that of so many.
_NUM_USUAL = 50


@light_dataclass(slots=True, kw_only=True)
class _Record:
    step: int
    opened_at: float
    # Of each contribution that counts, its worker and when it came: 16 bytes for each of perhaps a thousand workers.
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    completed_at: float = 0.0
    applied_at: float = 0.0
    last_worker: int = 0
    contributors: tuple[PushId, ...] = ()
    weights: tuple[float, ...] = ()
    num_stale: int = 0
    num_late: int = 0
    # As it was reported last. Once the step is applied, only the two counts still change.
    reported: LedgerEntry | None = None


class Ledger:
    """The open step and the `size` steps before it."""

    def __init__(self, *, size: int, now: float) -> None:
        self.num_accepted = 0
        self.num_stale = 0
        self.num_late = 0
        self.max_staleness = 0  # of what was accepted
        self._num_steps, self._duration_s, self._apply_s = 0, 0.0, 0.0
        self._size = size
        self._open = _Record(step=0, opened_at=now)
        self._applied: dict[int, _Record] = {}

    def open_step(self, step: int, *, now: float) -> None:
        """Begins the record of a step."""
        self._open = _Record(step=step, opened_at=now)

    def step_age_s(self, now: float) -> float:
        """Time that the open step has taken so far."""
        return max(0.0, now - self._open.opened_at)

    def count(self, outcome: PushOutcome, *, worker: int, step: int, staleness: int = 0, now: float) -> None:
        """Counts a contribution of a worker that was computed from the variables of `step`."""
        record = self._open if step == self._open.step else self._applied.get(step)
        if outcome is PushOutcome.ACCEPTED:
            self._open.arrivals.append(worker)
            self._open.arrivals.append(now)
            self.num_accepted += 1
            self.max_staleness = max(self.max_staleness, staleness)
        elif outcome is PushOutcome.STALE:
            self.num_stale += 1
            if record is not None:
                record.num_stale += 1
        elif outcome is PushOutcome.LATE:
            self.num_late += 1
            if record is not None:
                record.num_late += 1

    def complete_step(self, contributors: tuple[PushId, ...], *, last_worker: int, now: float, weights: tuple[float, ...] = ()) -> None:
        """The contributors of the open step are fixed, with their `weights` or all with the same; `last_worker` completed it."""
        record = self._open
        record.contributors, record.weights, record.last_worker, record.completed_at = contributors, weights, last_worker, now

    def close_step(self, *, now: float) -> None:
        """The open step is applied everywhere; the next one is open from now on."""
        self._open.applied_at = now
        self._num_steps += 1
        self._duration_s += now - self._open.opened_at
        self._apply_s += now - self._open.completed_at
        self._applied[self._open.step] = self._open
        if len(self._applied) > self._size:
            del self._applied[next(iter(self._applied))]
        self.open_step(self._open.step + 1, now=now)

    @property
    def usual_s(self) -> float | None:
        """How long the latest steps took, in the median; None before some have been applied."""
        latest = [one.applied_at - one.opened_at for one in itertools.islice(reversed(self._applied.values()), _NUM_USUAL)]
        return sorted(latest)[len(latest) // 2] if latest else None

    @property
    def totals(self) -> StepTotals:
        """All steps so far, together."""
        return StepTotals(num_steps=self._num_steps, duration_s=self._duration_s, apply_s=self._apply_s)

    def roll_back(self, step: int, *, now: float) -> None:
        """Forgets this step and all after it, which are done again."""
        self._applied = {number: record for number, record in self._applied.items() if number < step}
        self.open_step(step, now=now)

    def contributors(self, limit: int) -> Iterator[tuple[int, tuple[PushId, ...]]]:
        """The latest steps with their contributions, newest first, until `limit` contributions have been named."""
        for record in reversed(self._applied.values()):
            if limit <= 0:
                return
            limit -= len(record.contributors)
            yield record.step, record.contributors

    def entries(self, limit: int) -> tuple[LedgerEntry, ...]:
        """Returns the latest `limit` steps, newest first."""
        return tuple(_reported(record) for record in itertools.islice(reversed(self._applied.values()), max(0, limit)))


def _reported(record: _Record) -> LedgerEntry:
    """Returns the record of an applied step; made once, since the page asks for hundreds of them each second."""
    known = record.reported
    if known is None or (known.num_stale, known.num_late) != (record.num_stale, record.num_late):
        known = record.reported = _entry(record)
    return known


def _entry(record: _Record) -> LedgerEntry:
    first_at = record.arrivals[1] if record.arrivals else record.completed_at
    return LedgerEntry(
        step=record.step,
        contributors=record.contributors,
        num_stale=record.num_stale,
        num_late=record.num_late,
        duration_s=record.applied_at - record.opened_at,
        wait_duration_s=record.completed_at - first_at,
        apply_duration_s=record.applied_at - record.completed_at,
        last_worker=record.last_worker,
        arrivals_us=_arrivals_us(record),
        weights=record.weights,
    )


def _arrivals_us(record: _Record) -> tuple[int, ...]:
    """Returns when each contributor's contribution came, in their order; a worker's contributions come in that order."""
    times: dict[int, list[float]] = {}
    for worker, at in zip(record.arrivals[::2], record.arrivals[1::2], strict=True):
        times.setdefault(int(worker), []).append(at)
    found = (times[push.worker].pop(0) if times.get(push.worker) else record.opened_at for push in record.contributors)
    return tuple(max(0, round(1e6 * (at - record.opened_at))) for at in found)
