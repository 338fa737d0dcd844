"""The figures of a benchmark, with summaries and tables. Knows numbers; not how they were measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run: wall seconds of each step at worker 0, CPU seconds per step of one process of each role, and its memory.

    `peak_rss_bytes` counts shared pages in full in every process that has them. `pss_bytes`, measured after the last step, divides each
    shared page by the number of its processes, so values can be added: `total_pss_bytes` is the sum over all processes. 0: unknown.
    `transports`: the sessions' transports.
    """

    step_s: list[float]
    cpu_s_per_step: dict[str, float]
    peak_rss_bytes: dict[str, int]
    num_accepted: int
    pss_bytes: dict[str, int] = field(default_factory=dict)
    total_pss_bytes: int = 0
    transports: Sequence[str] = ()
    num_processes: dict[str, int] = field(default_factory=dict)

    @property
    def total_cpu_s_per_step(self) -> float:
        """CPU seconds per step of all processes together, if their numbers are known."""
        return sum(value * self.num_processes.get(role, 1) for role, value in self.cpu_s_per_step.items())

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return float(np.median(self.step_s)) * 1e3

    @property
    def p90_ms(self) -> float:
        """The 90th percentile of the step times."""
        return float(np.quantile(self.step_s, 0.9)) * 1e3


def summary(runs: Sequence[RunFigures]) -> dict[str, object]:
    """Returns the run with the median of the medians (the lower one of two), and the medians of all runs, whose spread is the noise."""
    middle = sorted(runs, key=lambda run: run.median_ms)[(len(runs) - 1) // 2]
    return {
        "median_ms": round(middle.median_ms, 3),
        "p90_ms": round(middle.p90_ms, 3),
        "cpu_s_per_step": {role: round(value, 6) for role, value in sorted(middle.cpu_s_per_step.items())},
        "total_cpu_s_per_step": round(middle.total_cpu_s_per_step, 6),
        "peak_rss_bytes": dict(sorted(middle.peak_rss_bytes.items())),
        "pss_bytes": dict(sorted(middle.pss_bytes.items())),
        "total_pss_bytes": middle.total_pss_bytes,
        "num_accepted": middle.num_accepted,
        "medians_ms": [round(run.median_ms, 3) for run in runs],
    }


def human_bytes(count: int) -> str:
    """For example "4 KiB", "4 MB", "1.5 GiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    if count and not count % 1_000_000:
        size, units = count / 1_000_000, ["MB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


# Servers before their workers.
_ROLE_ORDER = ("ps", "server", "scheduler", "worker", "chief", "process")


def by_role(values: Mapping[str, float], form: str) -> str:
    """For example "ps 1.2, worker 0.3", servers first."""
    known = sorted(values, key=lambda role: _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER))
    return ", ".join(f"{role} {form.format(values[role])}" for role in known)


def head_rows(columns: Sequence[str]) -> str:
    """Returns the first two lines of a table in Markdown."""
    return f"{as_row(columns)}\n{as_row(['---'] * len(columns))}"


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a whole table in Markdown."""
    return [head_rows(columns), *map(as_row, rows)]


def as_row(cells: Sequence[str]) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
