"""Measures the page's feed and `/metrics` with very many workers. Knows the figures; uses the crowd of the workers' suite."""

import argparse
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.arguments import add_json, show
from benchmarks.harness.processes import Cluster, cpu_s
from benchmarks.report.machine import machine
from benchmarks.suites.scale.workers import one_round, start_crowd
from lockstep.launcher.spec import ClusterSpec

DESCRIPTION = "Measures what the page's feed and /metrics take with many workers, and the chief's CPU when each is asked for once a second."

_PATHS = {"metrics": "metrics", "feed": "api/cluster"}
_PERIOD_S = 1.0
# The CPU share of heartbeats varies from second to second as much as the measured cost itself.
_NUM_TURNS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=int, default=1000, help="registered workers (default 1000)")
    parser.add_argument("--processes", type=int, default=4, help="processes that these workers are in (default 4)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="seconds to measure each, in five turns (default 20)")
    parser.add_argument("--unix", action="store_true", help="Unix sockets instead of TCP")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the figures; returns the exit code."""
    show(measure(options), in_words, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Lets all workers make a step and block, and requests the chief's page meanwhile."""
    options.rounds = 1
    spec = ClusterSpec(num_ps=1, num_workers=options.workers, is_tcp=not options.unix, page="127.0.0.1:0")
    # Without access tokens: the crowd's calls are encoded beforehand.
    with Cluster(spec, security={}) as cluster:
        cluster.local.start_roles()
        with worker_client.connect(cluster.local.chief_address, worker_index=0) as session:
            session.create_or_join({"w": np.zeros(1, np.float32)}, optimizer=worker_client.sgd(0.1))
            num_processes = start_crowd(cluster, options)
            one_round(cluster, session, 1, options, num_processes)
            # The page reads the cluster's status once a second also without readers, so both figures include that.
            turns = [
                {path: _share(cluster, options.seconds / _NUM_TURNS, path=path) for path in ("", *_PATHS.values())}
                for _ in range(_NUM_TURNS)
            ]
            cluster.processes.release()
        cluster.processes.await_end()
    alone = float(np.median([turn[""]["cpu"] for turn in turns]))
    rows = [_row(path, turns) for path in _PATHS.values()]
    return {"workers": options.workers, "seconds": options.seconds, "alone_cpu": alone, "rows": rows, "machine": machine()}


def _row(path: str, turns: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the figures of a path; its CPU figures are each turn's excess over the share without readers."""
    times = [ms for turn in turns for ms in turn[path]["times_ms"]]
    more = [turn[path]["cpu"] - turn[""]["cpu"] for turn in turns]
    figures = {"median_ms": float(np.median(times)), "worst_ms": max(times), "more_cpu": float(np.median(more)), "more_cpu_turns": more}
    return {"path": path, "bytes": turns[-1][path]["bytes"], "times_ms": times, **figures}


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    lines = [
        f"{report['workers']} workers; the chief with a page that has no readers: {report['alone_cpu']:.2%} of a core, heartbeats included"
    ]
    lines += [
        f"  /{row['path']}: {row['bytes'] / 1e3:.0f} KB, median {row['median_ms']:.1f} ms, worst {row['worst_ms']:.1f} ms;"
        f" once a second takes {row['more_cpu']:.2%} of a core more ({' '.join(f'{one:.2%}' for one in row['more_cpu_turns'])})"
        for row in report["rows"]
    ]
    return "\n".join(lines)


def _share(cluster: Cluster, seconds: float, *, path: str) -> dict[str, Any]:
    """Requests the path once a second for `seconds` (empty: no requests), and returns the times and the chief's share of a core."""
    times, size = [], 0
    cpu_before, begin = cpu_s(cluster.local.chief), time.monotonic()
    while (now := time.monotonic()) < begin + seconds:
        if path:
            with urllib.request.urlopen(f"{cluster.local.page_url}{path}", timeout=60) as response:
                size = len(response.read())
            times.append(1e3 * (time.monotonic() - now))
        cluster.processes.pass_time(max(0.0, min(now + _PERIOD_S, begin + seconds) - time.monotonic()))
    share = (cpu_s(cluster.local.chief) - cpu_before) / (time.monotonic() - begin)
    return {"cpu": share, "bytes": size, "times_ms": times}
