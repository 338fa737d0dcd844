"""Compares Lockstep with other systems that a user could choose. Knows the arguments and the order of the runs."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import add_files, at_least_one, check_files
from benchmarks.harness.runs import run_cluster
from benchmarks.harness.setting import SIZES, Setting, size_title, steps_for, workload_of
from benchmarks.harness.workload import Workload
from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.comparison import COLUMNS, Comparison, Contender, PeerFailed, by_turns, compare, missed_targets, rows_of
from benchmarks.peers.environments import NotInstallable, prepare
from benchmarks.peers.peer_run import run_peer
from benchmarks.peers.targets import BFLOAT16, GRPC, SHM, SOCKETS, SOCKETS_BFLOAT16
from benchmarks.report.figures import RunFigures, as_row, head_rows
from benchmarks.report.machine import machine
from benchmarks.report.plot import plot_panels
from lockstep.launcher.supervisor import LaunchFailed

# The other lineups run at three sizes only.
FEWER_SIZES = ("4KiB/4", "4MB/1000", "64MiB/16")
LINEUPS = {"sync": ("sync", 1), "async": ("async", 1), "2ps": ("sync", 2)}
OWN: dict[str, dict[str, Any]] = {
    SHM: {"transport": "shm"},
    SOCKETS: {"transport": "sockets"},
    GRPC: {"transport": "grpc"},
    SOCKETS_BFLOAT16: {"transport": "sockets", "wire": "bfloat16"},
    BFLOAT16: {"transport": "grpc", "wire": "bfloat16"},
    f"{SHM}, chief in ps": {"transport": "shm", "chief_in_ps": True},
    f"{GRPC}, chief in ps": {"transport": "grpc", "chief_in_ps": True},
}
# Contenders for some sizes only: half the bytes where bandwidth dominates, one process less where latency dominates. All others run at
# every size.
_ONLY_AT = dict.fromkeys((SOCKETS_BFLOAT16, BFLOAT16), ("64MiB/16", "256MiB/16"))
_ONLY_AT |= dict.fromkeys((f"{SHM}, chief in ps", f"{GRPC}, chief in ps"), ("4KiB/4", "1MiB/8"))
# (Most bytes, steps): a few seconds of each system, at its usual speed.
_STEPS = ((1 << 16, 200), (1 << 21, 100), (1 << 23, 20), (1 << 25, 25), (1 << 26, 15))
_FEWEST_STEPS = 8
# CPU time is counted in ticks of 10 ms, so short steps of Lockstep need more steps.
_OWN_STEPS_WITH_MANY_VARIABLES = 100
_TIMEOUT_S = 600.0

DESCRIPTION = (
    "Runs the same work on other systems and on Lockstep by turns: 2 workers, plain SGD."
    " Installs each of them into .venv-peers at the first use, a few GB together."
)


def run(options: argparse.Namespace) -> int:
    """Compares and prints the table; returns the exit code, 0 even if a peer is missing or a target is missed, which the rows show."""
    works = _works(options)
    check_files(options)
    environments = {name: _environment(PEERS[name]) for name in options.peers}
    report: dict[str, Any] = {"kind": "peers", **machine(), "repeat": options.repeat, "rows": []}
    print(f"{report['date']}, {report['cpus']} CPUs, load average {report['load']} before the first run, repeat {options.repeat}\n")
    print(head_rows(COLUMNS), flush=True)
    for comparison in _comparisons(options, works, environments):
        record = comparison.record()
        report["rows"].append(record)
        for row in rows_of(record):
            print(as_row(row), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # per row, so nothing is lost
    _print_end(report, options)
    return 0


def _print_end(report: Mapping[str, Any], options: argparse.Namespace) -> None:
    num_judged, missed = missed_targets(report["rows"])
    if num_judged:
        print(f"\n{num_judged - len(missed)} of {num_judged} targets met" + (", missed:" if missed else ""))
    for text in missed:
        print(f"- {text}")
    if options.plot:
        plot_panels(options.plot, title=f"2 workers, SGD; {report['date']}, {report['cpus']} CPUs", panels=panels(report))
    print(f"kept in {' and '.join(str(path) for path in (options.json, options.plot) if path)}")


def panels(report: Mapping[str, Any]) -> dict[str, tuple[list[str], dict[str, list[float | None]]]]:
    """Returns the plot's panels: for each number of servers and policy, the sizes, and the medians of each system (None: not measured)."""
    drawn: dict[str, tuple[list[str], dict[str, list[float | None]]]] = {}
    for record in report["rows"]:
        rows = [row for row in report["rows"] if (row["policy"], row["num_ps"]) == (record["policy"], record["num_ps"])]
        names = dict.fromkeys(name for row in rows for name in row["systems"])
        medians = {name: [row["systems"].get(name, {}).get("ms") for row in rows] for name in names}
        titles = {name: PEERS[name].title if name in PEERS else name for name in names}
        title = f"{record['policy']}, {record['num_ps']} server{'s' if record['num_ps'] > 1 else ''}"
        sizes = [size_title(workload_of(row["size"], num_steps=1)) for row in rows]
        drawn[title] = sizes, {titles[name]: values for name, values in medians.items()}
    return drawn


def _comparisons(
    options: argparse.Namespace,
    works: Sequence[tuple[str, Workload, str]],
    environments: Mapping[str, Path | NotInstallable],
) -> Iterator[Comparison]:
    for size, workload, policy in works:
        own = [
            _own_contender(name, workload, policy, options)
            for name in options.own or OWN
            if options.own or name not in _ONLY_AT or (size in _ONLY_AT[name] and policy == "sync" and workload.num_ps == 1)
        ]
        peers = [
            Contender(name=name, is_own=False, run=_PeerRun(PEERS[name], environments[name], workload, policy))
            for name in options.peers
            if PEERS[name].takes_part(policy=policy, num_ps=workload.num_ps)
        ]
        yield compare(size, workload, policy=policy, contenders=by_turns(own, peers), repeat=options.repeat, note=_note)


def _own_contender(name: str, workload: Workload, policy: str, options: argparse.Namespace) -> Contender:
    setting, steps = Setting(**OWN[name], policy=policy, is_unix=options.unix), workload.num_steps
    if options.steps is None and workload.num_variables >= 100:
        steps = max(steps, _OWN_STEPS_WITH_MANY_VARIABLES)
    own_work = dataclasses.replace(workload, num_steps=steps)

    def run() -> RunFigures:
        return run_cluster(own_work, setting=setting)

    return Contender(name=name, is_own=True, run=run)


@dataclasses.dataclass(frozen=True, slots=True)
class _PeerRun:
    """Runs a peer once; raises PeerFailed if the peer cannot be installed."""

    peer: Peer
    python: Path | NotInstallable
    workload: Workload
    policy: str

    def __call__(self) -> RunFigures:
        if isinstance(self.python, NotInstallable):
            raise PeerFailed(str(self.python))
        try:
            return run_peer(self.peer, self.workload, policy=self.policy, python=self.python, timeout_s=_TIMEOUT_S)
        except LaunchFailed as error:
            raise PeerFailed(str(error)) from None


def _environment(peer: Peer) -> Path | NotInstallable:
    try:
        return prepare(peer.environment, peer.requirements, module=peer.module, note=_note)
    except NotInstallable as error:
        return error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _works(options: argparse.Namespace) -> list[tuple[str, Workload, str]]:
    """Sizes, workloads and policies, in the order of the table. Raises WrongArguments for an invalid size."""
    works = []
    for lineup in options.lineups:
        policy, num_ps = LINEUPS[lineup]
        for size in options.sizes or (SIZES if lineup == "sync" else FEWER_SIZES):
            bare = workload_of(size, num_steps=1, num_ps=num_ps)
            steps = options.steps or steps_for(bare.total_bytes, _STEPS, fewest=_FEWEST_STEPS)
            works.append((size, dataclasses.replace(bare, num_steps=steps), policy))
    return works


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    sizes = f"default: {' '.join(SIZES)}, and for async and 2ps {' '.join(FEWER_SIZES)}"
    parser.add_argument("--sizes", nargs="+", metavar="BYTES/VARIABLES", help=sizes)
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS), help="peers to run (default: all)")
    parser.add_argument("--lineups", nargs="+", choices=list(LINEUPS), default=list(LINEUPS), help="lineups to run (default: all)")
    parser.add_argument("--own", nargs="+", choices=list(OWN), metavar="NAME", help=f"only these, at every size: {', '.join(OWN)}")
    parser.add_argument("--repeat", type=at_least_one, default=3, help="runs of each system for each row, by turns (default 3)")
    parser.add_argument("--steps", type=at_least_one, help="steps to measure in each run, after 3 that are not; 200 to 8 by size")
    parser.add_argument("--unix", action="store_true", help="Lockstep over Unix sockets instead of TCP; the peers know only TCP")
    add_files(parser, "peers.json")
