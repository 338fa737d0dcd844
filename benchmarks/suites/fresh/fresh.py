"""Measures those who follow the weights: bytes a step, seconds from a step to its weights, and what that costs servers and trainer.

Real updates are AdamW's on a character model; their share of changed elements is then that of many bytes. Every role is a process. Many
follow through relays, too, beside one that follows the servers. A slow network is a relay that holds bytes back, a link for each
connection; beside it the whole is read, by an observer, from a file over HTTP, and by gloo where PyTorch is installed.
"""

import argparse
import http.server
import importlib.util
import itertools
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import worker_client
from benchmarks.harness.arguments import at_least_one, parse_bytes
from benchmarks.harness.link import NETWORKS, Link
from benchmarks.harness.processes import Cluster, cpu_s, peak_rss_bytes
from benchmarks.report.figures import human_bytes
from benchmarks.suites.fresh.reader import WIRE, ReaderWork
from benchmarks.suites.fresh.trainer import NUM_FIRST_STEPS, TrainerWork
from lockstep.launcher.spec import ClusterSpec

DESCRIPTION = __doc__
# Bytes a second, and seconds each way; none: loopback as it is.
_USUAL_NETWORKS = ["loopback", "1Gbit", "100Mbit-50ms"]
_TIMEOUT_S = 900.0
_NUM_WARMUP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-6, 1e-3], help="AdamW's rates (default 3e-6 1e-3)")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[64 << 20], help="bytes of float32, such as 1GiB (default 64MiB)")
    parser.add_argument("--followers", type=at_least_one, nargs="+", default=[1, 8, 64], help="how many follow (default 1 8 64)")
    parser.add_argument("--relays", type=int, default=8, help="relays before the most followers, in a run more (default 8; 0: none)")
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=_USUAL_NETWORKS, help="what lies before them (default all but 100ms)"
    )
    parser.add_argument("--processes", type=at_least_one, default=8, help="processes that followers are in, at most (default 8)")
    parser.add_argument("--ps", type=at_least_one, default=1, help="parameter servers (default 1)")
    parser.add_argument("--steps", type=at_least_one, default=20, help="steps of a run (default 20)")
    parser.add_argument("--pause", type=float, default=0.5, metavar="S", help="seconds of the trainer's own work in a step (default 0.5)")
    parser.add_argument("--turns", type=int, default=5, help="runs of the trainer with and without a follower by turns (default 5)")
    parser.add_argument("--wholes", type=at_least_one, default=3, help="readings of the whole by each way (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line")


def run(options: argparse.Namespace) -> int:
    """Prints the figures as they come; returns the exit code."""
    shares = []
    for rate in options.rates:
        one = measure(options, TrainerWork(rate=rate, num_warmup_steps=NUM_FIRST_STEPS + options.steps, **_trained(options, 0.1)))
        shares.append(one["share"])
        _show(f"AdamW at {rate:g}", one, options)
    for size in options.sizes:
        sparse = TrainerWork(nbytes=size, share=shares[0], num_warmup_steps=_NUM_WARMUP_STEPS, **_trained(options, options.pause))
        for network, count in itertools.product(options.networks, options.followers):
            one = measure(options, sparse, count=count, network=network, num_wholes=options.wholes if count == options.followers[0] else 0)
            _show(f"{human_bytes(size)}, {shares[0]:.2%} changed, {network}", one, options)
        if options.relays:
            one = measure(options, sparse, count=max(options.followers), num_relays=options.relays)
            _show(f"{human_bytes(size)}, {shares[0]:.2%} changed, through {options.relays} relays", one, options)
        if options.turns:
            turned = TrainerWork(**{**_fields(sparse), "num_rounds": options.turns})
            _show(f"{human_bytes(size)}, with and without a follower by turns", measure(options, turned, has_other=True), options)
    for rate, share in zip(options.rates[1:], shares[1:], strict=True):
        dense = TrainerWork(**{**_fields(sparse), "share": share})
        _show(f"{human_bytes(size)}, {share:.2%} changed as at {rate:g}, loopback", measure(options, dense), options)
    return 0


def measure(
    options: argparse.Namespace,
    work: TrainerWork,
    *,
    count: int = 1,
    network: str = "loopback",
    num_wholes: int = 0,
    num_relays: int = 0,
    has_other: bool = False,
) -> dict[str, Any]:
    """Has a trainer followed by so many. `num_wholes`: readings of the whole; `has_other`: it trains another cluster by turns.

    `num_relays`: between the servers and them, beside one follower of the servers.
    """
    with ExitStack() as stack:
        spec = ClusterSpec(ps=options.ps, workers=1, tcp=True)
        clusters = [stack.enter_context(Cluster(spec, security={})) for _ in range(1 + has_other)]
        for cluster in clusters:
            cluster.local.start_roles()
        first, run = clusters[0], clusters[0].processes
        chief = first.local.chief_address
        trainer = {**_fields(work), "chiefs": [cluster.local.chief_address for cluster in clusters]}
        run.start("worker 0", run.worker_command("benchmarks.suites.fresh.trainer", trainer))
        (joined,) = run.await_events("joined", 1, timeout_s=_TIMEOUT_S)
        with worker_client.observe(chief) as observer:
            servers = observer.membership.registration.shard_addresses
        routes = _routes(stack, network, [chief, *servers])
        last_step = work.num_warmup_steps + work.num_rounds * work.num_steps
        bounds = np.linspace(0, count, min(count, options.processes) + 1).astype(int).tolist()
        places = [f"unix:{run.directory}/relay{number}" for number in range(num_relays)]
        command = [sys.executable, "-m", "lockstep", "relay", chief, "--wire", WIRE, "--listen"]
        relays = [run.start(f"relay {number}", [*command, place]) for number, place in enumerate(places)]
        # One that follows the servers is the last.
        counts = [*np.diff(bounds).tolist(), *([1] if relays else [])]
        for number, its_count in enumerate(counts):
            followed = places[number % num_relays] if number < len(bounds) - 1 and relays else chief
            reader = ReaderWork(
                kind="followers", chief=followed, count=its_count, last_step=last_step, routes=routes, counts_changes=bool(work.rate)
            )
            _start(first, f"follower {number:03}", reader)
        run.await_events("following", len(counts), timeout_s=_TIMEOUT_S)
        before = [sum(map(cpu_s, processes)) for processes in (first.servers, relays)]
        run.go()
        (done,) = run.await_events("done", 1, timeout_s=_TIMEOUT_S)
        run.await_events("followed", len(counts), timeout_s=_TIMEOUT_S)
        used_s, relays_s = (sum(map(cpu_s, now)) - then for now, then in zip((first.servers, relays), before, strict=True))
        *events, last = run.by_process("followed")
        events += [] if relays else [last]
        followers = [follower for event in events for follower in event["followers"]]
        found = {
            "bytes": joined["num_bytes"],
            "followers": count,
            "network": network,
            **_figures(done["steps"], followers, whole_bytes=joined["num_bytes"] // 2),
            "loss": done["loss"],
            "servers_cpu_ms_a_step": 1e3 * used_s / (work.num_rounds * work.num_steps),
            "followers_cpu_s": sum(event["cpu_s"] for event in events),
            "peak_rss_ps_bytes": max(peak_rss_bytes(server) for server in first.servers),
            "transport": joined["transport"],
        }
        if relays:
            direct = _figures(done["steps"], last["followers"], whole_bytes=joined["num_bytes"] // 2)
            found |= {"relays": num_relays, "relays_cpu_ms_a_step": 1e3 * relays_s / (work.num_rounds * work.num_steps)}
            found |= {f"direct_{name}": direct[name] for name in ("delay_p50_ms", "delay_p99_ms")}
        if num_wholes:
            found |= _wholes(first, routes, network, num_wholes, nbytes=joined["num_bytes"])
        run.release()
        for cluster in clusters:
            cluster.processes.await_end()
    return found


def _figures(steps: Sequence[Sequence[Any]], followers: Sequence[Mapping[str, Any]], *, whole_bytes: int) -> dict[str, Any]:
    """Returns what the steps and the followers' own records say."""
    delays_ms, sizes = [], []
    for follower in followers:
        seen = follower["seen"]
        sizes.append((seen[-1][2] - seen[0][2]) / (seen[-1][0] - seen[0][0]))
        for _, target, step, at, _ in steps:
            if target == 0:
                delays_ms.append(1e3 * (next(when for its_step, when, _ in seen if its_step >= step) - at))
    times_ms = [[1e3 * took for _, target, _, _, took in steps if target == one] for one in (0, 1)]
    found = {
        "bytes_a_step": float(np.mean(sizes)),
        "whole_bytes": whole_bytes,
        "whole_by_bytes": whole_bytes / float(np.mean(sizes)),
        "share": float(np.mean([share for follower in followers for share in follower["shares"]] or [0.0])),
        "delay_p50_ms": float(np.percentile(delays_ms, 50)),
        "delay_p99_ms": float(np.percentile(delays_ms, 99)),
        "steps_shown": sum(len(follower["seen"]) - 1 for follower in followers) / len(followers),
        "patches": sum(follower["patches"] for follower in followers),
        "wholes": sum(follower["wholes"] for follower in followers),
        "step_ms": float(np.median(times_ms[0])),
    }
    if times_ms[1]:
        turns: dict[tuple[int, int], list[float]] = {}
        for turn, target, _, _, took in steps:
            turns.setdefault((turn, target), []).append(took)
        ratios = [float(np.median(turns[turn, 0]) / np.median(turns[turn, 1])) for turn in range(len(turns) // 2)]
        found |= {"alone_ms": float(np.median(times_ms[1])), "ratios": ratios}
    return found


def _wholes(cluster: Cluster, routes: Mapping[str, str], network: str, count: int, *, nbytes: int) -> dict[str, Any]:
    """Returns the seconds of each reading of all of it in bfloat16, by each way that there is."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        port = stack.enter_context(_serving(directory, nbytes))
        place = _routes(stack, network, [port]).get(port, port)
        ways: dict[str, list[dict[str, Any]]] = {
            "observer": [{"chief": cluster.local.chief_address}],
            "http": [{"place": f"http://{place}/weights.safetensors"}],
        }
        if network == "loopback" and importlib.util.find_spec("torch") is not None:
            ways["gloo"] = [{"place": f"{directory}/rendezvous", "rank": rank, "nbytes": nbytes} for rank in (0, 1)]
        for way, orders in ways.items():
            known = len(cluster.processes.events["done"])
            for number, order in enumerate(orders):
                _start(cluster, f"{way} {number}", ReaderWork(kind=way, count=count, routes=routes, **order))
            events = cluster.processes.await_events("done", known + len(orders), timeout_s=_TIMEOUT_S)
            found[f"{way}_s"] = events[-1]["took"]
    return found


@contextmanager
def _serving(directory: str, nbytes: int) -> Iterator[str]:
    """Serves a safetensors file of half of the bytes, and yields the server's address."""
    save_file({"weights": np.zeros(nbytes // 4, np.uint16)}, Path(directory, "weights.safetensors"))
    handler = partial(_Quiet, directory=directory)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


def _routes(stack: ExitStack, network: str, servers: Sequence[str]) -> dict[str, str]:
    """Puts a link before each of these addresses, and returns where it is reached through that."""
    if (link := NETWORKS[network]) is None:
        return {}
    rate, delay_s = link
    return {server: stack.enter_context(Link(server, rate=rate, delay_s=delay_s)).address for server in servers}


def _start(cluster: Cluster, name: str, reader: ReaderWork) -> None:
    cluster.processes.start(name, cluster.processes.worker_command("benchmarks.suites.fresh.reader", reader))


def _trained(options: argparse.Namespace, pause_s: float) -> dict[str, Any]:
    return {"chiefs": (), "num_steps": options.steps, "pause_s": pause_s}


def _fields(work: TrainerWork) -> dict[str, Any]:
    return {name: getattr(work, name) for name in work.__slots__}


def _show(title: str, report: Mapping[str, Any], options: argparse.Namespace) -> None:
    print(json.dumps({"title": title, **report}) if options.json else in_words(title, report), flush=True)


def in_words(title: str, report: Mapping[str, Any]) -> str:
    """Returns a report for a reader."""
    lines = [
        f"{title}: {report['followers']} follow",
        f"  {report['bytes_a_step']:,.0f} bytes a step, 1/{report['whole_by_bytes']:.1f} of the whole in bfloat16;"
        f" {report['steps_shown']:g} steps shown, {report['patches']} patches, {report['wholes']} wholes",
        f"  from the step to its weights: median {report['delay_p50_ms']:.0f} ms, 99 % {report['delay_p99_ms']:.0f} ms;"
        f" trainer's step {report['step_ms']:.1f} ms; CPU of the servers {report['servers_cpu_ms_a_step']:.1f} ms a step",
    ]
    if "relays" in report:
        lines += [
            f"  CPU of the {report['relays']} relays {report['relays_cpu_ms_a_step']:.1f} ms a step; one beside them at the servers:"
            f" median {report['direct_delay_p50_ms']:.0f} ms, 99 % {report['direct_delay_p99_ms']:.0f} ms"
        ]
    if report["share"]:
        lines.append(f"  {report['share']:.2%} of the elements change; loss {report['loss']:.2f}")
    if "ratios" in report:
        lines.append(f"  trainer's step without a follower {report['alone_ms']:.1f} ms; each turn's ratio {_list(report['ratios'])}")
    for way in ("observer", "http", "gloo"):
        if took := report.get(f"{way}_s"):
            times = 1e3 * float(np.median(took)) / report["delay_p50_ms"]
            lines.append(f"  the whole by {way}: {_list(took)} s, {times:.1f} times the median above")
    return "\n".join(lines)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
