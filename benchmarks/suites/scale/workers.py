"""Measures very many workers that wait for one chief. Knows the crowd's processes and the figures."""

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.arguments import add_json, show
from benchmarks.harness.processes import Cluster, cpu_s, peak_rss_bytes, rss_bytes
from benchmarks.suites.scale.crowd import Crowd
from lockstep.launcher.spec import ClusterSpec
from worker_client import Session

_TIMEOUT_S = 180.0
# The pause between the moment when all workers block and the commit, so that earlier work is over.
_QUIET_S = 0.5

DESCRIPTION = "Measures many workers that block on one chief: how long until the last of them has its token."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=int, default=1000, help="registered workers (default 1000)")
    parser.add_argument("--processes", type=int, default=4, help="processes that these workers are in (default 4)")
    parser.add_argument("--rounds", type=int, default=10, help="steps to measure (default 10)")
    parser.add_argument("--unix", action="store_true", help="Unix sockets instead of TCP")
    parser.add_argument("--look", type=float, default=5.0, metavar="S", help="seconds to measure heartbeats alone (default 5)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the figures; returns the exit code."""
    show(measure(options), in_words, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Lets all workers but one contribute and block, completes the step with the last one, and times the tokens; several rounds."""
    spec = ClusterSpec(workers=options.workers, tcp=not options.unix)
    # Without tokens: the calls of the crowd are bytes made beforehand.
    with Cluster(spec, security={}) as cluster:
        cluster.local.start_roles()
        chief = cluster.local.chief
        empty_bytes = rss_bytes(chief)
        with worker_client.connect(cluster.local.chief_address, worker_index=0) as session:
            session.create_or_join({"w": np.zeros(1, np.float32)}, optimizer=worker_client.sgd(0.1))
            num_processes = start_crowd(cluster, options)
            registered = cluster.processes.await_events("registered", num_processes, timeout_s=_TIMEOUT_S)
            await_blocked(cluster, session, num_workers=options.workers - 1)
            calm = _look(cluster, seconds=options.look)
            rounds = [one_round(cluster, session, number, options, num_processes) for number in range(1, options.rounds + 1)]
            rss, peak = rss_bytes(chief), peak_rss_bytes(chief)
            cluster.processes.release()
        end_s = cluster.processes.await_end()
    return {
        "workers": options.workers,
        "processes": num_processes,
        "sockets": "unix" if options.unix else "tcp",
        "registration_s": max(event["end"] for event in registered) - min(event["begin"] for event in registered),
        "chief_empty_bytes": empty_bytes,
        "chief_bytes": rss,
        "chief_peak_bytes": peak,
        **calm,
        "release_ms": [1e3 * each["last"] for each in rounds],
        "first_token_ms": [1e3 * each["first"] for each in rounds],
        "median_token_ms": [1e3 * each["median"] for each in rounds],
        "chief_cpu_ms": [1e3 * each["chief_cpu"] for each in rounds],
        "end_s": end_s,
    }


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    release, first = report["release_ms"], report["first_token_ms"]
    return "\n".join(
        [
            f"{report['workers']} workers in {report['processes']} processes over {report['sockets']}",
            f"  from the completing contribution to the last token: median {np.median(release):.0f} ms, worst {max(release):.0f} ms,"
            f" each round {[round(value) for value in release]}",
            f"  to the first token {np.median(first):.1f} ms, to half of them {np.median(report['median_token_ms']):.0f} ms;"
            f" CPU of the chief {np.median(report['chief_cpu_ms']):.0f} ms",
            f"  chief: {report['chief_empty_bytes'] / 1e6:.0f} MB alone, {report['chief_bytes'] / 1e6:.0f} MB with all of them,"
            f" {report['chief_peak_bytes'] / 1e6:.0f} MB at most",
            f"  registered in {report['registration_s']:.2f} s; heartbeats alone take {report['heartbeat_cpu']:.1%} of a core of the chief;"
            f" lockstep status {report['status_s']:.2f} s; all ended {report['end_s']:.2f} s after the request",
        ]
    )


def start_crowd(cluster: Cluster, options: argparse.Namespace) -> int:
    """Starts the processes of all workers but the first, and returns their number."""
    bounds = np.linspace(1, options.workers, min(options.processes, options.workers - 1) + 1).astype(int).tolist()
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        crowd = Crowd(
            chief=cluster.local.chief_address,
            first=first,
            count=end - first,
            num_rounds=options.rounds,
            pause_s=_QUIET_S,
        )
        cluster.processes.start(f"crowd {number}", cluster.processes.worker_command("benchmarks.suites.scale.crowd", crowd))
    return len(bounds) - 1


def one_round(cluster: Cluster, session: Session, number: int, options: argparse.Namespace, num_processes: int) -> dict[str, float]:
    """Makes one step; times are in seconds since the begin of the last contribution's push."""
    await_blocked(cluster, session, num_workers=options.workers - 1)
    cluster.processes.pass_time(_QUIET_S)
    cpu_before, begin = cpu_s(cluster.local.chief), time.monotonic()
    push = session.push({"w": np.zeros(1, np.float32)})
    session.wait(timeout_s=_TIMEOUT_S)
    events = cluster.processes.await_events("tokens", number * num_processes, timeout_s=_TIMEOUT_S)[-num_processes:]
    used_s = cpu_s(cluster.local.chief) - cpu_before
    assert push.is_accepted and {(event["step"], event["is_one_step"]) for event in events} == {(push.step + 1, True)}
    times = np.sort(np.concatenate([event["times"] for event in events])) - begin
    return {"first": float(times[0]), "median": float(np.median(times)), "last": float(times[-1]), "chief_cpu": used_s}


def await_blocked(cluster: Cluster, session: Session, *, num_workers: int) -> None:
    """Waits until `num_workers` workers block on a token."""
    for _ in cluster.processes.polls(timeout_s=_TIMEOUT_S, what=f"{num_workers} blocked workers"):
        if sum(one.is_waiting for one in session.status().participants) == num_workers:
            return
        cluster.processes.pass_time(0.1)


def _look(cluster: Cluster, *, seconds: float) -> dict[str, float]:
    """Measures the chief while all workers block and only send heartbeats, and then `lockstep status`."""
    chief = cluster.local.chief
    cpu_before, begin = cpu_s(chief), time.monotonic()
    cluster.processes.pass_time(seconds)
    share = (cpu_s(chief) - cpu_before) / max(1e-9, time.monotonic() - begin)
    statuses: Sequence[float] = [cluster.time_status() for _ in range(3)]
    return {"heartbeat_cpu": share, "status_s": float(np.median(statuses))}
