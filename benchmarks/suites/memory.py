"""`python -m benchmarks.suites.memory`: what a parameter server takes, and whether it grows. Knows processes and /proc; no step, no tensor.

Two measurements, each over gRPC and over shared memory, on a parameter server, a chief and two workers: the most that the server has
resident with 256 MiB of variables, against the variables twice, the slots, one contribution of each worker, and 64 MiB for everything
else; and its memory and descriptors over 2,000 steps of 1 MiB, of whose second half a line fitted to it says how much they grew.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.figures import human_bytes
from benchmarks.suites.memory_worker import OPTIMIZERS, RELEASE_VARIABLE
from lockstep.launcher.cluster import ClusterSpec, LocalCluster, last_lines
from lockstep.launcher.supervisor import LaunchFailed, Process, Supervisor

TRANSPORTS = ("grpc", "shared_memory")
_NUM_SLOTS = {"sgd": 0, "adam": 2}
_NUM_WORKERS = 2
_OVERHEAD_BYTES = 64 << 20
_GROWTH_LIMIT_BYTES = 1 << 20
_LARGE = {"bytes": 256 << 20, "variables": 16, "steps": 8, "every": 1}
_LONG = {"bytes": 1 << 20, "variables": 8, "steps": 2000, "every": 100}
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its figures; returns 1 if a bound was passed."""
    options = _parser().parse_args(arguments)
    rows = []
    for transport in options.transports:
        if "large" in options.only:
            rows.append(_large({**_LARGE, "bytes": options.bytes, "optimizer": options.optimizer}, transport=transport))
        if "long" in options.only:
            rows.append(
                _long({**_LONG, "steps": options.steps, "every": max(1, options.steps // 20), "optimizer": "sgd"}, transport=transport)
            )
        if not options.json:
            print("\n".join(_in_words(row) for row in rows[-len(options.only) :]), flush=True)
    if options.json:
        print(json.dumps(rows))
    return 0 if all(row["is_within"] for row in rows) else 1


def _large(work: dict[str, Any], *, transport: str) -> dict[str, Any]:
    samples = _run(work, transport=transport)
    bound = work["bytes"] * (2 + _NUM_SLOTS[work["optimizer"]] + _NUM_WORKERS) + _OVERHEAD_BYTES
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
    """How much a line fitted to equally spaced values rises from its first to its last."""
    number = len(values)
    if number < 2:
        return 0.0
    middle, mean = (number - 1) / 2, sum(values) / number
    slope = sum((x - middle) * (value - mean) for x, value in enumerate(values)) / sum((x - middle) ** 2 for x in range(number))
    return slope * (number - 1)


def _run(work: dict[str, Any], *, transport: str) -> list[dict[str, Any]]:
    """Returns what each process had, every time the first worker said how far it was."""
    samples: list[dict[str, Any]] = []
    processes: dict[str, Process] = {}

    def hear(name: str, line: str) -> None:
        if name == "worker 0" and line.startswith('{"event": "step"'):
            samples.append({"step": json.loads(line)["step"], **{role: look(process.pid) for role, process in processes.items()}})
        elif not line.startswith("{") and ("ERROR" in line or "WARNING" in line or "Error" in line):
            print(f"{name}: {line}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as logs, Supervisor(log_directory=Path(logs), show_line=hear) as supervisor:
        spec = ClusterSpec(num_ps=1, num_workers=_NUM_WORKERS, is_tcp=True)
        cluster = LocalCluster(spec, supervisor=supervisor, note=lambda text: print(text, file=sys.stderr))
        cluster.start_roles()
        release = supervisor.directory / "release"
        command = [sys.executable, "-m", "benchmarks.suites.memory_worker", json.dumps(work)]
        cluster.start_workers(command, environment={RELEASE_VARIABLE: str(release), "LOCKSTEP_TRANSPORT": transport})
        processes.update({"ps": cluster.roles[0], "chief": cluster.chief, **{worker.name: worker for worker in cluster.workers}})
        _await(supervisor, lambda: len(samples) >= work["steps"] // work["every"])
        release.touch()
        deadline = time.monotonic() + 20
        while any(process.is_running for process in supervisor.processes) and time.monotonic() < deadline:
            supervisor.poll(timeout_s=0.1)
    return samples


def _await(supervisor: Supervisor, is_so: Any) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_so():
        for process in supervisor.poll(timeout_s=0.05):
            raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
        if time.monotonic() > deadline:
            raise LaunchFailed(f"the workers did not take their steps within {_TIMEOUT_S:g} s")


def look(pid: int) -> dict[str, int]:
    """Returns what a process has, in bytes: at most so far and now, of the latter what is shared, its share by proportion; and descriptors.

    The peak counts every page that it has mapped once, whoever else has it mapped.
    """
    directory = Path(f"/proc/{pid}")
    status, rollup = _kib(directory / "status"), _kib(directory / "smaps_rollup")
    return {
        "peak_bytes": status["VmHWM"] << 10,
        "rss_bytes": status["VmRSS"] << 10,
        "shared_bytes": status["RssShmem"] << 10,
        "pss_bytes": rollup["Pss"] << 10,
        "num_descriptors": len(list((directory / "fd").iterdir())),
        "num_threads": len(list((directory / "task").iterdir())),
    }


def _kib(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) for fields in lines if fields[-1] == "kB"}


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
    course = " ".join(f"{nbytes / 2**20:.1f}" for nbytes in row["rss_bytes"])
    first, middle, last = row["descriptors"]
    return (
        f"{size}: growth over the second half of {row['steps']} steps, {verdict} the bound: {growth}\n"
        f"  the server's MiB: {course}; its descriptors: {first}, {middle}, {last}"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites.memory", description="Measures the memory of a parameter server, and its growth."
    )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="how the workers reach it (default: both)")
    parser.add_argument(
        "--only", nargs="+", choices=("large", "long"), default=("large", "long"), help="which measurements (default: both)"
    )
    parser.add_argument("--bytes", type=int, default=_LARGE["bytes"], help="variables of the large one (default 256 MiB)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd", help="of the large one (default sgd)")
    parser.add_argument("--steps", type=int, default=_LONG["steps"], help="of the long one (default 2000)")
    parser.add_argument("--json", action="store_true", help="one JSON array on one line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
