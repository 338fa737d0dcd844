"""Trains a character model with PyTorch by gradients of each step, and by outer steps of several inner ones: loss, seconds and bytes.

Beside DistributedDataParallel over gloo, and one worker with the batches of all in one; over the links of this machine, or slow ones.
"""

import argparse
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lockstep
from benchmarks.harness.arguments import WrongArguments, add_json, add_plot, at_least_one, show
from benchmarks.harness.hosts import DEVICE, Hosts
from benchmarks.harness.language import Language
from benchmarks.harness.link import NETWORKS
from benchmarks.harness.processes import Cluster, Processes
from benchmarks.harness.worker import Station, await_file
from benchmarks.report.figures import as_row, head_rows, human_bytes
from benchmarks.report.plot import check_plot, plot_utilisation
from benchmarks.suites.coordination.learning import ONE_THREAD
from lockstep.launcher.spec import ClusterSpec
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client.model.wire_format import WireFormat

DESCRIPTION = __doc__
BATCH_SIZE = 64
# What all workers would do if nothing had to travel: each trains by itself.
APART = "nothing exchanged"
# Of the hidden layer: 0.35 million parameters.
HIDDEN = 512
_TIMEOUT_S = 3600.0
# By gradients of each step, with DistributedDataParallel, without each other, and by outer steps.
_HOW = ("gradients", "ddp", "alone", "outer")
# Nobody else is on the links.
_OPEN = {"LOCKSTEP_ALLOW_INSECURE_NETWORK": "1"}
# What travels to the servers, and back.
WIRES = {
    "float32": WireFormat(),
    "int8, bfloat16": WireFormat(gradients="int8", variables="bfloat16"),
    "int4, bfloat16": WireFormat(gradients="int4", variables="bfloat16"),
    "int4, int4": WireFormat(gradients="int4", variables="int4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWork:
    """A worker's orders: so many batches with AdamW, whose rate grows to `rate` over `warmup` batches, then falls along a cosine to 0.

    `how`: "ddp", "alone", "gradients" (of each step, to AdamW on the servers) or "outer", with the numbers of lockstep.torch.DiLoCo; an
    `outer_rate` of 0 is that of lockstep.outer_optimizer().
    """

    how: str
    num_workers: int
    num_batches: int
    batch_size: int
    rate: float
    warmup: int
    seed: int
    sync_every: int = 1
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire: str = "float32"

    @property
    def outer(self) -> OptimizerSpec:
        """The outer optimizer."""
        if self.outer_rate:
            return lockstep.momentum(self.outer_rate, self.outer_momentum, use_nesterov=True)
        return lockstep.outer_optimizer(self.sync_every, bits=4 if WIRES[self.wire].variables == "int4" else None)

    @property
    def has_cluster(self) -> bool:
        """Whether parameter servers have a part in it."""
        return self.how in ("gradients", "outer")

    def rate_at(self, batch: int) -> float:
        """Returns which part of the rate a batch has."""
        done = (batch - self.warmup) / max(1, self.num_batches - self.warmup)
        return (batch + 1) / self.warmup if batch < self.warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """Loss on text that nobody trained with, of worker 0 alone; seconds from the first batch to the last step, and bytes meanwhile."""

    loss: float
    seconds: float
    bytes: int


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, row after row: importing PyTorch takes longer than many a row does."""
    import torch

    torch.set_num_threads(1)
    for number in itertools.count():
        here = Station(station.directory / str(number))
        await_file(here.directory / "order")
        given = json.loads((here.directory / "order").read_text(encoding="utf-8"))
        if not given:
            break
        if orders["index"] < given["order"]["num_workers"]:
            _train(OuterWork(**given["order"]), given["cluster"], orders["index"], here)


def _train(order: OuterWork, cluster: dict[str, Any], index: int, station: Station) -> None:
    import torch
    from torch import nn

    with ExitStack() as stack:
        session = None
        if cluster:
            session = stack.enter_context(lockstep.connect(**cluster, worker_index=index, wire=WIRES[order.wire], transport="grpc"))
        text = Language(seed=1000 * order.seed + index, batch_size=order.batch_size)
        torch.manual_seed(order.seed)
        vocabulary, width, context, _ = text.sizes
        layers = (
            nn.Embedding(vocabulary, width),
            nn.Flatten(),
            nn.Linear(context * width, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, vocabulary),
        )
        training = _Training(order, session, index, station, text, nn.Sequential(*layers))
        report = getattr(training, order.how)()
    station.say("done", report=asdict(report))


class _Training:
    """The ways to train; each waits for the others before it begins."""

    def __init__(
        self, order: OuterWork, session: lockstep.Session | None, index: int, station: Station, text: Language, model: Any
    ) -> None:
        import torch

        self._order, self._session, self._index, self._station, self._text, self._model = order, session, index, station, text, model
        self._inner = torch.optim.AdamW(model.parameters(), lr=order.rate, weight_decay=0.01, fused=True)
        self._loss, self._tensor, self._no_grad = torch.nn.functional.cross_entropy, torch.from_numpy, torch.no_grad
        self._schedule = torch.optim.lr_scheduler.LambdaLR

    def alone(self) -> OuterReport:
        return self._train(self._model, self._inner)

    def ddp(self) -> OuterReport:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        number = self._order.num_workers
        meeting = f"file://{self._station.directory}/rendezvous"
        distributed.init_process_group("gloo", init_method=meeting, rank=self._index, world_size=number)
        found = self._train(DistributedDataParallel(self._model), self._inner)
        distributed.destroy_process_group()
        # A ring has each worker send its share, and take another's, twice for each of the others.
        size = sum(one.numel() for one in self._model.parameters())
        return replace(found, bytes=round(4 * (1 - 1 / number) * size * 4) * self._order.num_batches)

    def gradients(self) -> OuterReport:
        from lockstep.torch import Optimizer

        return self._train(self._model, Optimizer(self._session, self._model, self._inner))

    def outer(self) -> OuterReport:
        from lockstep.torch import DiLoCo

        order = self._order
        options: dict[str, Any] = {name: getattr(order, name) for name in ("sync_every", "fragments", "delay", "alpha", "outer")}
        with DiLoCo(self._session, self._model, self._inner, **options) as loop:
            return self._train(self._model, self._inner, end=loop.sync if order.fragments > 1 else None)

    def _train(self, model: Any, optimizer: Any, *, end: Callable[[], None] | None = None) -> OuterReport:
        schedule = self._schedule(optimizer, self._order.rate_at)
        self._station.await_go()
        begin, before = time.monotonic(), self._num_bytes()
        for _ in range(self._order.num_batches):
            given, following = self._text.batch()
            optimizer.zero_grad()
            self._loss(model(self._tensor(given)), self._tensor(following)).backward()
            optimizer.step()
            schedule.step()
        if end is not None:
            end()
        seconds, num_bytes = time.monotonic() - begin, self._num_bytes() - before
        losses = [0.0]
        if self._index == 0:
            with self._no_grad():
                held_out = [*self._text.held_out()]
                losses = [self._loss(self._model(self._tensor(given)), self._tensor(after)).item() for given, after in held_out]
        return OuterReport(loss=sum(losses) / len(losses), seconds=seconds, bytes=num_bytes)

    def _num_bytes(self) -> int:
        if self._session is None:
            return 0
        traffic = self._session.membership.traffic
        return traffic.sent_bytes + traffic.received_bytes


class _Pool:
    """The worker processes, which train one row after the other; each row has a cluster of its own.

    `hosts`: one for each worker, and one for its servers and chief; None: all are on this machine's.
    """

    def __init__(self, processes: Processes, num_workers: int, hosts: Hosts | None) -> None:
        self._processes, self._num_rows, self._hosts = processes, 0, hosts
        for index in range(num_workers):
            command = processes.worker_command("benchmarks.suites.coordination.outer", {"index": index})
            if hosts is not None:
                command = hosts.on(index, command)
            device = {} if hosts is None else {"GLOO_SOCKET_IFNAME": DEVICE}
            processes.start(f"worker {index}", command, environment={**ONE_THREAD, **device})

    def train(self, order: OuterWork) -> list[dict[str, Any]]:
        """Returns the workers' reports. Raises LaunchFailed."""
        events, number = self._processes.events, order.num_workers
        up, done = (len(events.get(kind, ())) + number for kind in ("up", "done"))
        with ExitStack() as stack:
            place = {}
            if order.has_cluster:
                spec = ClusterSpec(ps=order.fragments, workers=number, tcp=True, chief_in_ps=self._hosts is None)
                if self._hosts is not None:
                    spec.hosts = (self._hosts.host(self._hosts.number - 1),)
                local = stack.enter_context(Cluster(spec, security=_OPEN)).local
                local.start_roles(environment=ONE_THREAD)
                place = {"chief": local.chief_address, "cluster": local.name}
            here = self._give({"order": asdict(order), "cluster": place})
            self._processes.await_events("up", up, timeout_s=_TIMEOUT_S)
            (here / "go").touch()
            self._processes.await_events("done", done, timeout_s=_TIMEOUT_S)
        return [event["report"] for event in events["done"][-number:]]

    def end(self) -> None:
        """Lets the workers end."""
        self._give({})
        self._processes.await_end()

    def _give(self, content: dict[str, Any]) -> Path:
        here = self._processes.directory / str(self._num_rows)
        here.mkdir()
        (here / "order.new").write_text(json.dumps(content), encoding="utf-8")
        (here / "order.new").replace(here / "order")
        self._num_rows += 1
        return here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=at_least_one, default=4, help="workers (default 4)")
    parser.add_argument("--batches", type=at_least_one, default=2000, help="batches of 64 characters of each worker (default 2000)")
    parser.add_argument("--how", nargs="+", choices=_HOW, default=_HOW, help="rows of these ways to train (default all)")
    parser.add_argument("--every", type=at_least_one, nargs="+", default=[1, 10, 50, 100], help="inner steps (default 1 10 50 100)")
    parser.add_argument("--fragments", type=at_least_one, help="beside whole steps, of as many servers (default: none)")
    parser.add_argument("--delay", type=at_least_one, default=5, help="inner steps beside an exchange of fragments (default 5)")
    parser.add_argument("--alpha", type=float, default=0.5, help="of values that stays when it is over (default 0.5)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=[*WIRES], help="of outer steps (default all)")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's highest rate (default 2e-3)")
    parser.add_argument("--warmup", type=at_least_one, default=100, help="batches until then (default 100)")
    parser.add_argument("--outer", type=float, nargs=2, default=[0.0, 0.9], metavar=("RATE", "MOMENTUM"), help="(default: by inner steps)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of first values and batches (default 0 1 2)")
    shaped = [name for name, link in NETWORKS.items() if link]
    parser.add_argument("--links", nargs="+", choices=shaped, default=[], help="between hosts of their own; needs root (default: none)")
    add_json(parser)
    add_plot(parser)


def run(options: argparse.Namespace) -> int:
    """Runs each arm with each seed and prints a row of it; returns 0."""
    if importlib.util.find_spec("torch") is None:
        raise WrongArguments("PyTorch is not installed here: `make bench-outer` runs this in .venv-frameworks")
    if wrong := [every for every in options.every if options.batches % every]:
        raise WrongArguments(f"--every {wrong[0]}: want a divisor of --batches {options.batches}")
    if options.plot:
        check_plot(options.plot)
    if not options.json:
        print(head_rows(("link", "steps", "wire", "seed", "loss", "seconds", "characters a second", "bytes of a worker")), flush=True)
    rows = []
    for link in options.links or ["loopback"]:
        with ExitStack() as stack:
            hosts = None
            if (shape := NETWORKS[link]) is not None:
                hosts = stack.enter_context(Hosts(options.workers + 1, rate=shape[0], delay_s=shape[1]))
            pool = _Pool(stack.enter_context(Processes()), options.workers, hosts)
            for seed in options.seeds:
                for name, order in ((name, order) for name, order in _arms(options, seed) if order.how in options.how):
                    reports = pool.train(order)
                    seconds = max(report["seconds"] for report in reports)
                    row = {
                        "link": link,
                        "steps": name,
                        "wire": order.wire if order.has_cluster else "",
                        "seed": seed,
                        "loss": max(report["loss"] for report in reports),
                        "seconds": seconds,
                        "characters_per_s": order.num_workers * order.num_batches * order.batch_size / seconds,
                        "bytes": max(report["bytes"] for report in reports),
                    }
                    show(row, _in_words, options)
                    rows.append({**row, "every": order.sync_every if order.how == "outer" else 0})
            pool.end()
    if options.plot:
        plot_utilisation(options.plot, rows, apart=APART)
    return 0


def _arms(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, OuterWork]]:
    """Yields what each row is of: its name and its workers' orders. All see as many characters."""
    num_batches, size = options.batches, BATCH_SIZE
    given: dict[str, Any] = {"num_batches": num_batches, "rate": options.rate, "warmup": min(options.warmup, num_batches), "seed": seed}
    each = OuterWork(how="gradients", num_workers=options.workers, batch_size=size, **given)
    if options.links:
        yield APART, replace(each, how="alone")
    yield "gradients", each
    yield "DistributedDataParallel, gloo", replace(each, how="ddp")
    if not options.links:
        yield "one worker, large batch", replace(each, how="alone", num_workers=1, batch_size=size * options.workers)
    outer_rate, outer_momentum = options.outer
    for every in options.every:
        outer = replace(each, how="outer", sync_every=every, outer_rate=outer_rate, outer_momentum=outer_momentum)
        # What a wire loses does not depend on how often it is lost: the most inner steps have them all.
        for wire in options.wires if every == max(options.every) else options.wires[:1]:
            yield f"outer, {every} inner", replace(outer, wire=wire)
        if options.fragments and every % options.fragments == 0 and every // options.fragments >= options.delay:
            parts = replace(outer, fragments=options.fragments)
            yield f"outer, {every} inner, {options.fragments} fragments", parts
            words = f"outer, {every} inner, {options.fragments} fragments, delay {options.delay}, alpha {options.alpha:g}"
            yield words, replace(parts, delay=options.delay, alpha=options.alpha)


def _in_words(row: dict[str, Any]) -> str:
    return as_row(
        [
            row["link"],
            row["steps"],
            row["wire"],
            str(row["seed"]),
            f"{row['loss']:.4f}",
            f"{row['seconds']:.1f}",
            f"{row['characters_per_s']:.0f}",
            human_bytes(row["bytes"]),
        ]
    )
