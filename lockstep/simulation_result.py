"""What a simulated training cost: step times, efficiency, dropped work, staleness. Makes figures of counts; runs nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.chief import ClusterStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The cluster at one moment of the simulated clock."""

    now: float
    status: ClusterStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Figures of the measured steps, times in seconds.

    `step_s` is the mean, `step_error_s` its standard error (of steps one after the other, in batches). `accepted_per_s`: contributions that
    became a part of a step. `efficiency`: their rate, divided by that of workers that never wait and lose nothing. `dropped`: the share of
    contributions that became no part of a step, as late or stale. Staleness is that of contributions that were not dropped.
    """

    policy: str
    num_workers: int
    num_required: int
    num_steps: int
    step_s: float
    step_error_s: float
    median_step_s: float
    p90_step_s: float
    accepted_per_s: float
    efficiency: float
    dropped: float
    mean_staleness: float
    max_staleness: int

    @property
    def num_backups(self) -> int:
        """Workers beyond those that a step needs; of use for the policy sync only."""
        return self.num_workers - self.num_required


def result_of(
    start: Moment, end: Moment, *, step_times: Sequence[float], stalenesses: Sequence[int], ideal_per_s: float
) -> SimulationResult:
    """Returns the figures of what happened between two moments; `step_times` begins with that of the first."""
    before, after, duration_s = start.status, end.status, end.now - start.now
    durations = np.diff(np.asarray(step_times, np.float64))
    num_required = after.replicas_to_aggregate
    num_steps = after.global_step - before.global_step
    accepted_per_s = num_steps * num_required / duration_s if duration_s else math.inf
    num_dropped = after.num_stale + after.num_late - before.num_stale - before.num_late
    num_contributions = num_dropped + num_steps * num_required
    return SimulationResult(
        policy=after.policy,
        num_workers=after.total_num_replicas,
        num_required=num_required,
        num_steps=num_steps,
        step_s=duration_s / num_steps,
        step_error_s=_standard_error(durations),
        median_step_s=float(np.median(durations)),
        p90_step_s=float(np.percentile(durations, 90)),
        accepted_per_s=accepted_per_s,
        efficiency=accepted_per_s / ideal_per_s,
        dropped=num_dropped / num_contributions,
        mean_staleness=float(np.mean(stalenesses)) if len(stalenesses) else 0.0,
        max_staleness=max(stalenesses, default=0),
    )


def _standard_error(durations: np.ndarray) -> float:
    """Of the mean of values that depend on those before them: by the means of up to 20 batches."""
    num_batches = min(20, len(durations) // 2)
    if num_batches < 2:
        return 0.0
    size = len(durations) // num_batches
    means = durations[: size * num_batches].reshape(num_batches, size).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(num_batches))
