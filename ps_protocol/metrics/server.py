"""What a parameter server exports: its report, and what workers have reported, as families."""

from collections.abc import Iterable, Iterator

from ps_protocol.metrics.exposition import NO_LABELS, Family, counter, gauge, labels, summary
from ps_protocol.roles.shard import MetricCell, ShardStatus

MAX_NAMES, MAX_NAME_CHARACTERS = 100, 128


def shard_families(status: ShardStatus, *, num_applied: int, apply_s: float, cells: Iterable[MetricCell]) -> Iterator[Family]:
    """Yields all that the server exports of its shard. `apply_s`: how long the `num_applied` steps took together."""
    report = status.report
    yield gauge("lockstep_server_index", "Which shard the server holds", (NO_LABELS, status.shard))
    if status.step is not None:
        yield gauge("lockstep_server_step", "The step that the variables belong to; a rollback lowers it", (NO_LABELS, status.step))
    yield summary("lockstep_server_apply_duration_seconds", "Time to apply a step", total=apply_s, count=num_applied)
    yield gauge("lockstep_server_last_apply_seconds", "Time that the last step took to apply", (NO_LABELS, report.last_apply_s))
    words = "Memory of all buffers: variables twice, slots, staged contributions"
    yield gauge("lockstep_server_allocated_bytes", words, (NO_LABELS, report.allocated_bytes))
    yield gauge("lockstep_server_staged_contributions", "Contributions that are staged now", (NO_LABELS, report.num_staged))
    yield gauge("lockstep_server_sharing_workers", "Workers that share memory with the server", (NO_LABELS, report.num_sharing))
    words = "Elements of the last step's mean gradient that were not finite"
    yield gauge("lockstep_server_nonfinite_elements", words, (NO_LABELS, report.num_nonfinite))
    # They begin again with the variables, as a counter may.
    yield counter("lockstep_server_pushes_total", "Contributions that were staged", (NO_LABELS, report.num_pushes))
    words = "Contributions that were dropped because their step had been applied"
    yield counter("lockstep_server_stale_pushes_total", words, (NO_LABELS, report.num_stale))
    yield counter("lockstep_server_duplicate_pushes_total", "Pushes that were repeated", (NO_LABELS, report.num_duplicates))
    if status.chief_heard_ago_s is not None:
        words = "Time since the server last heard of its chief"
        yield gauge("lockstep_server_chief_silence_seconds", words, (NO_LABELS, status.chief_heard_ago_s))
    yield from reported_families(cells)


def reported_families(cells: Iterable[MetricCell]) -> Iterator[Family]:
    """Yields what workers have reported as metrics, of all workers together: a label for each of them would be too many series.

    The name is a label: the first 100 names, of 128 characters at most.
    """
    sums: dict[str, tuple[float, float, int]] = {}
    for cell in cells:
        if cell.name in sums or (len(sums) < MAX_NAMES and len(cell.name) <= MAX_NAME_CHARACTERS):
            total, weight, count = sums.get(cell.name, (0.0, 0.0, 0))
            sums[cell.name] = total + cell.total, weight + cell.weight, count + cell.count
    named = [labels(metric=name) for name in sums]
    rows = [*zip(named, sums.values(), strict=True)]
    # Reported numbers may be negative, and a rollback takes some back, so these are not counters.
    words = "Sum of a metric that workers reported, each times its weight"
    yield gauge("lockstep_reported_weighted_value", words, *((one, row[0]) for one, row in rows))
    yield gauge("lockstep_reported_weight", "Sum of the weights of a metric's reports", *((one, row[1]) for one, row in rows))
    yield gauge("lockstep_reported_reports", "How often a metric was reported", *((one, row[2]) for one, row in rows))
