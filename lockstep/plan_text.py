"""What `lockstep plan` found, for a person: tables and a recommendation. Pure: from a Plan; knows no terminal and no file."""

from collections.abc import Iterator, Sequence

from lockstep.planning import Plan
from lockstep.simulation import Costs
from lockstep.status_text import duration_text, table


def plan_text(plan: Plan) -> str:
    """Returns tables and the recommendation, for a person."""
    question = plan.question
    head = f"{question.size_text}; computing: {question.latency.text}{_costs_words(question.costs)}"
    steps = f"{plan.rows[0].num_steps} simulated steps each, seed {question.seed}"
    parts = [f"{head}\n{steps}", table(list(_rows(plan)))]
    if plan.compared:
        parts.append(table(list(_compared_rows(plan)), left=(0,)))
    return "\n\n".join([*parts, "\n".join(_advice(plan))])


def _costs_words(costs: Costs) -> str:
    named = {"calls": costs.calls_s, "send": costs.send_s, "receive": costs.receive_s, "apply": costs.apply_s}
    return "".join(f"; {name} {duration_text(value)}" for name, value in named.items() if value)


def _rows(plan: Plan) -> Iterator[Sequence[str]]:
    yield ("b", "R", "T", "step", "±", "median", "90 %", "dropped", "efficiency", "speed/worker", "")
    for row in plan.rows:
        times = (_time(row.step_s), _time(row.step_error_s), _time(row.median_step_s), _time(row.p90_step_s))
        marks = "← recommended" if row is plan.best else ""
        shares = (f"{row.dropped:.1%}", f"{row.efficiency:.1%}", f"{plan.speed(row):.3f}")
        yield (str(row.num_backups), str(row.num_required), str(row.num_workers), *times, *shares, marks)


def _compared_rows(plan: Plan) -> Iterator[Sequence[str]]:
    yield ("policy", "T", "efficiency", "speed/worker", "mean staleness", "greatest")
    for row in plan.compared:
        figures = (f"{row.efficiency:.1%}", f"{plan.speed(row):.3f}", f"{row.mean_staleness:.1f}", str(row.max_staleness))
        yield (row.policy, str(row.num_workers), *figures)


def _advice(plan: Plan) -> Iterator[str]:
    best, shortest = plan.best, plan.shortest
    flags = f"--replicas-to-aggregate {best.num_required} --total-num-replicas {best.num_workers}"
    gain = f"{plan.speed(best) - 1:+.1%} contributions a second and worker against b = 0" if best.num_backups else "backups gain nothing"
    yield f"recommended: b = {best.num_backups} ({gain}): {flags}"
    if plan.question.num_required and shortest.num_backups > best.num_backups:
        by, more = f"{1 - shortest.step_s / best.step_s:.1%}", shortest.num_workers - best.num_workers
        yield f"the shortest step has b = {shortest.num_backups}: {by} shorter, but each worker gets less done ({more} more of them)"
    if plan.question.num_workers and best.num_backups:
        yield f"a step is then the mean of {best.num_required} contributions, not {best.num_workers}: its gradient is a little noisier"
    if best is plan.rows[-1] and len(plan.rows) > 1:
        yield f"more than {best.num_backups} backups were not tried; name them with --backups"


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"
