"""Compares runs of peers and of Lockstep by turns: medians, ratios, targets, rows of a table. Starts nothing itself."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.workload import Workload
from benchmarks.peers.targets import Target, targets_of
from benchmarks.report.figures import RunFigures, by_role, human_bytes

PEER_COLUMNS = ("tensorflow", "gloo", "gloo-flat", "mxnet")
COLUMNS = (
    *("size", "variables", "ps", "policy", "system", "ms a step", *(f"/ {name}" for name in PEER_COLUMNS), "targets", "each run"),
    *("CPU ms/step: all", "… each", "peak MiB: each", "memory of all, MiB"),
)
NOTHING = "–"
_MIB = 1 << 20


class PeerFailed(Exception):
    """A peer could not be installed, or failed. The text has its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A system in the comparison: `run` runs the work once. It may raise PeerFailed if `is_own` is not set."""

    name: str
    is_own: bool
    run: Callable[[], RunFigures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload, run by all contenders by turns. `runs`, and `missing` (the reason why there are none), are by contender's name."""

    size: str
    workload: Workload
    policy: str
    own: Sequence[str]
    runs: Mapping[str, Sequence[RunFigures]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Own ones first."""
        return [*self.own, *(name for name in [*self.runs, *self.missing] if name not in self.own)]

    def ms(self, name: str) -> float:
        """The median of the medians of a contender's runs."""
        return statistics.median(run.median_ms for run in self.runs[name])

    def ratio(self, name: str, *, peer: str) -> float | None:
        """The ratio of `name`'s time to the peer's: below 1, `name` takes less time. None if one of them has no runs."""
        return self.ms(name) / self.ms(peer) if name in self.runs and peer in self.runs else None

    def verdicts(self, name: str) -> Iterator[tuple[Target, float]]:
        """Yields the targets of a Lockstep contender that can be checked here, with the ratios."""
        if self.policy == "sync" and self.workload.num_ps == 1:
            for target in targets_of(self.size, name):
                ratio = self.ratio(name, peer=target.peer)
                if ratio is not None:
                    yield target, ratio

    def record(self) -> dict[str, Any]:
        """Returns the comparison as fields for JSON: `systems` has the figures for the rows of the table."""
        return {
            "size": self.size,
            "total_bytes": self.workload.total_bytes,
            "num_variables": self.workload.num_variables,
            "num_ps": self.workload.num_ps,
            "num_workers": self.workload.num_workers,
            "policy": self.policy,
            "systems": {name: self._system(name) for name in self.names},
        }

    def _system(self, name: str) -> dict[str, Any]:
        if name not in self.runs:
            return {"missing": " ".join(self.missing[name].split())}
        is_own, runs = name in self.own, self.runs[name]
        ratios = {peer: self.ratio(name, peer=peer) for peer in self.names if is_own and peer not in self.own}
        verdicts = list(self.verdicts(name)) if is_own else []
        return {
            "ms": round(self.ms(name), 3),
            "medians_ms": [round(run.median_ms, 3) for run in runs],
            "p90_ms": [round(run.p90_ms, 3) for run in runs],
            "ratios": {peer: round(ratio, 4) for peer, ratio in ratios.items() if ratio is not None},
            "targets": [
                {"peer": target.peer, "at_most": target.at_most, "ratio": round(ratio, 4), "text": target.verdict(ratio)}
                for target, ratio in verdicts
            ],
            "transports": sorted({transport for run in runs for transport in run.transports}),
            "cpu_ms_per_step": {role: round(value, 3) for role, value in cpu_ms(runs).items()},
            "total_cpu_ms_per_step": round(statistics.median(run.total_cpu_s_per_step for run in runs) * 1e3, 3),
            "peak_mib": {role: round(value, 1) for role, value in peak_mib(runs).items()},
            "total_pss_mib": round(max(run.total_pss_bytes for run in runs) / _MIB, 1),
        }


def compare(
    size: str,
    workload: Workload,
    *,
    policy: str,
    contenders: Sequence[Contender],
    repeat: int,
    note: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Runs the work on each contender in turn, `repeat` times, so that a busy minute of the machine affects all of them.

    A peer that fails is left out of the later turns and of the result.
    """
    runs: dict[str, list[RunFigures]] = {contender.name: [] for contender in contenders}
    missing: dict[str, str] = {}
    for turn in range(repeat):
        for contender in contenders:
            if contender.name in missing:
                continue
            note(f"{size}, {workload.num_ps} ps, {policy}: {contender.name}, run {turn + 1} of {repeat}")
            try:
                runs[contender.name].append(contender.run())
            except PeerFailed as error:
                missing[contender.name] = str(error)
    own = [contender.name for contender in contenders if contender.is_own]
    whole = {name: found for name, found in runs.items() if name not in missing}
    return Comparison(size=size, workload=workload, policy=policy, own=own, runs=whole, missing=missing)


def by_turns(own: Sequence[Contender], peers: Sequence[Contender]) -> list[Contender]:
    """Alternates Lockstep's contenders and peers as long as there are both."""
    longest = range(max(len(own), len(peers)))
    return [group[index] for index in longest for group in (own, peers) if index < len(group)]


def rows_of(record: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the rows of the table with the columns COLUMNS, from the result of `Comparison.record`."""
    head = [human_bytes(record["total_bytes"]), str(record["num_variables"]), str(record["num_ps"]), record["policy"]]
    for name, system in record["systems"].items():
        if "missing" in system:
            yield [*head, name, f"missing: {system['missing']}", *[NOTHING] * (len(COLUMNS) - len(head) - 2)]
            continue
        ratios = [f"{system['ratios'][peer]:.3g}" if peer in system["ratios"] else NOTHING for peer in PEER_COLUMNS]
        targets = "; ".join(target["text"] for target in system["targets"]) or NOTHING
        each_run = " ".join(f"{value:.3g}" for value in system["medians_ms"])
        cpu, memory = by_role(system["cpu_ms_per_step"], "{:.1f}"), by_role(system["peak_mib"], "{:.0f}")
        figures = [f"{system['total_cpu_ms_per_step']:.1f}", cpu, memory, f"{system['total_pss_mib']:.0f}"]
        yield [*head, name, f"{system['ms']:.2f}", *ratios, targets, each_run, *figures]


def missed_targets(records: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Returns the number of targets that were checked, and a description of each that was missed."""
    judged = [
        (f"{record['size']}, {name}: {target['text']} ({target['ratio']:.3g})", target["ratio"] <= target["at_most"])
        for record in records
        for name, system in record["systems"].items()
        for target in system.get("targets", ())
    ]
    return len(judged), [text for text, is_met in judged if not is_met]


def cpu_ms(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Returns CPU milliseconds per step of one process of each role: the median of the runs."""
    return {role: statistics.median(run.cpu_s_per_step[role] for run in runs) * 1e3 for role in runs[0].cpu_s_per_step}


def peak_mib(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Returns the peak resident memory of a process of each role, in any of the runs."""
    return {role: max(run.peak_rss_bytes[role] for run in runs) / _MIB for role in runs[0].peak_rss_bytes}
