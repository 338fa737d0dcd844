"""Measures a parameter server's memory, and whether it grows. Knows processes and /proc; no step, no tensor.

Two measurements, each over gRPC, sockets and shared memory, on a parameter server, a chief and two workers. The first is the most memory
that the server has resident with 256 MiB of variables, against the variables twice, the slots, one contribution of each worker, and 64 MiB
for everything else. The second is its memory and its descriptors over 2,000 steps of 1 MiB: a line fitted to the second half gives the
growth.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import process_memory
from benchmarks.harness.arguments import add_json, parse_bytes
from benchmarks.harness.processes import Cluster
from benchmarks.harness.runs import WORKER
from benchmarks.harness.workload import NUM_SLOTS, Workload
from benchmarks.report.figures import human_bytes
from lockstep.launcher.spec import ClusterSpec

TRANSPORTS = ("grpc", "sockets", "shared_memory")
_NUM_WORKERS = 2
_OVERHEAD_BYTES = 64 << 20
_GROWTH_LIMIT_BYTES = 1 << 20
_LARGE = {"bytes": 256 << 20, "variables": 16, "steps": 8, "every": 1}
_LONG = {"bytes": 1 << 20, "variables": 8, "steps": 2000, "every": 100}
_TIMEOUT_S = 600.0

DESCRIPTION = "Measures the memory of a parameter server, and its growth."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns 1 if a bound was exceeded."""
    rows = []
    for transport in options.transports:
        if "large" in options.only:
            rows.append(_large({**_LARGE, "bytes": options.bytes, "optimizer": options.optimizer}, transport=transport))
        if "long" in options.only:
            work = {**_LONG, "steps": options.steps, "every": max(1, options.steps // 20), "optimizer": "sgd"}
            rows.append(_long(work, transport=transport))
        if not options.json:
            print("\n".join(_in_words(row) for row in rows[-len(options.only) :]), flush=True)
    if options.json:
        print(json.dumps(rows))
    return 0 if all(row["is_within"] for row in rows) else 1


def _large(work: dict[str, Any], *, transport: str) -> dict[str, Any]:
    samples = _run(work, transport=transport)
    bound = work["bytes"] * (2 + NUM_SLOTS[work["optimizer"]] + _NUM_WORKERS) + _OVERHEAD_BYTES
    peak = max(sample["ps"]["peak_bytes"] for sample in samples)
    last = {role: {**figures} for role, figures in samples[-1].items() if isinstance(figures, dict)}
    return {
        "kind": "peak",
        "transport": transport,
        **work,
        "peak_bytes": peak,
        "bound_bytes": bound,
        "is_within": peak <= bound,
        "end": last,
    }


def _long(work: dict[str, Any], *, transport: str) -> dict[str, Any]:
    samples = _run(work, transport=transport)
    half = samples[len(samples) // 2 :]
    growth = {role: _growth([sample[role]["rss_bytes"] for sample in half]) for role in ("ps", "chief", "worker 0")}
    descriptors = [sample["ps"]["num_descriptors"] for sample in half]
    is_flat = growth["ps"] < _GROWTH_LIMIT_BYTES and max(descriptors) - min(descriptors) <= 1
    return {
        "kind": "growth",
        "transport": transport,
        **work,
        "growth_bytes": growth,
        "descriptors": [samples[0]["ps"]["num_descriptors"], descriptors[0], descriptors[-1]],
        "rss_bytes": [sample["ps"]["rss_bytes"] for sample in samples],
        "is_within": is_flat,
    }


def _growth(values: Sequence[float]) -> float:
    """Returns the rise of a line fitted to equally spaced values, from the first to the last."""
    last = len(values) - 1
    return statistics.linear_regression(range(last + 1), values).slope * last if last else 0.0


def _run(work: dict[str, Any], *, transport: str) -> list[dict[str, Any]]:
    """Returns each process's memory and descriptors at every progress report of the first worker."""
    workload = Workload(
        total_bytes=work["bytes"],
        num_variables=work["variables"],
        num_workers=_NUM_WORKERS,
        num_ps=1,
        num_steps=work["steps"],
        optimizer=work["optimizer"],
    )
    samples: list[dict[str, Any]] = []
    with Cluster(ClusterSpec(workers=_NUM_WORKERS, tcp=True)) as cluster:
        cluster.local.start_roles()
        orders = {"workload": asdict(workload), "keeps_stepping": False, "say_every": work["every"]}
        cluster.start_workers(WORKER, orders, environment={"LOCKSTEP_TRANSPORT": transport})
        seen = {"ps": cluster.servers[0], "chief": cluster.local.chief, **{worker.name: worker for worker in cluster.local.workers}}
        cluster.processes.await_events("up", _NUM_WORKERS, timeout_s=_TIMEOUT_S)
        cluster.processes.go()
        for _ in cluster.processes.polls(timeout_s=_TIMEOUT_S, what="steps of the first worker"):
            events = [event for event in cluster.processes.events.get("step", ()) if event["process"] == "worker 0"]
            samples += [{"step": event["step"], **{role: look(one.pid) for role, one in seen.items()}} for event in events[len(samples) :]]
            if len(samples) >= work["steps"] // work["every"]:
                break
        cluster.processes.release()
        cluster.processes.await_end()
    return samples


def look(pid: int) -> dict[str, int]:
    """Returns a process's memory in bytes (peak, present, shared part, proportional share), and its numbers of descriptors and threads.

    The peak counts every page that it has mapped once, also pages that other processes share.
    """
    directory = Path(f"/proc/{pid}")
    return {
        "peak_bytes": process_memory.peak_rss_bytes(pid),
        "rss_bytes": process_memory.rss_bytes(pid),
        "shared_bytes": process_memory.shared_bytes(pid),
        "pss_bytes": process_memory.pss_bytes(pid),
        "num_descriptors": len(list((directory / "fd").iterdir())),
        "num_threads": len(list((directory / "task").iterdir())),
    }


def _in_words(row: dict[str, Any]) -> str:
    size = f"{human_bytes(row['bytes'])} in {row['variables']} variables, {row['optimizer']}, {row['transport']}"
    verdict = "within" if row["is_within"] else "BEYOND"
    if row["kind"] == "peak":
        ps, worker = row["end"]["ps"], row["end"]["worker 0"]
        shares = f"a worker {_mib(worker['rss_bytes'])} (its share {_mib(worker['pss_bytes'])})"
        return (
            f"{size}: the server had at most {_mib(row['peak_bytes'])}, {verdict} the bound of {_mib(row['bound_bytes'])}; at the end"
            f" {_mib(ps['rss_bytes'])} ({_mib(ps['shared_bytes'])} shared), {shares}"
        )
    growth = ", ".join(f"{role} {nbytes / 2**20:+.2f} MiB" for role, nbytes in row["growth_bytes"].items())
    sizes = " ".join(f"{nbytes / 2**20:.1f}" for nbytes in row["rss_bytes"])
    first, middle, last = row["descriptors"]
    return (
        f"{size}: growth over the second half of {row['steps']} steps, {verdict} the bound: {growth}\n"
        f"  the server's MiB: {sizes}; its descriptors: {first}, {middle}, {last}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="how the workers reach it (default: all)")
    parser.add_argument(
        "--only", nargs="+", choices=("large", "long"), default=("large", "long"), help="which measurements (default: both)"
    )
    parser.add_argument("--bytes", type=parse_bytes, default=_LARGE["bytes"], help="variables of the large one (default 256 MiB)")
    parser.add_argument("--optimizer", choices=sorted(NUM_SLOTS), default="sgd", help="optimizer of the large model (default sgd)")
    parser.add_argument("--steps", type=int, default=_LONG["steps"], help="steps of the long run (default 2000)")
    add_json(parser)
