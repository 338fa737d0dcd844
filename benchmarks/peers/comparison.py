"""Runs of a peer and of Lockstep by turns, and what they come to: medians, their ratio, rows of a table. Knows numbers; starts nothing."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.figures import RunFigures, human_bytes
from benchmarks.workload import Workload

COLUMNS = (
    *("size", "variables", "peer", "peer ms", "own ms", "own / peer"),
    *("peer: CPU ms/step", "own: CPU ms/step", "peer: peak MiB", "own: peak MiB"),
)
_NOTHING = "–"
# A server's role comes before its workers.
_ROLE_ORDER = ("ps", "server", "scheduler", "worker", "chief")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload on one peer and on Lockstep. `peer_runs` and `own_runs` were made by turns; `missing` says why there are none."""

    workload: Workload
    peer: str
    peer_runs: Sequence[RunFigures] = field(default_factory=tuple)
    own_runs: Sequence[RunFigures] = field(default_factory=tuple)
    missing: str = ""

    @property
    def peer_ms(self) -> float:
        """Median of the medians of the peer's runs."""
        return statistics.median(run.median_ms for run in self.peer_runs)

    @property
    def own_ms(self) -> float:
        """Median of the medians of our runs."""
        return statistics.median(run.median_ms for run in self.own_runs)

    @property
    def ratio(self) -> float:
        """Below 1: Lockstep's step takes less time."""
        return self.own_ms / self.peer_ms

    def cells(self) -> list[str]:
        """Returns the row of the table that COLUMNS heads."""
        head = [human_bytes(self.workload.total_bytes), str(self.workload.num_variables), self.peer]
        if self.missing:
            return [*head, f"missing: {' '.join(self.missing.split())}", *[_NOTHING] * (len(COLUMNS) - len(head) - 1)]
        times = [f"{self.peer_ms:.2f}", f"{self.own_ms:.2f}", f"{self.ratio:.2f}"]
        cpu = [_by_role(cpu_ms(runs), "{:.1f}") for runs in (self.peer_runs, self.own_runs)]
        memory = [_by_role(peak_mib(runs), "{:.0f}") for runs in (self.peer_runs, self.own_runs)]
        return [*head, *times, *cpu, *memory]

    def record(self) -> dict[str, object]:
        """Returns all of it for a file of JSON."""
        what: dict[str, object] = {
            "total_bytes": self.workload.total_bytes,
            "num_variables": self.workload.num_variables,
            "num_steps": self.workload.num_steps,
            "peer": self.peer,
        }
        if self.missing:
            return {**what, "missing": self.missing}
        ratio = {"peer_ms": round(self.peer_ms, 3), "own_ms": round(self.own_ms, 3), "ratio": round(self.ratio, 4)}
        return {**what, **ratio, "peer_runs": _record(self.peer_runs), "own_runs": _record(self.own_runs)}


def compare(
    workload: Workload, peer: str, *, run_peer: Callable[[], RunFigures], run_own: Callable[[], RunFigures], repeat: int
) -> Comparison:
    """Runs peer, own, peer, own, …, each `repeat` times, so that a minute in which the machine is busy falls on both."""
    peer_runs, own_runs = [], []
    for _ in range(repeat):
        peer_runs.append(run_peer())
        own_runs.append(run_own())
    return Comparison(workload=workload, peer=peer, peer_runs=peer_runs, own_runs=own_runs)


def cpu_ms(runs: Sequence[RunFigures]) -> dict[str, float]:
    """CPU milliseconds a step of one process of each role: the median of the runs."""
    return {role: statistics.median(run.cpu_s_per_step[role] for run in runs) * 1e3 for role in _roles(runs[0].cpu_s_per_step)}


def peak_mib(runs: Sequence[RunFigures]) -> dict[str, float]:
    """The most memory that a process of each role had resident, in any of the runs."""
    return {role: max(run.peak_rss_bytes[role] for run in runs) / (1 << 20) for role in _roles(runs[0].peak_rss_bytes)}


def as_row(cells: Sequence[str]) -> str:
    """Returns a row of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _roles(known: Mapping[str, object]) -> list[str]:
    return sorted(known, key=lambda role: _ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER))


def _by_role(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{role} {form.format(value)}" for role, value in values.items())


def _record(runs: Sequence[RunFigures]) -> dict[str, object]:
    return {
        "medians_ms": [round(run.median_ms, 3) for run in runs],
        "p90_ms": [round(run.p90_ms, 3) for run in runs],
        "cpu_ms_per_step": {role: round(value, 3) for role, value in cpu_ms(runs).items()},
        "peak_mib": {role: round(value, 1) for role, value in peak_mib(runs).items()},
    }
