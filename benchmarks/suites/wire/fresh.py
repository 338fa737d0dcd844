"""Measures what followers of the weights receive, how soon, and what that costs the trainer. Knows the arguments and the tables."""

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import WrongArguments, add_json, parse_bytes, show
from benchmarks.harness.processes import Cluster
from benchmarks.report.figures import human_bytes, table_lines
from benchmarks.report.machine import machine
from benchmarks.suites.wire.characters import RATES, changes_at
from lockstep.launcher.spec import ClusterSpec

DESCRIPTION = "Measures followers of the weights: bytes a step by learning rate, time from a step to its swap, and the trainer's step."
_MODULE = "benchmarks.suites.wire.following"
_TIMEOUT_S = 600.0
# Set in the network namespace whose loopback interface is shaped.
_SHAPED = "LOCKSTEP_BENCHMARK_LINK"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--what", choices=("rates", "times"), nargs="+", default=["rates", "times"])
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[64 << 20], help="bytes of float32 variables (default 64MiB)")
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 8], help="default 1 8")
    parser.add_argument("--link", default="", metavar="RATE", help="limit all traffic to this rate, such as 100mbit; needs root and tc")
    parser.add_argument("--share", type=float, default=0.021, help="part of the elements that a step changes (default 0.021)")
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pace", type=float, default=0.3, metavar="S", help="pause between steps (default 0.3)")
    parser.add_argument("--turns", type=int, default=2)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    if options.link and os.environ.get(_SHAPED) != options.link:
        return _run_shaped(options.link)
    report: dict[str, Any] = {"machine": machine(), "link": options.link or "loopback"}
    if "rates" in options.what:
        report["rates"] = [changes_at(rate) for rate in RATES]
    if "times" in options.what:
        cases = [(size, count) for size in options.sizes for count in options.followers]
        report["times"] = [_times(size, count, options) for _ in range(options.turns) for size, count in cases]
    show(report, in_words, options)
    return 0


def in_words(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    lines: list[str] = []
    if "rates" in report:
        rows = (
            [f"{one['rate']:g}", f"{100 * one['share']:.1f} %", human_bytes(round(one["bytes"])), f"{one['whole'] / one['bytes']:.1f}"]
            for one in report["rates"]
        )
        lines += table_lines(["learning rate", "elements changed", "bytes a step", "times fewer than the whole"], rows)
    if "times" in report:
        columns = ["variables", "followers", "bytes an answer", "whole / that", "step to swap p50", "p99", "the whole in bfloat16"]
        columns += ["whole / p50", "file by HTTP", "trainer's step", "with followers", "ratio"]
        rows = ([*_words(one)] for one in report["times"])
        lines += ["", f"{report['link']}:", "", *table_lines(columns, rows)]
    return "\n".join(lines)


def _words(one: dict[str, Any]) -> Sequence[str]:
    times = [f"{1e3 * one[name]:.0f} ms" for name in ("p50_s", "p99_s", "whole_s")]
    steps = [f"{1e3 * one[name]:.0f} ms" for name in ("alone_s", "followed_s")]
    few = [human_bytes(round(one["answer_bytes"])), f"{one['whole_bytes'] / one['answer_bytes']:.1f}"]
    ratios = [f"{one['whole_s'] / one['p50_s']:.1f}", f"{1e3 * one['http_s']:.0f} ms"]
    return [human_bytes(one["size"]), str(one["followers"]), *few, *times, *ratios, *steps, f"{one['followed_s'] / one['alone_s']:.2f}"]


def _run_shaped(link: str) -> int:
    """Runs the same command in a network of its own, whose loopback interface has the link's rate."""
    if os.geteuid() or shutil.which("tc") is None or shutil.which("unshare") is None:
        raise WrongArguments("--link: it needs root, and the commands tc and unshare (Debian: iproute2, util-linux)")
    shape = 'ip link set lo mtu 1500 up && tc qdisc add dev lo root tbf rate "$1" burst 128kb latency 50ms && shift && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", shape, "-", link, sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    return subprocess.run(command, check=False, env={**os.environ, _SHAPED: link}).returncode


def _times(size: int, num_followers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains alone, then with followers, then reads the whole."""
    spec = ClusterSpec(ps=options.ps, workers=1, tcp=True)
    orders = {"size": size, "share": options.share, "num_steps": options.steps, "pace_s": options.pace}
    with Cluster(spec, security={}) as cluster:
        cluster.local.start_roles()
        processes, address = cluster.processes, {"LOCKSTEP_CHIEF": cluster.local.chief_address}
        cluster.start_workers(_MODULE, {"role": "trainer", **orders})
        alone = processes.await_events("alone", 1, timeout_s=_TIMEOUT_S)[0]
        for index in range(num_followers):
            command = processes.worker_command(_MODULE, {"role": "follower", **orders, "last_step": alone["last_step"]})
            processes.start(f"follower {index}", command, environment=address)
        processes.await_events("ready", num_followers, timeout_s=_TIMEOUT_S)
        processes.go()
        followed = processes.await_events("trained", 1, timeout_s=_TIMEOUT_S)[0]
        swaps = processes.await_events("followed", num_followers, timeout_s=_TIMEOUT_S)
        processes.start("observer", processes.worker_command(_MODULE, {"role": "observer", **orders}), environment=address)
        whole = processes.await_events("read", 1, timeout_s=_TIMEOUT_S)[0]
        processes.release()
        processes.await_end()
    made = dict(followed["made_at"])
    lags = [at - made[step] for one in swaps for step, at in one["swapped_at"] if step in made]
    return {
        "size": size,
        "followers": num_followers,
        "answer_bytes": sum(one["bytes"] for one in swaps) / sum(one["answers"] for one in swaps) * options.ps,
        "whole_bytes": size // 2,
        "num_swaps": len(lags),
        "p50_s": float(np.percentile(lags, 50)),
        "p99_s": float(np.percentile(lags, 99)),
        "whole_s": float(np.median(whole["read_s"])),
        "http_s": _by_http(size // 2),
        "alone_s": float(np.median(alone["step_s"])),
        "followed_s": float(np.median(followed["step_s"])),
    }


def _by_http(nbytes: int) -> float:
    """Returns the seconds in which a file of so many bytes comes over HTTP."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(bytes(nbytes))
        handler = functools.partial(_Quiet, directory=directory)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            begin = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{path.name}") as response:
                while response.read(1 << 20):
                    pass
            server.shutdown()
            return time.perf_counter() - begin


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Says nothing."""
