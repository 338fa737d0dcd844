"""Trains a character model by gradients of each step, and by outer steps of several inner ones: loss, seconds and bytes."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import lockstep
from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, show
from benchmarks.harness.language import Language
from benchmarks.harness.worker import Station
from benchmarks.report.figures import as_row, head_rows, human_bytes
from benchmarks.suites.coordination.learning import run_workers
from benchmarks.suites.wire.training import wire_bytes
from lockstep.launcher.spec import ClusterSpec
from ps_protocol.model.variables import Array
from worker_client.model.wire_format import WireFormat

DESCRIPTION = __doc__
BATCH_SIZE = 64
# What travels to the servers, and back.
WIRES = {"float32": WireFormat(), "int8, bfloat16": WireFormat(gradients="int8", variables="bfloat16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWork:
    """A worker's orders: so many batches with AdamW at `rate`. `sync_every` 0: each gives a gradient to AdamW on the servers."""

    num_batches: int
    batch_size: int
    rate: float
    seed: int
    sync_every: int = 0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    wire: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """Loss on text that nobody trained with, and seconds from the first batch to the last step."""

    loss: float
    seconds: float


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
    outer = lockstep.momentum(order.outer_rate, order.outer_momentum, use_nesterov=True)
    optimizer = outer if order.sync_every else lockstep.adamw(order.rate, weight_decay=0.01)
    with lockstep.connect(wire=WIRES[order.wire], transport="grpc") as session:
        model = Language(seed=1000 * order.seed + session.worker_index, batch_size=order.batch_size)
        session.create_or_join(model.values, optimizer=optimizer)
        inner = AdamW(model.values, order.rate)
        gradients = {name: np.zeros_like(value) for name, value in model.values.items()}
        station.await_go()
        begin = time.monotonic()
        for number in range(1, order.num_batches + 1):
            if not order.sync_every:
                buffers = session.gradient_buffers()
                model.fill(session.views(), buffers)
                session.step(buffers)
                continue
            if (number - 1) % order.sync_every == 0:
                anchor = session.read()
                values = {name: value.copy() for name, value in anchor.items()}
            model.fill(values, gradients)
            inner.step(values, gradients)
            if number % order.sync_every == 0:
                session.step({name: anchor[name] - value for name, value in values.items()})
        seconds = time.monotonic() - begin
        station.say("done", report=asdict(OuterReport(loss=model.held_out_loss(session.read()), seconds=seconds)))
        station.await_release()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=at_least_one, default=4, help="workers (default 4)")
    parser.add_argument("--batches", type=at_least_one, default=2000, help="batches of 64 characters of each worker (default 2000)")
    parser.add_argument("--every", type=at_least_one, nargs="+", default=[1, 10, 50, 100], help="inner steps (default 1 10 50 100)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=[*WIRES], help="of outer steps (default all)")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's rate (default 1e-3)")
    parser.add_argument("--outer", type=float, nargs=2, default=[0.7, 0.9], metavar=("RATE", "MOMENTUM"), help="(default 0.7 0.9)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the batches (default 0 1 2)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs each arm with each seed and prints a row of it; returns 0."""
    if wrong := [every for every in options.every if options.batches % every]:
        raise WrongArguments(f"--every {wrong[0]}: want a divisor of --batches {options.batches}")
    if not options.json:
        print(head_rows(("steps", "wire", "seed", "loss", "seconds", "bytes of a worker")), flush=True)
    nbytes = sum(value.nbytes for value in Language().values.values())
    arms = [("gradients", 0, "float32", options.workers), ("gradients, one worker", 0, "float32", 1)]
    arms += [(f"outer, {every} inner", every, wire, options.workers) for every in options.every for wire in options.wires]
    for name, every, wire, num_workers in arms:
        sizes = wire_bytes(WIRES[wire], total_bytes=nbytes)
        for seed in options.seeds:
            order = OuterWork(
                num_batches=options.batches,
                batch_size=BATCH_SIZE * options.workers // num_workers,
                rate=options.rate,
                seed=seed,
                sync_every=every,
                outer_rate=options.outer[0],
                outer_momentum=options.outer[1],
                wire=wire,
            )
            reports = run_workers(ClusterSpec(ps=1, workers=num_workers, tcp=True), "benchmarks.suites.coordination.outer", order)
            row = {
                "steps": name,
                "wire": wire,
                "seed": seed,
                "loss": reports[0]["loss"],
                "seconds": max(report["seconds"] for report in reports),
                "bytes": (sizes.up + sizes.down) * options.batches / max(1, every),
            }
            show(row, _in_words, options)
    return 0


def _in_words(row: dict[str, Any]) -> str:
    return as_row(
        [row["steps"], row["wire"], str(row["seed"]), f"{row['loss']:.4f}", f"{row['seconds']:.1f}", human_bytes(round(row["bytes"]))]
    )
