"""A cluster as lines for a terminal: all of it for `status`, its first part for `why`, what fits for `top`. Pure: knows no terminal."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from chief.page.look import Look, eta_s
from lockstep.cli.formatting import bytes_text, duration_text, plain, printable, table
from ps_protocol.model.keys import KeySpec
from ps_protocol.model.spec import PlacedSlice, Placement
from ps_protocol.model.variables import ANY
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, ClusterStatus, LedgerEntry, Level, ParticipantKind, ParticipantStatus
from ps_protocol.roles.shard import ShardReport

Point = tuple[float, int, float | None]

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN = "\x1b[0m"
_COLOURS = {Level.RED: "\x1b[31m", Level.AMBER: "\x1b[33m", Level.GREEN: "\x1b[32m"}
# The scale of a curve ends at this quantile, so that one slow step does not flatten the others.
_MOST = 0.97
_MAX_METRICS = 8
_LABEL = 14
_AGE_BAR = 40
_CLAIMS = {"none": "only when asked for", "interval": "at intervals", "step": "with every step"}


# What all three begin with: the conditions that hold, and where the cluster is.


def why_lines(status: ClusterStatus) -> list[str]:
    """Returns the headline, what to do, the commands for that, other conditions; then what they concern, and what a loss would cost."""
    lines = [*_conditions(status), "", *_place(status), *_concerned(status), *_kept(status)]
    return [*lines, loss] if (loss := loss_text(status)) else lines


def _conditions(status: ClusterStatus) -> Iterator[str]:
    first = status.headline
    yield printable(first.line)
    if first.advice:
        yield printable(first.advice)
    yield from (f"    {printable(command)}" for command in first.commands)
    for one in status.conditions[1:]:
        yield printable(f"also: {one.line}" + (f". {one.advice}" if one.advice else ""))
        yield from (f"    {printable(command)}" for command in one.commands)


def _place(status: ClusterStatus) -> Iterator[str]:
    step = f"step {status.global_step:,}" + (f" of {status.max_steps:,}" if status.max_steps is not None else "")
    state = status.state.name.lower().replace("_", " ")
    line = f"cluster {status.cluster!r}: {state}, {step}, epoch {status.epoch}"
    if status.state is ClusterState.TRAINING and status.policy.has_common_steps:
        line += f"; {status.num_contributions} of {status.replicas_to_aggregate} contributions after {duration_text(status.step_age_s)}"
    yield printable(line)


def _concerned(status: ClusterStatus) -> Iterator[str]:
    """Yields a line for each worker, the longest silent first, and for each server that is not as it should be."""
    for one in sorted(status.participants, key=lambda one: -one.seen_ago_s):
        if one.kind is ParticipantKind.WORKER:
            heard = "" if one.doing.startswith("heard") else f"heard {duration_text(one.seen_ago_s)} ago, "
            where = f"{heard}{one.host} pid {one.pid}"
            yield printable(f"  worker {one.index}: {one.doing} ({where})")
    steps = {link.step for link in status.shards if link.is_reachable and link.step is not None}
    for link in status.shards:
        if not link.is_reachable or len(steps) > 1:
            yield printable(f"  ps {link.index}: {'answers' if link.is_reachable else 'does not answer'}, step {link.step}")


def _kept(status: ClusterStatus) -> Iterator[str]:
    """Yields a line each about checkpoints, rollbacks, the chief's successors and training data, where there are any."""
    if status.checkpoint is not None and status.checkpoint.durability:
        yield printable(_checkpoint(status.checkpoint))
    if status.num_rollbacks:
        yield printable(f"rolled back {_times(status.num_rollbacks)}; the latest: {status.last_rollback or 'unknown'}")
    if status.chief_incarnation > 1:
        yield f"the chief has been replaced {_times(status.chief_incarnation - 1)}: its process ended, and another one took over"
    if (data := status.data) is not None:
        ranges = f"{data.num_done} of {data.num_ranges} ranges done, {data.num_leased} leased"
        yield printable(f"data {data.name!r}: pass {data.epoch + 1}, {ranges}")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _checkpoint(checkpoint: CheckpointStatus) -> str:
    latest = f"latest {checkpoint.tag} (step {checkpoint.step:,}, {duration_text(checkpoint.age_s)} ago)"
    parts = [f"checkpoints: {_CLAIMS.get(checkpoint.durability, checkpoint.durability)}"]
    parts.append(latest if checkpoint.tag else "this run has no complete checkpoint yet")
    if checkpoint.saving:
        parts.append(f"{checkpoint.saving} is being written")
    if checkpoint.failure:
        parts.append("THE LAST ATTEMPT FAILED")  # the conditions above say why
    return "; ".join(parts)


def loss_text(status: ClusterStatus) -> str:
    """Returns what the loss of a parameter server would cost now; empty if there is no model to lose, or a condition says it."""
    if status.state not in (ClusterState.TRAINING, ClusterState.RECOVERING) or (checkpoint := status.checkpoint) is None:
        return ""
    if status.shards and all(link.standby for link in status.shards):
        return "the loss of a parameter server would cost nothing: each has a standby"
    if not checkpoint.tag:
        return "the loss of a parameter server would cost all steps of this run: it has no complete checkpoint yet"
    number = max(0, status.global_step - checkpoint.step)
    cost = f"{number:,} step{'s' * (number != 1)}, those since" if number else "no step, since all are in"
    return f"the loss of a parameter server would cost {cost} {checkpoint.tag}"


# All of it, once.


def status_lines(look: Look, *, placement: Placement | None = None, num_ledger: int = 0) -> list[str]:
    """Returns all parts, each after an empty line."""
    status = look.status
    progress = [f"{policy_text(status)}"]
    if status.optimizer:
        version = f", version {status.settings_version}" if status.settings_version else ""
        progress.append(f"optimizer {printable(status.optimizer)}{version}")
    if status.max_observed_staleness:
        progress.append(f"staleness: a contribution was computed from variables at most {status.max_observed_staleness} steps old")
    progress.append(_cost(look))
    if status.page_url:
        progress.append(f"its page, in a browser: {printable(status.page_url)}")
    since = "this chief began" if status.chief_incarnation > 1 and status.earlier is None else "the start"
    counts = f"contributions since {since}: {status.counts.accepted} accepted, {status.counts.stale} stale, {status.counts.late} late"
    blocks = [why_lines(status), progress, _workers(look, most=len(status.participants)), _servers(status), _reports(status), [counts]]
    blocks.append(_placement(placement) if placement is not None else [])
    blocks.append(_ledger(status.ledger[:num_ledger]) if num_ledger else [])
    return [line for block in blocks if block for line in ("", *block)][1:]


def fields_of(status: ClusterStatus, *, placement: Placement | None = None, num_ledger: int = 0) -> dict[str, object]:
    """Returns every field by its own name; enums in lower case, durations in seconds; the placement, if given, slice by slice."""
    fields = dataclasses.asdict(dataclasses.replace(status, ledger=status.ledger[:num_ledger]))
    if placement is not None:
        fields["placement"] = [_slice_fields(placed) for placed in placement]
    return {key: plain(value) for key, value in fields.items()}


def row_lines(name: str, keys: KeySpec, counts: Sequence[int]) -> list[str]:
    """Returns how many rows of a table with keys were used last 1 step ago, 2 to 3 steps ago, 4 to 7, and so on."""
    what, num_rows = f"rows of {printable(repr(name))}", sum(counts)
    if not counts and not (keys.max_rows or keys.max_age_steps):
        return [f"{what}: their last use is not kept, for the table has neither max_rows nor max_age_steps"]
    most = f" of at most {keys.max_rows:,} ({100 * num_rows / keys.max_rows:.0f} %)" if keys.max_rows else ""
    gone = f"; one not used for {keys.max_age_steps:,} steps is gone, and another key may take its place" if keys.max_age_steps else ""
    oldest = max((age for age, count in enumerate(counts) if count), default=-1)
    rows = [
        (
            f"{1 << age:,} to {(2 << age) - 1:,} steps ago" if age else "in the newest step",
            f"{count:,}",
            f"{100 * count / num_rows:.0f} %",
            "█" * round(_AGE_BAR * count / max(counts)),
        )
        for age, count in enumerate(counts[: oldest + 1])
    ]
    lines = table([("last used", "rows", "", ""), *rows], left=(0, 3)).splitlines() if rows else []
    return [f"{what}: {num_rows:,}{most}{gone}", *lines]


def policy_text(status: ClusterStatus) -> str:
    """Returns how the cluster's workers are coordinated, with the numbers."""
    expected = f"{status.total_num_replicas} workers expected" if status.total_num_replicas else "any number of workers"
    needs = f"a step needs {status.replicas_to_aggregate} contribution{'s' * (status.replicas_to_aggregate != 1)}"
    if status.min_replicas and status.min_replicas < status.replicas_to_aggregate:
        needs += f" (when workers are gone as many as are left, {status.min_replicas} at least)"
    return f"policy {status.policy.text}: {needs if status.policy.has_common_steps else 'every contribution is a step'}, {expected}"


def _cost(look: Look) -> str:
    cost = look.cost
    roles = ", ".join(f"{role} {duration_text(seconds)}" for role, seconds in cost.cpu_s.items())
    since = "in the last hour" if cost.is_of_last_hour else "so far"
    sent, received = (_moved(num_bytes, is_shared=cost.is_shared) for num_bytes in (cost.sent_bytes, cost.received_bytes))
    return f"CPU {since}: {roles}  sent {sent}, received {received}"


def _moved(num_bytes: int, *, is_shared: bool) -> str:
    if not is_shared:
        return bytes_text(num_bytes)
    return f"{bytes_text(num_bytes)} and shared" if num_bytes else "shared"


def _workers(look: Look, *, most: int) -> list[str]:
    people = list(look.status.participants)
    if not people:
        return ["no worker has joined yet"]
    if len(people) > most:  # those with problems come first where there is not room for all
        people.sort(key=lambda one: (one.state == "live", -look.num_last.get(one.index, 0)))
    heading = ("worker", "doing", "contr/s", "last in", "counted", "stale", "late", "heard", "CPU", "by", "where")
    rows = [heading, *(_worker(one, look) for one in people[:most])]
    failures = [printable(f"{_name(one)} left with a failure: {one.failure}") for one in people[:most] if one.failure]
    hidden = [f"… and {len(people) - most} more"] if len(people) > most else []
    return [*table(rows, left=(0, 1, 9, 10)).splitlines(), *hidden, *failures]


def _name(one: ParticipantStatus) -> str:
    return f"{one.kind.name.lower()} {one.index}"


def _worker(one: ParticipantStatus, look: Look) -> tuple[str, ...]:
    num_steps, is_worker = len(look.status.ledger), one.kind is ParticipantKind.WORKER
    return (
        _name(one),
        printable(one.doing[:60]),
        _rate(look.contributions_per_s.get(one.index)) if is_worker else "",
        f"{100 * look.num_last.get(one.index, 0) / num_steps:.0f} %" if is_worker and num_steps else "–",
        f"{one.num_accepted:,}",
        f"{one.num_stale:,}",
        f"{one.num_late:,}",
        f"{duration_text(one.seen_ago_s)} ago",
        duration_text(one.traffic.cpu_s) if one.traffic is not None else "–",
        printable(one.transport.replace("_", " ") or "–"),
        printable(f"{one.host} pid {one.pid}"),
    )


def _servers(status: ClusterStatus) -> list[str]:
    rows = [("server", "state", "step", "variables", "memory", "CPU", "last apply", "staged", "standby", "address")]
    for one in status.shards:
        report = one.report
        rows.append(
            (
                f"ps {one.index}",
                "answers" if one.is_reachable else "DOES NOT ANSWER",
                "–" if one.step is None else f"{one.step:,}",
                bytes_text(one.arena_bytes),
                bytes_text(report.allocated_bytes) if report else "–",
                duration_text(report.cpu_s) if report else "–",
                duration_text(report.last_apply_s) if report else "–",
                str(report.num_staged) if report else "–",
                printable(one.standby) or ("MISSING" if one.standby_missing else "none"),
                printable(one.address),
            )
        )
    return table(rows, left=(0, 1, 9)).splitlines()


_SHOWN_ABOVE = ("allocated_bytes", "num_staged", "last_apply_s", "cpu_s")


def _reports(status: ClusterStatus) -> list[str]:
    """Returns a table of what `_servers` leaves out of each parameter server's latest report, if any of them has any of it."""
    reports = [one.report for one in status.shards if one.report]
    fields = [field.name for field in dataclasses.fields(ShardReport) if field.name not in _SHOWN_ABOVE]
    names = [name for name in fields if any(getattr(one, name) for one in reports)]
    rows = [("ps", *(name.removeprefix("num_").removesuffix("_bytes").removesuffix("_s").replace("_", " ") for name in names))]
    rows += [(str(one.index), *(_amount(name, getattr(one.report, name)) for name in names)) for one in status.shards if one.report]
    copies = "(variables of a report: two copies, the next step's beside the present one's; of tables one)"
    return [*table(rows, left=(0,)).splitlines(), copies] if len(rows) > 1 else []


def _amount(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return bytes_text(int(value))
    return duration_text(value) if name.endswith("_s") else str(value)


def _placement(placement: Placement) -> list[str]:
    if not placement:
        return ["no model yet, so no variable lies anywhere"]
    rows = [("variable", "ps", "type", "shape", "part", "bytes")]
    for placed in placement:
        piece, variable = placed.slice, placed.slice.variable
        part = "" if piece.is_whole else f"{piece.start} to {piece.stop} of axis {piece.axis}"
        shape = "×".join("any" if extent == ANY else str(extent) for extent in variable.shape) or "scalar"
        rows.append((printable(variable.name), str(placed.shard), variable.data_type.value, shape, part, bytes_text(piece.nbytes)))
    return table(rows, left=(0, 2, 3, 4)).splitlines()


def _slice_fields(placed: PlacedSlice) -> dict[str, object]:
    piece, variable = placed.slice, placed.slice.variable
    where = {"shard": placed.shard, "axis": piece.axis, "start": piece.start, "stop": piece.stop, "bytes": piece.nbytes}
    return {"variable": variable.name, "data_type": variable.data_type, "shape": variable.shape, **where}


def _ledger(entries: Sequence[LedgerEntry]) -> list[str]:
    rows = [("step", "took", "apply", "stale", "late", "last", "contributors")]
    for entry in entries:
        times = (duration_text(entry.duration_s), duration_text(entry.apply_duration_s))
        weights = [*(f"×{weight:g}" for weight in entry.weights), *[""] * len(entry.contributors)]
        contributors = " ".join(f"{push.worker}{weight}" for push, weight in zip(entry.contributors, weights, strict=False))
        rows.append((str(entry.step), *times, str(entry.num_stale), str(entry.num_late), str(entry.last_worker), contributors))
    return table(rows, left=(6,)).splitlines()


# What fits a terminal, again and again.


def frame(
    look: Look,
    *,
    speed: Sequence[Point],
    metrics: Mapping[str, Sequence[Point]],
    width: int,
    height: int,
    has_colours: bool = False,
    gone_since: str = "",
) -> list[str]:
    """Returns at most `height` lines of at most `width` characters. `gone_since`: since when the chief has not answered; empty: it does."""
    width, status = max(20, width - 1), look.status
    head = [textwrap.wrap(line, width, subsequent_indent="  ")[:3] or [""] for line in _conditions(status)]
    first = [line for block in head for line in block]
    if has_colours:
        lines = len(head[0])
        first[:lines] = [f"{_COLOURS[status.headline.level]}{line}{_PLAIN}" for line in first[:lines]]
    has_ended = status.state in (ClusterState.FINISHED, ClusterState.FAILED)
    gone = [("the chief has ended" if has_ended else f"THE CHIEF HAS NOT ANSWERED since {gone_since}")[:width]] if gone_since else []
    lines_now = [*gone, *first, "", *_cut([*_place(status), *_progress(look, width)], width), *_curves(speed, metrics, width)]
    lines_now += _steps(status, look, width)
    servers = _fitting(_servers(status), width)
    workers = _fitting(_workers(look, most=max(3, height - len(lines_now) - len(servers) - 5)), width)
    return [*lines_now, "", *workers, "", *servers][: max(1, height)]


def _cut(lines: Sequence[str], width: int) -> list[str]:
    return [line[:width] for line in lines]


def _fitting(lines: Sequence[str], width: int) -> list[str]:
    """Cuts a table at the last column that fits as a whole, and says which it leaves out."""
    heading = lines[0]
    if max(map(len, lines)) <= width or "  " not in heading:
        return _cut(lines, width)
    edge = _edge(lines, width)
    left_out = [word.strip() for word in heading[edge:].split("  ") if word.strip()]
    return [*(line[:edge].rstrip() for line in lines), f"(no room for: {', '.join(left_out)})"[:width]]


def _edge(lines: Sequence[str], width: int) -> int:
    """Returns where the last column ends that fits: two spaces stand there in every line."""
    rows = [line for line in lines if line]
    for at in range(width, 0, -1):
        if all(line[at : at + 2].strip() == "" for line in rows):
            return at
    return width


def _progress(look: Look, width: int) -> list[str]:
    status = look.status
    parts = [f"{_rate(look.steps_per_s)} steps/s", f"policy {status.policy.text}"]
    left_s = eta_s(look)
    if status.max_steps and status.waiting_for:
        parts.insert(1, "time left unknown while training waits")
    elif left_s is not None:
        parts.insert(1, f"{duration_text(left_s)} left")
    lines = ["  ".join(parts)]
    if status.max_steps:
        done, room = min(1.0, status.global_step / status.max_steps), max(10, width - 8)
        lines.append(f"[{'█' * round(done * room)}{'░' * (room - round(done * room))}] {100 * done:3.0f} %")
    counts = status.counts
    dropped = counts.stale + counts.late
    counted = f"contributions: {counts.accepted:,} counted, {dropped:,} dropped"
    if dropped and status.policy.has_common_steps and status.total_num_replicas > status.replicas_to_aggregate:
        counted += f" (as it should be: a step takes the first {status.replicas_to_aggregate})"
    return [*lines, counted, _cost(look), *_kept(status)]


def _curves(speed: Sequence[Point], metrics: Mapping[str, Sequence[Point]], width: int) -> list[str]:
    room, lines = max(10, width - _LABEL - 12), []
    for name, points in [("steps/s", speed), *list(metrics.items())[:_MAX_METRICS]]:
        values = [value for _, _, value in points if value is not None]
        if values:
            lines.append(f"{printable(name)[:_LABEL]:<{_LABEL}} {values[-1]:>10.4g} {sparkline(_squeezed(values, room))}"[:width])
    if len(metrics) > _MAX_METRICS:
        lines.append(f"… and {len(metrics) - _MAX_METRICS} more metrics, on the page")
    return lines


def _steps(status: ClusterStatus, look: Look, width: int) -> list[str]:
    if not status.ledger:
        return []
    times = [entry.duration_s for entry in reversed(status.ledger)]
    ordered = sorted(times)
    bar = sparkline(times[-max(10, width - _LABEL - 12) :], low=0.0, high=ordered[int(_MOST * (len(times) - 1))])
    waiting, applying = (sum(getattr(entry, name) for entry in status.ledger) for name in ("wait_duration_s", "apply_duration_s"))
    shares = [(word, 100 * part / (sum(times) or 1.0)) for word, part in (("waiting", waiting), ("applying", applying))]
    words = ", ".join([f"computing {100 - sum(share for _, share in shares):.0f} %", *(f"{word} {share:.0f} %" for word, share in shares)])
    return _cut([f"{'step times':<{_LABEL}} {duration_text(ordered[len(times) // 2]):>10} {bar}", f"{'':<{_LABEL + 11}} {words}"], width)


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Returns one character for each value; a larger value has a taller bar."""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int((value - low) / span * len(_BARS))))] for value in values)


def _squeezed(values: Sequence[float], room: int) -> list[float]:
    """Returns at most `room` values: the means of neighbouring ones."""
    if len(values) <= room:
        return list(values)
    edges = [index * len(values) // room for index in range(room + 1)]
    return [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
