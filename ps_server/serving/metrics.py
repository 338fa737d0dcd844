"""What a parameter server exports for Prometheus: its report, and what workers have reported, as families. Opens no port."""

from collections.abc import Iterable, Iterator

from ps_protocol.http.metrics import reported_families
from ps_protocol.process.exposition import NO_LABELS, Family, counter, gauge, summary
from ps_protocol.roles.shard import MetricCell, ShardStatus


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
