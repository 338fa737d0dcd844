"""`python -m benchmarks.peers`: Lockstep beside what a user would otherwise take. Knows the arguments and the order of the runs."""

import argparse
import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.cluster_run import run_cluster
from benchmarks.figures import RunFigures, human_bytes
from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.comparison import COLUMNS, Comparison, as_row, compare
from benchmarks.peers.environments import NotInstallable, prepare
from benchmarks.peers.peer_run import run_peer
from benchmarks.plot import CannotPlot, check_plot, plot_steps
from benchmarks.workload import Workload
from lockstep.supervision import Interrupted, LaunchFailed

SIZES = ("4KiB/4", "1MiB/8", "4MB/1000", "16MiB/16", "64MiB/16", "256MiB/16")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# Up to so many bytes, so many steps: a few seconds of each system, where it is no slower than it should be.
_STEPS = ((1 << 16, 100), (1 << 21, 60), (1 << 23, 20), (1 << 25, 25), (1 << 26, 15))
_FEWEST_STEPS = 8
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares and prints the table; returns the exit code: 0 also where a peer is missing, which its rows say."""
    options = _parser().parse_args(arguments)
    try:
        workloads = [_workload(size, num_steps=options.steps) for size in options.sizes]
        if options.plot:
            check_plot(options.plot)
    except (ValueError, CannotPlot) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    environments = {name: _environment(PEERS[name]) for name in options.peers}
    report = {**_circumstances(), "sockets": "unix" if options.unix else "tcp", "rows": []}
    print(f"{report['date']}, {report['cpus']} CPUs, load average {report['load']} before the first run, repeat {options.repeat}\n")
    print(f"{as_row(COLUMNS)}\n{as_row(['---'] * len(COLUMNS))}", flush=True)
    done: list[Comparison] = []
    try:
        for comparison in _comparisons(options, workloads, environments):
            print(as_row(comparison.cells()), flush=True)
            done.append(comparison)
            report["rows"] = [each.record() for each in done]
            if options.json:  # after each row: what an interrupted run has measured is kept
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except (LaunchFailed, Interrupted) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return error.exit_code
    if options.plot:
        _plot(options.plot, workloads, done, title=f"2 workers, 1 server, SGD; {report['date']}, {report['cpus']} CPUs")
    return 0


def _comparisons(
    options: argparse.Namespace, workloads: Sequence[Workload], environments: Mapping[str, Path | NotInstallable]
) -> Iterator[Comparison]:
    for workload in workloads:

        def run_own(workload: Workload = workload) -> RunFigures:
            return run_cluster(workload, is_tcp=not options.unix, timeout_s=_TIMEOUT_S)

        for name, python in environments.items():
            if isinstance(python, NotInstallable):
                yield Comparison(workload=workload, peer=name, missing=str(python))
                continue

            def run(peer: Peer = PEERS[name], python: Path = python, workload: Workload = workload) -> RunFigures:
                return _run_peer(peer, workload, python)

            try:
                yield compare(workload, name, run_peer=run, run_own=run_own, repeat=options.repeat)
            except _PeerFailed as error:
                yield Comparison(workload=workload, peer=name, missing=str(error))


class _PeerFailed(Exception):
    """A peer did not do the work. The text says what it said."""


def _run_peer(peer: Peer, workload: Workload, python: Path) -> RunFigures:
    try:
        return run_peer(peer, workload, python=python, timeout_s=_TIMEOUT_S)
    except LaunchFailed as error:
        raise _PeerFailed(str(error)) from None


def _environment(peer: Peer) -> Path | NotInstallable:
    try:
        return prepare(peer.environment, peer.requirements, module=peer.module, note=lambda text: print(text, file=sys.stderr))
    except NotInstallable as error:
        return error


def _workload(size: str, *, num_steps: int | None) -> Workload:
    """Raises ValueError for what is no size."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)/(\d+)", size)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"--sizes {size}: want bytes/variables, such as 4KiB/4 or 1048576/8")
    total_bytes = int(match[1]) * _UNITS[match[2]]
    usual = next((steps for limit, steps in _STEPS if total_bytes <= limit), _FEWEST_STEPS)
    steps = usual if num_steps is None else num_steps
    return Workload(total_bytes=total_bytes, num_variables=int(match[3]), num_workers=2, num_ps=1, num_steps=steps)


def _plot(path: Path, workloads: Sequence[Workload], done: Sequence[Comparison], *, title: str) -> None:
    sizes = [f"{human_bytes(workload.total_bytes)}\n{workload.num_variables} variables" for workload in workloads]
    series: dict[str, list[float | None]] = {}
    own: list[float | None] = []
    for workload in workloads:
        measured = [each for each in done if each.workload == workload and not each.missing]
        ours = sorted(run.median_ms for each in measured for run in each.own_runs)
        own.append(ours[len(ours) // 2] if ours else None)
        for name in {each.peer: None for each in done}:
            series.setdefault(PEERS[name].title, []).append(next((each.peer_ms for each in measured if each.peer == name), None))
    plot_steps(path, title=title, sizes=sizes, series={"Lockstep": own, **series})


def _circumstances() -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Runs the same work on other systems and on Lockstep by turns: 2 workers, 1 server, plain SGD, synchronous."
        " Installs each of them into .venv-peers at the first use, a few GB together.",
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="BYTES/VARIABLES", help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=list(PEERS), help="default: all of them")
    parser.add_argument("--repeat", type=_at_least_one, default=3, help="runs of each system for each row, by turns (default 3)")
    parser.add_argument("--steps", type=_at_least_one, help="steps to measure in each run, after 3 that are not; 100 to 8 by size")
    parser.add_argument("--unix", action="store_true", help="Lockstep over Unix sockets instead of TCP; the peers know only TCP")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes every run's figures, after each row")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draws the medians; needs the extra `bench`")
    return parser


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, want 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
