"""Outcomes of contributions, and reports of metrics, as a worker's program gets them. Knows outcomes, steps and numbers only."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ps_protocol.roles.chief import CommitResult, PushOutcome
from ps_protocol.roles.shard import MetricCell


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The outcome of a contribution, the step of its variables, and the step that was open when the chief answered.

    ACCEPTED: it is part of the step `applied_step`: the variables of the step after that have it. `staleness`: how many steps had been
    applied between its variables and it; 0 under the policy sync. `factor`: what its gradients were multiplied with, less than 1 if it was
    too stale.
    STALE: too old, and dropped. LATE: its step takes no more from this worker, because other contributions came first or it has contributed
    its share. DUPLICATE: it was counted before, and its outcome is no longer known. ROLLED_BACK: the cluster has rolled back to a
    checkpoint without it, or the chief ended this worker's lease before it confirmed that the contribution counts; the session has
    registered again and continues at its `local_step`.

    `is_finished`: whether training is finished, as far as the session knew at that time.
    """

    outcome: PushOutcome
    step: int
    global_step: int
    applied_step: int | None = None
    staleness: int = 0
    factor: float = 1.0
    is_finished: bool = False

    @property
    def is_accepted(self) -> bool:
        """Whether the contribution counts."""
        return self.outcome is PushOutcome.ACCEPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetric:
    """One worker's reports under one name: weighted sum, weighted mean, number of reports, and the last value."""

    sum: float
    mean: float
    count: int
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricReport:
    """All workers' reports under one name in contributions that count, together and by worker index.

    `sum` is that of value * weight, `weight` that of the weights, `mean` the quotient (0 weight: nan), `count` how many reports there were.
    """

    sum: float
    weight: float
    mean: float
    count: int
    by_worker: Mapping[int, WorkerMetric]


def push_of(result: CommitResult, *, step: int, is_finished: bool) -> Push:
    """Returns the outcome for the user: a commit that was sent twice has the outcome of the first time."""
    return Push(
        outcome=result.original_outcome,
        step=step,
        global_step=result.global_step,
        applied_step=result.applied_step,
        staleness=result.staleness,
        factor=result.factor,
        is_finished=is_finished,
    )


def metric_reports(cells: Iterable[MetricCell]) -> dict[str, MetricReport]:
    """Returns a report for each name, in order of the names."""
    by_name: dict[str, list[MetricCell]] = {}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    return {name: _report(by_name[name]) for name in sorted(by_name)}


def _report(cells: list[MetricCell]) -> MetricReport:
    total, weight = sum(cell.total for cell in cells), sum(cell.weight for cell in cells)
    by_worker = {
        cell.worker: WorkerMetric(sum=cell.total, mean=_quotient(cell.total, cell.weight), count=cell.count, last=cell.last)
        for cell in sorted(cells, key=lambda cell: cell.worker)
    }
    return MetricReport(
        sum=total, weight=weight, mean=_quotient(total, weight), count=sum(cell.count for cell in cells), by_worker=by_worker
    )


def _quotient(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")
