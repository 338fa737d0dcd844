"""Trains a character model by gradients of each step, and by outer steps of several inner ones: loss, seconds and bytes.

With PyTorch installed, also by gradients that gloo sums, as DistributedDataParallel does. A slow network is a relay in each worker's
process that holds bytes back, a link for each of its connections; gloo has none.
"""

import argparse
import importlib.util
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import numpy as np

import lockstep
from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, show
from benchmarks.harness.language import Language
from benchmarks.harness.link import NETWORKS, Link
from benchmarks.harness.worker import Station
from benchmarks.report.figures import as_row, head_rows, human_bytes
from benchmarks.suites.coordination.learning import run_workers
from lockstep.launcher.spec import ClusterSpec
from ps_protocol.model.variables import Array
from worker_client.model.wire_format import WireFormat

DESCRIPTION = __doc__
BATCH_SIZE = 64
# What travels to the servers, and back.
WIRES = {
    "float32": WireFormat(),
    "int8, bfloat16": WireFormat(gradients="int8", variables="bfloat16"),
    "int4, bfloat16": WireFormat(gradients="int4", variables="bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWork:
    """A worker's orders: so many batches with AdamW at `rate`.

    `sync_every` 0: each gives a gradient, to AdamW on the servers, or to gloo with so many peers.
    """

    num_batches: int
    batch_size: int
    rate: float
    seed: int
    sync_every: int = 0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire: str = "float32"
    num_peers: int = 0
    network: str = "loopback"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """Loss on text that nobody trained with, seconds from the first batch to the last step, and bytes that travelled meanwhile."""

    loss: float
    seconds: float
    bytes: int


class AdamW:
    """AdamW (arXiv 1711.05101) in the worker's own memory, as PyTorch has it, with its usual numbers."""

    def __init__(self, values: Mapping[str, Array], rate: float) -> None:
        self._rate, self._step = rate, 0
        self._moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in values.items()}

    def step(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Changes the values in place."""
        self._step += 1
        for name, gradient in gradients.items():
            first, second = self._moments[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient * gradient - second)
            values[name][...] *= 1 - 0.01 * self._rate
            scale = np.sqrt(second / (1 - 0.999**self._step)) + 1e-8
            values[name][...] -= self._rate / (1 - 0.9**self._step) * first / scale


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process."""
    order = OuterWork(**orders)
    if (link := NETWORKS[order.network]) is not None:
        # The chief names the servers' own addresses; from here they lie behind links, which end with this process.
        direct, (rate, delay_s) = grpc.insecure_channel, link
        grpc.insecure_channel = lambda target, **more: direct(Link(target, rate=rate, delay_s=delay_s).__enter__().address, **more)
    outer = lockstep.momentum(order.outer_rate, order.outer_momentum, use_nesterov=True)
    optimizer = outer if order.sync_every else lockstep.adamw(order.rate, weight_decay=0.01)
    with lockstep.connect(wire=WIRES[order.wire], transport="grpc") as session:
        model = Language(seed=1000 * order.seed + session.worker_index, batch_size=order.batch_size)
        session.create_or_join(model.values, optimizer=optimizer)
        station.await_go()
        begin, traffic = time.monotonic(), session.membership.traffic
        if order.num_peers:
            values, num_bytes = _by_gloo(order, model, session.worker_index, station)
        else:
            before = traffic.sent_bytes + traffic.received_bytes
            values = _by_outer_steps(order, model, session) if order.sync_every else _by_gradients(order, model, session)
            num_bytes = traffic.sent_bytes + traffic.received_bytes - before
        seconds = time.monotonic() - begin
        station.say("done", report=asdict(OuterReport(loss=model.held_out_loss(values), seconds=seconds, bytes=num_bytes)))
        station.await_release()


def _by_gradients(order: OuterWork, model: Language, session: lockstep.Session) -> Mapping[str, Array]:
    for _ in range(order.num_batches):
        buffers = session.gradient_buffers()
        model.fill(session.views(), buffers)
        session.step(buffers)
    return session.read()


def _by_outer_steps(order: OuterWork, model: Language, session: lockstep.Session) -> Mapping[str, Array]:
    options: dict[str, Any] = {name: getattr(order, name) for name in ("sync_every", "fragments", "delay", "alpha")}
    with lockstep.DiLoCo(session, **options) as loop:
        values, inner = loop.values, AdamW(model.values, order.rate)
        gradients = {name: np.zeros_like(value) for name, value in values.items()}
        for number in range(1, order.num_batches + 1):
            model.fill(values, gradients)
            inner.step(values, gradients)
            values |= loop.step(values)
            if number == order.num_batches and order.fragments > 1:
                values |= loop.sync(values)
        return values


def _by_gloo(order: OuterWork, model: Language, rank: int, station: Station) -> tuple[Mapping[str, Array], int]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    meeting = f"file://{station.directory}/rendezvous"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=order.num_peers)
    values, inner = model.values, AdamW(model.values, order.rate)
    flat = torch.zeros(sum(value.size for value in values.values()))
    parts = torch.split(flat, [value.size for value in values.values()])
    gradients = {name: part.numpy().reshape(values[name].shape) for name, part in zip(values, parts, strict=True)}
    for _ in range(order.num_batches):
        model.fill(values, gradients)
        distributed.all_reduce(flat)
        flat /= order.num_peers
        inner.step(values, gradients)
    # A ring has each worker send its share, and take another's, twice for each of the others.
    return values, round(4 * (1 - 1 / order.num_peers) * flat.numel() * 4) * order.num_batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=at_least_one, default=4, help="workers (default 4)")
    parser.add_argument("--batches", type=at_least_one, default=2000, help="batches of 64 characters of each worker (default 2000)")
    parser.add_argument("--every", type=at_least_one, nargs="+", default=[1, 10, 50, 100], help="inner steps (default 1 10 50 100)")
    parser.add_argument("--fragments", type=at_least_one, default=2, help="beside whole steps, of as many servers (default 2)")
    parser.add_argument("--delay", type=at_least_one, default=5, help="inner steps beside an exchange of fragments (default 5)")
    parser.add_argument("--alpha", type=float, default=0.5, help="of values that stays when it is over (default 0.5)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=[*WIRES], help="of outer steps (default all)")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's rate (default 1e-3)")
    parser.add_argument("--outer", type=float, nargs=2, default=[0.7, 0.9], metavar=("RATE", "MOMENTUM"), help="(default 0.7 0.9)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["loopback"], help="of all rows but gloo's (default loopback)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the batches (default 0 1 2)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs each arm with each seed and prints a row of it; returns 0."""
    if wrong := [every for every in options.every if options.batches % every]:
        raise WrongArguments(f"--every {wrong[0]}: want a divisor of --batches {options.batches}")
    if not options.json:
        print(head_rows(("steps", "wire", "network", "seed", "loss", "seconds", "bytes of a worker")), flush=True)
    for seed, network in itertools.product(options.seeds, options.networks):
        for name, num_workers, made in _arms(options, seed):
            order = replace(made, network=network)
            if order.num_peers and network != "loopback":
                continue
            spec = ClusterSpec(ps=order.fragments, workers=num_workers, tcp=True)
            reports = run_workers(spec, "benchmarks.suites.coordination.outer", order)
            row = {
                "steps": name,
                "wire": order.wire,
                "network": network,
                "seed": seed,
                "loss": reports[0]["loss"],
                "seconds": max(report["seconds"] for report in reports),
                "bytes": max(report["bytes"] for report in reports),
            }
            show(row, _in_words, options)
    return 0


def _arms(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, int, OuterWork]]:
    """Yields what each row is of: its name, its workers and their orders. All see as many characters."""
    each = OuterWork(num_batches=options.batches, batch_size=BATCH_SIZE, rate=options.rate, seed=seed)
    yield "gradients", options.workers, each
    if importlib.util.find_spec("torch") is not None:
        yield "gradients, gloo", options.workers, replace(each, num_peers=options.workers)
    yield "gradients, one worker", 1, replace(each, batch_size=BATCH_SIZE * options.workers)
    outer_rate, outer_momentum = options.outer
    for every in options.every:
        outer = replace(each, sync_every=every, outer_rate=outer_rate, outer_momentum=outer_momentum)
        for wire in options.wires:
            yield f"outer, {every} inner", options.workers, replace(outer, wire=wire)
        if every % options.fragments == 0 and every // options.fragments >= options.delay:
            parts = replace(outer, fragments=options.fragments)
            yield f"outer, {every} inner, {options.fragments} fragments", options.workers, parts
            words = f"outer, {every} inner, {options.fragments} fragments, delay {options.delay}, alpha {options.alpha:g}"
            yield words, options.workers, replace(parts, delay=options.delay, alpha=options.alpha)


def _in_words(row: dict[str, Any]) -> str:
    return as_row(
        [
            row["steps"],
            row["wire"],
            row["network"],
            str(row["seed"]),
            f"{row['loss']:.4f}",
            f"{row['seconds']:.1f}",
            human_bytes(row["bytes"]),
        ]
    )
