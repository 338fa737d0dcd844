"""What a worker's own process exports: where it stands and what it has exchanged, as families."""

from collections.abc import Iterator

from ps_protocol.metrics.exposition import NO_LABELS, Family, counter, gauge, summary
from ps_protocol.roles.chief import WorkerTraffic


def session_families(traffic: WorkerTraffic, *, worker: int, step: int, num_pushes: int, num_rollbacks: int) -> Iterator[Family]:
    """Yields all that a worker exports of its session."""
    yield gauge("lockstep_session_worker", "Index of the worker", (NO_LABELS, worker))
    yield gauge("lockstep_session_step", "The step that the next gradients are for; a rollback lowers it", (NO_LABELS, step))
    yield counter("lockstep_session_pushes_total", "Contributions that were given, whatever became of them", (NO_LABELS, num_pushes))
    yield counter("lockstep_session_rollbacks_total", "How often the session went back to an earlier step", (NO_LABELS, num_rollbacks))
    words = "Time to read the variables of a step"
    yield summary("lockstep_session_read_duration_seconds", words, total=traffic.reading_s, count=traffic.num_reads)
    words = "Bytes of gradients sent to parameter servers; none through shared memory"
    yield counter("lockstep_session_sent_bytes_total", words, (NO_LABELS, traffic.sent_bytes))
    words = "Bytes of variables received from parameter servers; none through shared memory"
    yield counter("lockstep_session_received_bytes_total", words, (NO_LABELS, traffic.received_bytes))
