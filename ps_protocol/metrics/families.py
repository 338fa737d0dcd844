"""The families that each role exports: a chief, a parameter server, a worker. Knows the values that roles report; no text format.

A metric of one worker or one parameter server has its index as a label, for the first 1,000 of each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ps_protocol.metrics.exposition import NO_LABELS, Family, counter, gauge, labels, summary
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ParticipantKind, ParticipantStatus, ServerStatus, StepTotals, WorkerTraffic
from ps_protocol.roles.shard import MetricCell, ShardStatus

# Bounds of how many time series there can be: of workers and parameter servers, and of the metrics that workers report.
MAX_INDEXED = 1_000
MAX_NAMES, MAX_NAME_CHARACTERS = 100, 128
_OUTCOMES: tuple[tuple[str, Callable[[ParticipantStatus], int]], ...] = (
    ("accepted", lambda one: one.num_accepted),
    ("stale", lambda one: one.num_stale),
    ("late", lambda one: one.num_late),
)
_MEMBER_STATES = ("live", "lapsed", "left", "expelled")


def cluster_families(status: ClusterStatus, totals: StepTotals) -> Iterator[Family]:
    """Yields all that the chief exports of its cluster."""
    yield from _training(status, totals)
    yield from _recovery_and_data(status)
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    yield from _members(workers, num_observers=sum(one.state == "live" for one in status.participants) - _num_live(workers))
    yield from _workers(workers[:MAX_INDEXED])
    yield from _servers(status.shards[:MAX_INDEXED])
    observers = [one for one in status.participants if one.kind is ParticipantKind.OBSERVER]
    yield _processor_time(status, workers[:MAX_INDEXED], observers[:MAX_INDEXED])
    yield from _followers(observers[:MAX_INDEXED])


def _training(status: ClusterStatus, totals: StepTotals) -> Iterator[Family]:
    states = [(labels(state=state.name.lower()), int(status.state is state)) for state in ClusterState]
    yield gauge("lockstep_cluster_state", "1 for the state that the cluster is in, 0 for the others", *states)
    words = "How urgent the headline of `lockstep why` is: 1 green, 2 amber, 3 red"
    yield gauge("lockstep_cluster_level", words, (NO_LABELS, status.headline.level.value))
    holding = [(labels(condition=one.name), one.level.value) for one in status.conditions]
    yield gauge("lockstep_cluster_condition", "The conditions that hold, each by how urgent it is", *holding)
    yield gauge(
        "lockstep_cluster_global_step",
        "Number of updates that all servers have applied; a rollback lowers it",
        (NO_LABELS, status.global_step),
    )
    if status.max_steps is not None:
        yield gauge("lockstep_cluster_max_steps", "The step at which training finishes", (NO_LABELS, status.max_steps))
    yield summary(
        "lockstep_cluster_step_duration_seconds", "Time from a step to the next one", total=totals.duration_s, count=totals.num_steps
    )
    words = "Time from the last contribution of a step until all servers have applied it"
    yield summary("lockstep_cluster_apply_duration_seconds", words, total=totals.apply_s, count=totals.num_steps)
    yield gauge("lockstep_cluster_step_age_seconds", "How long the open step has been open", (NO_LABELS, status.step_age_s))
    yield gauge("lockstep_cluster_step_contributions", "Contributions to the open step so far", (NO_LABELS, status.num_contributions))
    yield gauge(
        "lockstep_cluster_step_contributions_required", "Contributions that a step needs", (NO_LABELS, status.replicas_to_aggregate)
    )
    counts = (status.num_accepted, status.num_stale, status.num_late)
    samples = [(labels(outcome=name), count) for (name, _), count in zip(_OUTCOMES, counts, strict=True)]
    yield counter("lockstep_cluster_contributions_total", "Contributions by what became of them", *samples)
    words = "Most steps between the variables that an accepted contribution was computed from and its own step"
    yield gauge("lockstep_cluster_max_staleness_steps", words, (NO_LABELS, status.max_observed_staleness))


def _recovery_and_data(status: ClusterStatus) -> Iterator[Family]:
    yield gauge("lockstep_cluster_epoch", "Grows with each rollback", (NO_LABELS, status.epoch))
    yield counter("lockstep_cluster_rollbacks_total", "How often the cluster went back to a checkpoint", (NO_LABELS, status.num_rollbacks))
    yield gauge("lockstep_cluster_chief_incarnation", "Grows when another chief takes over", (NO_LABELS, status.chief_incarnation))
    if (checkpoint := status.checkpoint) is not None and checkpoint.durability:
        yield gauge(
            "lockstep_cluster_checkpoint_failing", "1 if the last attempt to save failed", (NO_LABELS, int(bool(checkpoint.failure)))
        )
        if checkpoint.tag:
            yield gauge("lockstep_cluster_checkpoint_step", "Step of the newest whole checkpoint of this run", (NO_LABELS, checkpoint.step))
            yield gauge(
                "lockstep_cluster_checkpoint_age_seconds", "Age of the newest whole checkpoint of this run", (NO_LABELS, checkpoint.age_s)
            )
    if (data := status.data) is not None:
        ranges = (("done", data.num_done), ("leased", data.num_leased), ("all", data.num_ranges))
        samples = [(labels(state=state), count) for state, count in ranges]
        yield gauge("lockstep_cluster_data_ranges", "Ranges of the training data in the pass under way", *samples)
        yield gauge("lockstep_cluster_data_pass", "The pass over the training data that is under way, from 0", (NO_LABELS, data.epoch))


def _num_live(participants: Sequence[ParticipantStatus]) -> int:
    return sum(one.state == "live" for one in participants)


def _members(workers: Sequence[ParticipantStatus], *, num_observers: int) -> Iterator[Family]:
    by_state = Counter(one.state for one in workers)
    yield gauge("lockstep_cluster_workers", "Workers by state", *((labels(state=state), by_state[state]) for state in _MEMBER_STATES))
    yield gauge("lockstep_cluster_observers", "Observers that are live", (NO_LABELS, num_observers))


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
    words = "Bytes of gradients that the worker has sent, as last reported; none through shared memory"
    yield counter("lockstep_worker_sent_bytes_total", words, *((where, traffic.sent_bytes) for where, traffic in moved))
    words = "Bytes of variables that the worker has received, as last reported; none through shared memory"
    yield counter("lockstep_worker_received_bytes_total", words, *((where, traffic.received_bytes) for where, traffic in moved))
    inner = [(f"{{{name}}}", one.inner, one.utilisation) for name, one in named if one.inner is not None]
    words = "Steps of the worker's own optimizer in its latest contribution that counts"
    yield gauge("lockstep_worker_inner_steps", words, *((where, steps.num) for where, steps, _ in inner))
    words = "Share of the time since the contribution before in which the worker made those"
    yield gauge("lockstep_worker_utilisation", words, *((where, round(share, 4)) for where, _, share in inner))
    counts = [(f'{{{name},outcome="{outcome}"}}', count(one)) for name, one in named for outcome, count in _OUTCOMES]
    yield counter("lockstep_worker_contributions_total", "Contributions of the worker by what became of them", *counts)


def _followers(observers: Sequence[ParticipantStatus]) -> Iterator[Family]:
    found = [
        (labels(observer=str(one.index)), one.traffic, one.traffic.follower)
        for one in observers
        if one.state == "live" and one.traffic is not None and one.traffic.follower is not None
    ]
    steps = [(where, report.step) for where, _, report in found if report.step is not None]
    yield gauge("lockstep_follower_step", "Step of the weights that the follower has, as last reported", *steps)
    lags = [(where, report.lag) for where, _, report in found]
    yield gauge("lockstep_follower_lag_steps", "Steps that those weights are behind the newest, as last reported", *lags)
    behind = [(where, round(report.behind_s, 3)) for where, _, report in found]
    yield gauge("lockstep_follower_behind_seconds", "Time for which the follower has been behind the newest step", *behind)
    received = [(where, traffic.received_bytes) for where, traffic, _ in found]
    yield counter("lockstep_follower_received_bytes_total", "Bytes of weights that the follower has received", *received)
    wholes = [(where, report.whole_bytes) for where, _, report in found]
    yield gauge("lockstep_follower_whole_bytes", "Bytes of all the weights that it follows, as they travel", *wholes)
    kinds = [
        (f'{where[:-1]},kind="{kind}"}}', count)
        for where, _, one in found
        for kind, count in (("patch", one.num_patches), ("whole", one.num_wholes))
    ]
    yield counter("lockstep_follower_answers_total", "Answers of parameter servers to the follower, by kind", *kinds)


def _servers(shards: Sequence[ServerStatus]) -> Iterator[Family]:
    pairs = [(labels(ps=str(shard.index)), shard) for shard in shards]
    reachable = [(where, int(shard.is_reachable)) for where, shard in pairs]
    yield gauge("lockstep_shard_reachable", "1 while the parameter server answers the chief", *reachable)
    steps = [(where, shard.step) for where, shard in pairs if shard.step is not None]
    yield gauge("lockstep_shard_step", "The step that the parameter server holds", *steps)
    sizes = [(where, shard.arena_bytes) for where, shard in pairs]
    yield gauge("lockstep_shard_variables_bytes", "Size of one copy of the variables there", *sizes)
    with_standby = [(where, int(bool(shard.standby))) for where, shard in pairs if shard.standby or shard.standby_missing]
    yield gauge("lockstep_shard_standby", "1 while a standby of the parameter server follows", *with_standby)
    heard = [(where, shard.report) for where, shard in pairs if shard.report is not None]
    memory = [(where, report.allocated_bytes) for where, report in heard]
    yield gauge("lockstep_shard_allocated_bytes", "Memory of all buffers of the parameter server, as the chief last heard", *memory)
    applied = [(where, report.last_apply_s) for where, report in heard]
    yield gauge("lockstep_shard_last_apply_seconds", "Time that the parameter server took to apply its last step", *applied)
    nonfinite = [(where, report.num_nonfinite) for where, report in heard]
    yield gauge("lockstep_shard_nonfinite_elements", "Elements of the last step's mean gradient that were not finite", *nonfinite)
    yield gauge("lockstep_shard_rows", "Rows of tables with keys", *((where, report.num_rows) for where, report in heard))
    words = "Bytes of rows and slots of tables with keys that lie in files, which are not part of the allocated ones"
    yield gauge("lockstep_shard_files_bytes", words, *((where, report.files_bytes) for where, report in heard))
    keys = [
        (labels(ps=str(shard.index), outcome=outcome), getattr(shard.report, f"num_{outcome}"))
        for _, shard in pairs
        if shard.report is not None
        for outcome in ("found", "made", "evicted", "refused", "unadmitted")
    ]
    yield counter(
        "lockstep_shard_keys_total", "Keys that had a row, that got one, that lost it, that got none, and that were not admitted", *keys
    )


def _processor_time(status: ClusterStatus, workers: Sequence[ParticipantStatus], observers: Sequence[ParticipantStatus]) -> Family:
    """All roles in one family, so that one sum has the whole cluster."""
    words = "Processor time of the processes of all roles, as the chief last heard; it begins again with each process"
    of_servers = [(one.index, one.report.cpu_s) for one in status.shards[:MAX_INDEXED] if one.report is not None]
    participants = [
        (role, [(one.index, one.traffic.cpu_s) for one in found if one.traffic is not None])
        for role, found in (("worker", workers), ("observer", observers))
    ]
    by_role = (("chief", [(0, status.chief_cpu_s)]), ("ps", of_servers), *participants)
    samples = [(f'{{role="{role}",index="{index}"}}', seconds) for role, found in by_role for index, seconds in found]
    return counter("lockstep_cluster_cpu_seconds_total", words, *samples)


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
