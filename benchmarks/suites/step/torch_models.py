"""Measures steps of PyTorch models with lockstep.torch, DistributedDataParallel (gloo) and a session without the adapter, by turns.

Needs PyTorch in its environment. Each round measures all kinds of one model one after the other, so that other work of the machine affects
them alike; every round's ratio is reported.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, show

DESCRIPTION = __doc__
MODELS = ("mlp-4.5MiB", "mlp-64MiB", "cnn-0.6MiB", "transformer-5M", "table-1M")
TRANSPORTS = ("shared_memory", "network")
_MAX_S = 600
# `rows_per_s`: rows of tables that all workers together train per second; 0 without a table.
_FIELDS = ("step_ms", "cpu_ms", "rows_per_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the suite's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--workers", type=at_least_one, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers share one GPU (default cpu)")
    parser.add_argument("--ps", type=at_least_one, default=1)
    parser.add_argument("--steps", type=at_least_one, default=100, help="steps of each run, after a fifth as many to warm up (default 100)")
    parser.add_argument("--repeat", type=at_least_one, default=5, help="rounds, each with all kinds in turn (default 5)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    if importlib.util.find_spec("torch") is None:
        raise WrongArguments("PyTorch is not installed here; `make bench-torch` runs this in .venv-frameworks")
    for model in options.models:
        for report in _measured(model, options):
            show(report, _in_words, options)
    return 0


def _measured(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    has_table = model.startswith("table")
    names = ("lockstep",) if has_table else ("lockstep", "by-hand")
    kinds = ["ddp", *["alone"] * has_table, *(f"{kind} {transport}" for transport in options.transports for kind in names)]
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.repeat):
        # Every other round is in reverse order, since the first kind may run under other conditions.
        order = kinds if number % 2 == 0 else kinds[::-1]
        rounds.append({kind: _one(kind, model, options) for kind in order})
    for transport in options.transports:
        ours = f"lockstep {transport}"
        for other in ("ddp", "alone") if has_table else ("ddp", f"by-hand {transport}"):
            yield {
                "model": model,
                "transport": transport,
                "beside": other.partition(" ")[0],
                **{f"{field}": _median(rounds, ours, field) for field in _FIELDS},
                **{f"other_{field}": _median(rounds, other, field) for field in _FIELDS},
                "step_ratios": [round(one[ours]["step_ms"] / one[other]["step_ms"], 3) for one in rounds],
                "cpu_ratios": [round(one[ours]["cpu_ms"] / one[other]["cpu_ms"], 3) for one in rounds],
            }


def _median(rounds: list[dict[str, dict[str, float]]], kind: str, field: str) -> float:
    return round(statistics.median(one[kind][field] for one in rounds), 3)


def _in_words(report: dict[str, Any]) -> str:
    rows = f"; {report['rows_per_s']:,.0f} rows/s and {report['other_rows_per_s']:,.0f}" if report["rows_per_s"] else ""
    return (
        f"{report['model']:15} {report['transport']:14} {report['step_ms']:8.2f} ms a step, beside {report['beside']}"
        f" {report['other_step_ms']:8.2f} ms:"
        f" {' '.join(map(str, report['step_ratios']))}; CPU of all processes {report['cpu_ms']:.2f} and {report['other_cpu_ms']:.2f} ms:"
        f" {' '.join(map(str, report['cpu_ratios']))}{rows}"
    )


def _one(kind: str, model: str, options: argparse.Namespace) -> dict[str, float]:
    name, _, transport = kind.partition(" ")
    with tempfile.TemporaryDirectory() as place:
        out = Path(place, "out.json")
        role = [sys.executable, "-m", "benchmarks.peers.torch_role", name, model, "--steps", str(options.steps), "--out", str(out)]
        role += ["--device", options.device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        num_workers = 1 if name == "alone" else options.workers
        if name in ("alone", "ddp"):
            _end_well(_start_group(role, environment, num_workers))
        else:
            environment["LOCKSTEP_TRANSPORT"] = "shared_memory" if transport == "shared_memory" else "sockets"
            network = ["--tcp"] if transport == "network" else []
            count = ["--ps", str(options.ps), "--workers", str(options.workers), "--run-dir", place]
            command = [sys.executable, "-m", "lockstep", "up", *count, *network, "--", *role]
            _end_well([subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)])
        found: dict[str, float] = json.loads(out.read_text())
        return {**found, "rows_per_s": found["rows"] * num_workers / found["step_ms"] * 1e3}


def _start_group(role: list[str], environment: dict[str, str], num_workers: int) -> list["subprocess.Popen[str]"]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_workers)}
    return [
        subprocess.Popen(role, env={**environment, **group, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(num_workers)
    ]


def _end_well(processes: list["subprocess.Popen[str]"]) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=_MAX_S)
            if process.returncode:
                raise WrongArguments(f"a run ended with {process.returncode}: {output[-2000:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
