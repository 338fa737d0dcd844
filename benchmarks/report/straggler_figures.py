"""The figures of the stragglers' benchmark, from its workers' reports and from a plan's predictions. Knows numbers; runs no process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.planning.latencies import measured
from lockstep.planning.plan import Question, make_plan
from lockstep.planning.simulation import Costs, SimulationResult
from lockstep.planning.times import ComputingTime, times_by_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """An evaluation on the test examples, with the variables of `step`, which this worker had at the time `at`."""

    step: int
    at: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """One worker's report, by a clock that all processes share: for each step its begin and computing time; and the end."""

    steps: list[int] = field(default_factory=list)
    began_at: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    num_accepted: int = 0
    num_delayed: int = 0
    ended_at: float = 0.0
    last_step: int = 0
    looks: list[Look] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfArm:
    """One training: seconds of each step, computing times of workers, evaluations of the model; times of `looks` count from the start."""

    num_required: int
    step_s: list[float]
    times: list[ComputingTime]
    overhead_s: float
    num_accepted: int
    num_dropped: int
    num_delayed: int
    looks: list[Look]

    @property
    def seconds(self) -> float:
        """Duration of the training."""
        return sum(self.step_s)


def run_of_arm(reports: Sequence[StragglerReport], *, num_required: int) -> RunOfArm:
    """Returns the figures of one training. A step begins when the first worker has its token, and ends when the next one begins."""
    began: dict[int, float] = {}
    slowest: dict[int, float] = {}
    for report in reports:
        for step, at, seconds in zip(report.steps, report.began_at, report.computed_s, strict=True):
            began[step] = min(at, began.get(step, at))
            slowest[step] = max(seconds, slowest.get(step, 0.0))
    began[max(report.last_step for report in reports)] = min(report.ended_at for report in reports)
    steps = sorted(began)
    step_s = np.diff([began[step] for step in steps])
    # If a step waits for all workers, its time beyond the slowest computation is that of calls, transfers and the update.
    overheads = [duration - slowest[step] for step, duration in zip(steps, step_s, strict=False)]
    start = began[steps[0]]
    num_accepted = sum(report.num_accepted for report in reports)
    return RunOfArm(
        num_required=num_required,
        step_s=step_s.tolist(),
        times=[
            ComputingTime(worker=index, step=step, seconds=seconds)
            for index, report in enumerate(reports)
            for step, seconds in zip(report.steps, report.computed_s, strict=True)
        ],
        overhead_s=max(0.0, float(np.median(overheads))),
        num_accepted=num_accepted,
        num_dropped=sum(len(report.steps) for report in reports) - num_accepted,
        num_delayed=sum(report.num_delayed for report in reports),
        looks=[
            Look(step=look.step, at=look.at - start, loss=look.loss, accuracy=look.accuracy) for report in reports for look in report.looks
        ],
    )


def look_at_time(looks: Sequence[Look], seconds: float) -> Look:
    """Returns the last evaluation until then, or the first one."""
    return max((look for look in looks if look.at <= seconds), key=lambda look: look.at, default=looks[0])


def arm_figures(runs: Sequence[RunOfArm], *, same_time_s: float) -> dict[str, object]:
    """Summarizes the runs of one arm: figures of all steps together, and medians over the runs for the model."""
    step_ms = 1e3 * np.concatenate([run.step_s for run in runs])
    ends, at_time = [run.looks[-1] for run in runs], [look_at_time(run.looks, same_time_s) for run in runs]
    num_accepted, num_dropped = sum(run.num_accepted for run in runs), sum(run.num_dropped for run in runs)
    return {
        "num_required": runs[0].num_required,
        "num_steps": len(step_ms),
        "mean_ms": float(step_ms.mean()),
        "mean_ms_of_runs": [1e3 * run.seconds / len(run.step_s) for run in runs],
        "median_ms": float(np.median(step_ms)),
        "p90_ms": float(np.quantile(step_ms, 0.9)),
        "p99_ms": float(np.quantile(step_ms, 0.99)),
        "steps_per_s": float(1e3 / step_ms.mean()),
        "num_accepted": num_accepted,
        "num_dropped": num_dropped,
        "dropped": num_dropped / (num_accepted + num_dropped),
        "overhead_ms": 1e3 * float(np.median([run.overhead_s for run in runs])),
        "same_steps": _model(ends),
        "same_time": {"seconds": same_time_s, "step": float(np.median([look.step for look in at_time])), **_model(at_time)},
    }


def predict(runs: Sequence[RunOfArm], *, num_workers: int, backups: Sequence[int], calls_s: float, seed: int) -> list[SimulationResult]:
    """Returns the predictions of `lockstep plan` for each number of backups, from the computing times of runs without backups."""
    latency = measured(times_by_worker(row for run in runs for row in run.times))
    question = Question(
        latency=latency, costs=Costs(calls_s=calls_s), num_workers=num_workers, backups=tuple(backups), num_rounds=2000, seed=seed
    )
    rows = {row.num_backups: row for row in make_plan(question).rows}
    return [rows[number] for number in backups]


def _model(looks: Sequence[Look]) -> dict[str, float]:
    return {"loss": float(np.median([look.loss for look in looks])), "accuracy": float(np.median([look.accuracy for look in looks]))}
