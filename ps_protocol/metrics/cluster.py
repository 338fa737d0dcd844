"""What the chief exports: the status of its cluster as families.

What concerns one worker or one parameter server has its index as a label, for the first 1,000 of each.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ps_protocol.metrics.exposition import NO_LABELS, Family, counter, gauge, labels, summary
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind, ParticipantStatus, ServerStatus, StepTotals

MAX_INDEXED = 1_000
_NONE = NO_LABELS
_OUTCOMES: tuple[tuple[str, Callable[[ParticipantStatus], int]], ...] = (
    ("accepted", lambda one: one.num_accepted),
    ("stale", lambda one: one.num_stale),
    ("late", lambda one: one.num_late),
)
_MEMBER_STATES = ("live", "lapsed", "left", "expelled")


def cluster_families(status: ClusterStatus, totals: StepTotals) -> Iterator[Family]:
    """Yields all that the chief exports of its cluster."""
    yield from _training(status, totals)
    yield from _kept(status)
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    yield from _members(workers, num_observers=sum(one.state == "live" for one in status.participants) - _num_live(workers))
    yield from _workers(workers[:MAX_INDEXED])
    yield from _servers(status.shards[:MAX_INDEXED])


def _training(status: ClusterStatus, totals: StepTotals) -> Iterator[Family]:
    states = [(labels(state=state.name.lower()), int(status.state is state)) for state in ClusterState]
    yield gauge("lockstep_cluster_state", "1 for the state that the cluster is in, 0 for the others", *states)
    is_waiting = int(bool(status.waiting_for))
    yield gauge("lockstep_cluster_waiting", "1 while the cluster waits for something that `lockstep why` names", (_NONE, is_waiting))
    yield gauge(
        "lockstep_cluster_global_step",
        "Number of updates that all servers have applied; a rollback lowers it",
        (_NONE, status.global_step),
    )
    if status.max_steps is not None:
        yield gauge("lockstep_cluster_max_steps", "The step at which training finishes", (_NONE, status.max_steps))
    yield summary(
        "lockstep_cluster_step_duration_seconds", "Time from a step to the next one", total=totals.duration_s, count=totals.num_steps
    )
    words = "Time from the last contribution of a step until all servers have applied it"
    yield summary("lockstep_cluster_apply_duration_seconds", words, total=totals.apply_s, count=totals.num_steps)
    yield gauge("lockstep_cluster_step_age_seconds", "How long the open step has been open", (_NONE, status.step_age_s))
    yield gauge("lockstep_cluster_step_contributions", "Contributions to the open step so far", (_NONE, status.num_contributions))
    yield gauge("lockstep_cluster_step_contributions_required", "Contributions that a step needs", (_NONE, status.replicas_to_aggregate))
    counts = (status.num_accepted, status.num_stale, status.num_late)
    samples = [(labels(outcome=name), count) for (name, _), count in zip(_OUTCOMES, counts, strict=True)]
    yield counter("lockstep_cluster_contributions_total", "Contributions by what became of them", *samples)
    words = "Most steps between the variables that an accepted contribution was computed from and its own step"
    yield gauge("lockstep_cluster_max_staleness_steps", words, (_NONE, status.max_observed_staleness))


def _kept(status: ClusterStatus) -> Iterator[Family]:
    yield gauge("lockstep_cluster_epoch", "Grows with each rollback", (_NONE, status.epoch))
    yield counter("lockstep_cluster_rollbacks_total", "How often the cluster went back to a checkpoint", (_NONE, status.num_rollbacks))
    yield gauge("lockstep_cluster_chief_incarnation", "Grows when another chief takes over", (_NONE, status.chief_incarnation))
    if (checkpoint := status.checkpoint) is not None and checkpoint.durability:
        yield gauge("lockstep_cluster_checkpoint_failing", "1 if the last attempt to save failed", (_NONE, int(bool(checkpoint.failure))))
        if checkpoint.tag:
            yield gauge("lockstep_cluster_checkpoint_step", "Step of the newest whole checkpoint of this run", (_NONE, checkpoint.step))
            yield gauge(
                "lockstep_cluster_checkpoint_age_seconds", "Age of the newest whole checkpoint of this run", (_NONE, checkpoint.age_s)
            )
    if (data := status.data) is not None:
        ranges = (("done", data.num_done), ("leased", data.num_leased), ("all", data.num_ranges))
        samples = [(labels(state=state), count) for state, count in ranges]
        yield gauge("lockstep_cluster_data_ranges", "Ranges of the training data in the pass under way", *samples)
        yield gauge("lockstep_cluster_data_pass", "The pass over the training data that is under way, from 0", (_NONE, data.epoch))


def _num_live(participants: Sequence[ParticipantStatus]) -> int:
    return sum(one.state == "live" for one in participants)


def _members(workers: Sequence[ParticipantStatus], *, num_observers: int) -> Iterator[Family]:
    by_state = Counter(one.state for one in workers)
    yield gauge("lockstep_cluster_workers", "Workers by state", *((labels(state=state), by_state[state]) for state in _MEMBER_STATES))
    yield gauge("lockstep_cluster_observers", "Observers that are live", (_NONE, num_observers))


def _workers(workers: Sequence[ParticipantStatus]) -> Iterator[Family]:
    # The text of a number needs no escape, and there may be a thousand of them.
    named = [(f'worker="{one.index}"', one) for one in workers]
    live = [(f"{{{name}}}", int(one.state == "live")) for name, one in named]
    yield gauge("lockstep_worker_live", "1 while the chief counts on the worker", *live)
    waiting = [(f"{{{name}}}", int(one.is_waiting)) for name, one in named]
    yield gauge("lockstep_worker_waiting", "1 while the worker waits for a token", *waiting)
    silent = [(f"{{{name}}}", round(one.seen_ago_s, 3)) for name, one in named]
    yield gauge("lockstep_worker_silence_seconds", "Time since the chief last heard of the worker", *silent)
    moved = [(f"{{{name}}}", one.traffic) for name, one in named if one.traffic is not None]
    words = "Bytes of gradients that the worker has sent, as it said last; none through shared memory"
    yield counter("lockstep_worker_sent_bytes_total", words, *((where, traffic.sent_bytes) for where, traffic in moved))
    words = "Bytes of variables that the worker has received, as it said last; none through shared memory"
    yield counter("lockstep_worker_received_bytes_total", words, *((where, traffic.received_bytes) for where, traffic in moved))
    counts = [(f'{{{name},outcome="{outcome}"}}', count(one)) for name, one in named for outcome, count in _OUTCOMES]
    yield counter("lockstep_worker_contributions_total", "Contributions of the worker by what became of them", *counts)


def _servers(shards: Sequence[ServerStatus]) -> Iterator[Family]:
    pairs = [(labels(ps=str(shard.index)), shard) for shard in shards]
    reachable = [(where, int(shard.is_reachable)) for where, shard in pairs]
    yield gauge("lockstep_shard_reachable", "1 while the parameter server answers the chief", *reachable)
    steps = [(where, shard.step) for where, shard in pairs if shard.step is not None]
    yield gauge("lockstep_shard_step", "The step that the parameter server holds", *steps)
    sizes = [(where, shard.arena_bytes) for where, shard in pairs]
    yield gauge("lockstep_shard_variables_bytes", "Size of one copy of the variables there", *sizes)
    with_standby = [(where, int(bool(shard.standby))) for where, shard in pairs if shard.standby or shard.standby_missing]
    yield gauge("lockstep_shard_standby", "1 while a standby of the parameter server goes along", *with_standby)
    heard = [(where, shard.report) for where, shard in pairs if shard.report is not None]
    memory = [(where, report.allocated_bytes) for where, report in heard]
    yield gauge("lockstep_shard_allocated_bytes", "Memory of all buffers of the parameter server, as the chief last heard", *memory)
    applied = [(where, report.last_apply_s) for where, report in heard]
    yield gauge("lockstep_shard_last_apply_seconds", "Time that the parameter server took to apply its last step", *applied)
    nonfinite = [(where, report.num_nonfinite) for where, report in heard]
    yield gauge("lockstep_shard_nonfinite_elements", "Elements of the last step's mean gradient that were not finite", *nonfinite)
