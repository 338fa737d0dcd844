"""Trains a character model with PyTorch by gradients of each step, and by outer steps of several inner ones: loss, seconds and bytes.

Beside DistributedDataParallel over gloo, and one worker with the batches of all in one; over the links of this machine, or slow ones;
with workers that are killed, stopped and sent away meanwhile.
"""

import argparse
import importlib.util
import itertools
import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

import lockstep
from benchmarks.harness.arguments import WrongArguments, add_json, add_plot, at_least_one, show
from benchmarks.harness.hosts import DEVICE, Hosts
from benchmarks.harness.language import Language
from benchmarks.harness.link import NETWORKS
from benchmarks.harness.processes import Cluster, Processes
from benchmarks.harness.worker import Station, await_file
from benchmarks.report.figures import as_row, head_rows, human_bytes
from benchmarks.report.plot import check_plot, plot_utilisation
from benchmarks.suites.coordination.learning import ONE_THREAD, keep_pace
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Process
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array
from worker_client.model.wire_format import WireFormat

DESCRIPTION = __doc__
BATCH_SIZE = 64
# What all workers would do if nothing had to travel: each trains by itself.
APART = "nothing exchanged"
# Of the hidden layer: 0.35 million parameters.
HIDDEN = 512
_COLUMNS = ("link", "steps", "wire", "seed", "loss", "seconds", "characters a second", "longest step", "bytes of a worker")
_TIMEOUT_S = 3600.0
# By gradients of each step, with DistributedDataParallel, without each other, and by outer steps.
_HOW = ("gradients", "ddp", "alone", "outer")
_BY_SERVERS = ("gradients", "outer")
# What happens to a worker, in turn: it is killed, and begins again; it stands still for two steps; it leaves, and joins two steps later.
_FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
_AWAY = 2
# How long a step waits for more than the contributions that it needs.
_GRACE_S = 0.5
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
    `outer_rate` of 0 is that of lockstep.outer_optimizer(). `growth`: inner steps of an outer one are as 1 / rate ** growth, with
    `sync_every` as their mean; the quadratic synchronization rule, arXiv 2310.14423, has a growth of 2. `num_required`: an outer step needs
    so many contributions, and training ends after `num_batches / sync_every` of them; 0: those of all workers, which make so many batches
    each. With it go `num_faults`, by the seed, and the seconds that an inner step takes at least.
    """

    how: str
    num_workers: int
    num_batches: int
    batch_size: int
    rate: float
    warmup: int
    seed: int
    sync_every: int = 1
    growth: float = 0.0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    wire: str = "float32"
    num_required: int = 0
    num_faults: int = 0
    pace_s: float = 0.0

    @property
    def outer(self) -> OptimizerSpec:
        """The outer optimizer."""
        bits = 4 if WIRES[self.wire].variables == "int4" else None
        return lockstep.outer_optimizer(self.sync_every, rate=self.outer_rate or None, momentum=self.outer_momentum, bits=bits)

    def rate_at(self, batch: int) -> float:
        """Returns which part of the rate a batch has."""
        done = (batch - self.warmup) / max(1, self.num_batches - self.warmup)
        return (batch + 1) / self.warmup if batch < self.warmup else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def phases(self) -> list[int]:
        """Returns the inner steps of each outer one, which are all batches."""
        density = np.cumsum([self.rate_at(max(batch, self.warmup)) ** self.growth for batch in range(self.num_batches)])
        number = self.num_batches // self.sync_every
        # The first batch by which so many outer steps are due; the last is always one.
        ends = np.searchsorted(density, density[-1] * np.arange(1, number) / number * (1 - 1e-9)) + 1
        return [int(number) for number in np.diff([0, *ends, self.num_batches])]


# Loss on text that nobody trained with, of worker 0 alone; seconds from the first batch to the last step, and bytes meanwhile.
_Report = dict[str, float]


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process, row after row: importing PyTorch takes longer than many a row does."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the session says goodbye
    for number in itertools.count(orders["row"]):
        here = Station(station.directory / str(number))
        await_file(here.directory / "order")
        given = json.loads((here.directory / "order").read_text(encoding="utf-8"))
        order, cluster = OuterWork(**given["order"]), given["cluster"]
        if orders["index"] < order.num_workers:
            cluster |= {"worker_index": orders["index"], "wire": WIRES[order.wire], "transport": "grpc"}
            with lockstep.connect(**cluster) if order.how in _BY_SERVERS else nullcontext() as session:
                getattr(_Training(order, session, orders["index"], orders["life"], here), order.how)()
            station.say("left")


class _Training:
    """The ways to train; each waits for the others before it begins."""

    def __init__(self, order: OuterWork, session: lockstep.Session | None, index: int, life: int, station: Station) -> None:
        from torch import manual_seed, nn, optim

        self._order, self._session, self._index, self._station = order, session, index, station
        self._text = Language(seed=1000 * order.seed + 100 * life + index, batch_size=order.batch_size)
        manual_seed(order.seed)
        vocabulary, width, context, _ = self._text.sizes
        hidden, out = nn.Linear(context * width, HIDDEN), nn.Linear(HIDDEN, vocabulary)
        self._model: Any = nn.Sequential(nn.Embedding(vocabulary, width), nn.Flatten(), hidden, nn.Tanh(), out)
        self._inner = optim.AdamW(self._model.parameters(), lr=order.rate, weight_decay=0.01, fused=True)

    def alone(self) -> None:
        self._train(self._model, self._inner)

    def ddp(self) -> None:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        number = self._order.num_workers
        meeting = f"file://{self._station.directory}/rendezvous"
        distributed.init_process_group("gloo", init_method=meeting, rank=self._index, world_size=number)
        # A ring has each worker send its share, and take another's, twice for each of the others.
        size = sum(one.numel() for one in self._model.parameters())
        self._train(DistributedDataParallel(self._model), self._inner, ring_bytes=round(4 * (1 - 1 / number) * size * 4))
        distributed.destroy_process_group()

    def gradients(self) -> None:
        from lockstep.torch import Optimizer

        self._train(self._model, Optimizer(self._session, self._model, self._inner))

    def outer(self) -> None:
        from lockstep.torch import DiLoCo

        order = self._order
        options: dict[str, Any] = {name: getattr(order, name) for name in ("sync_every", "fragments", "delay", "alpha", "outer")}
        if order.num_required:
            options["inner_state_dir"] = self._station.directory
        with DiLoCo(self._session, self._model, self._inner, **options) as loop:
            self._train(self._model, self._inner, loop)

    def _train(self, model: Any, optimizer: Any, loop: Any = None, *, ring_bytes: int = 0) -> None:
        import torch

        order, every, phases = self._order, self._order.sync_every, self._order.phases()
        is_by_steps = order.num_required > 0

        def loss(now: Any, batch: tuple[Array, Array]) -> Any:
            return torch.nn.functional.cross_entropy(now(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))

        def part(batch: int) -> float:
            # A worker that comes later, or stood still, goes on where the others are.
            return order.rate_at(loop.outer.global_step * every + batch % every if is_by_steps else batch)

        def num_bytes() -> int:
            traffic = None if self._session is None else self._session.membership.traffic
            return 0 if traffic is None else traffic.sent_bytes + traffic.received_bytes

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, part)
        self._station.await_go()
        begin, before = time.monotonic(), num_bytes()
        for batch in itertools.count():
            if loop.outer.is_finished if is_by_steps else batch == order.num_batches:
                break
            begun = time.monotonic()
            if order.growth:
                loop.outer.sync_every = max(1, phases[loop.outer.global_step])
            optimizer.zero_grad()
            loss(model, self._text.batch()).backward()
            optimizer.step()
            schedule.step()
            if is_by_steps and batch % every == every - 1 and loop.outer.last_push.is_accepted:
                self._station.say("counted", step=loop.outer.last_push.applied_step, at=time.monotonic())
            keep_pace(begun, pace_s=order.pace_s)
        if order.fragments > 1:
            loop.sync()
        report = {"seconds": time.monotonic() - begin, "bytes": num_bytes() - before + ring_bytes * order.num_batches, "loss": 0.0}
        if self._index == 0:
            with torch.no_grad():
                report["loss"] = float(np.mean([loss(self._model, batch).item() for batch in self._text.held_out()]))
        self._station.say("done", report=report)
        self._station.await_release()  # a worker that comes too late finds its cluster still


class _Pool:
    """The worker processes, which train one row after the other; each row has a cluster of its own.

    `hosts`: one for each worker, and one for its servers and chief; None: all are on this machine's.
    """

    def __init__(self, processes: Processes, num_workers: int, hosts: Hosts | None) -> None:
        self._processes, self._num_rows, self._hosts = processes, 0, hosts
        self._workers = [self._start(index) for index in range(num_workers)]

    def _start(self, index: int, life: int = 0) -> Process:
        orders = {"index": index, "row": max(0, self._num_rows - 1), "life": life}
        command = self._processes.worker_command("benchmarks.suites.coordination.outer", orders)
        if self._hosts is not None:
            command = self._hosts.on(index, command)
        device = {} if self._hosts is None else {"GLOO_SOCKET_IFNAME": DEVICE}
        return self._processes.start(f"worker {index}", command, environment={**ONE_THREAD, **device})

    def train(self, order: OuterWork) -> _Report:
        """Returns the workers' figures in one. Raises LaunchFailed."""
        events, number, every = self._processes.events, order.num_workers, order.sync_every
        up, done, left = (len(events.get(kind, ())) + number for kind in ("up", "done", "left"))
        counted = events.setdefault("counted", [])
        counted.clear()
        with ExitStack() as stack:
            place, quorum = {}, {}
            if order.num_required:
                steps = {"replicas_to_aggregate": order.num_required, "max_steps": order.num_batches // every}
                quorum = {"policy": "outer", "grace": _GRACE_S, **steps}
            if order.how in _BY_SERVERS:
                spec = ClusterSpec(ps=order.fragments, workers=number, tcp=True, chief_in_ps=self._hosts is None, **quorum)
                if self._hosts is not None:
                    spec.hosts = (self._hosts.host(self._hosts.number - 1),)
                local = stack.enter_context(Cluster(spec, security=_OPEN)).local
                local.start_roles(environment=ONE_THREAD)
                place = {"chief": local.chief_address, "cluster": local.name}
            here = self._processes.directory / str(self._num_rows)
            here.mkdir()
            (here / "order.new").write_text(json.dumps({"order": asdict(order), "cluster": place}), encoding="utf-8")
            (here / "order.new").replace(here / "order")
            self._num_rows += 1
            self._processes.await_events("up", up, timeout_s=_TIMEOUT_S)
            (here / "go").touch()
            begin = time.monotonic()
            self._harm(order)
            self._processes.await_events("done", done, timeout_s=_TIMEOUT_S)
            (here / "release").touch()
            self._processes.await_events("left", left, timeout_s=_TIMEOUT_S)
        reports = [event["report"] for event in events["done"][-number:]]
        found = {name: max(report[name] for report in reports) for name in reports[0]} | {"longest_s": 0.0}
        num_inner = number * order.num_batches
        if order.num_required:
            # Of each step, its first contribution to be told.
            at = sorted({event["step"]: event["at"] for event in reversed(counted)}.values())
            num_inner, found["seconds"] = every * len(counted), at[-1] - begin
            found["longest_s"] = max(after - before for before, after in itertools.pairwise([begin, *at]))
        return {**found, "characters_per_s": num_inner * order.batch_size / found["seconds"]}

    def _harm(self, order: OuterWork) -> None:
        """Does each fault of the order, at a step that is drawn like its worker."""
        drawn, num_steps = random.Random(order.seed), order.num_batches // order.sync_every
        for number in range(order.num_faults):
            index, fault = drawn.randrange(order.num_workers), _FAULTS[number % len(_FAULTS)]
            # The last of them leaves time to come back.
            step = int(0.8 * (number + drawn.random()) / order.num_faults * num_steps)
            self._await_step(step)
            worker = self._workers[index]
            worker.signal_group(fault)
            while fault is not signal.SIGSTOP and worker.is_running:
                self._processes.supervisor.poll(timeout_s=0.1)
            if fault is not signal.SIGKILL:
                self._await_step(min(step + _AWAY, num_steps - 1))
            if fault is signal.SIGSTOP:
                worker.signal_group(signal.SIGCONT)
            else:
                self._workers[index] = self._start(index, number + 1)

    def _await_step(self, step: int) -> None:
        for _ in self._processes.polls(timeout_s=_TIMEOUT_S, what=f"step {step}"):
            if any(event["step"] >= step for event in self._processes.events["counted"]):
                break


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--workers", type=at_least_one, default=4, help="workers (default 4)")
    parser.add_argument("--batches", type=at_least_one, default=2000, help="batches of 64 characters of each worker (default 2000)")
    parser.add_argument("--how", nargs="+", choices=_HOW, default=_HOW, help="rows of these ways to train (default all)")
    parser.add_argument("--every", type=at_least_one, nargs="+", default=[1, 10, 50, 100], help="inner steps (default 1 10 50 100)")
    words = "also inner steps that grow as 1 / rate ** GROWTH, with these as their mean (default: none)"
    parser.add_argument("--growth", type=float, nargs="+", default=[], help=words)
    parser.add_argument("--fragments", type=at_least_one, help="beside whole steps, of as many servers (default: none)")
    parser.add_argument("--delay", type=at_least_one, default=5, help="inner steps beside an exchange of fragments (default 5)")
    parser.add_argument("--alpha", type=float, default=0.5, help="of values that stays when it is over (default 0.5)")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=[*WIRES], help="of outer steps (default all)")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW's highest rate (default 2e-3)")
    parser.add_argument("--warmup", type=at_least_one, default=100, help="batches until then (default 100)")
    parser.add_argument("--outer", type=float, nargs=2, default=[0.0, 0.9], metavar=("RATE", "MOMENTUM"), help="(default: by inner steps)")
    parser.add_argument("--faults", type=int, default=0, help="that befall workers of the last rows, of which a step needs all but one")
    parser.add_argument("--pace", type=float, default=0.04, help="seconds that an inner step of these takes at least (default 0.04)")
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
        print(head_rows(_COLUMNS), flush=True)
    rows = []
    for link in options.links or ["loopback"]:
        with ExitStack() as stack:
            hosts = None
            if (shape := NETWORKS[link]) is not None:
                hosts = stack.enter_context(Hosts(options.workers + 1, rate=shape[0], delay_s=shape[1]))
            pool = _Pool(stack.enter_context(Processes()), options.workers, hosts)
            for seed in options.seeds:
                for name, order in ((name, order) for name, order in _arms(options, seed) if order.how in options.how):
                    wire = order.wire if order.how in _BY_SERVERS else ""
                    row = {"link": link, "steps": name, "wire": wire, "seed": seed, **pool.train(order)}
                    show(row, _in_words, options)
                    rows.append({**row, "every": order.sync_every if order.how == "outer" else 0})
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
        for growth in options.growth:
            yield f"outer, {every} inner in the mean, growth {growth:g}", replace(outer, growth=growth)
        if options.fragments and every % options.fragments == 0 and every // options.fragments >= options.delay:
            parts = replace(outer, fragments=options.fragments)
            yield f"outer, {every} inner, {options.fragments} fragments", parts
            words = f"outer, {every} inner, {options.fragments} fragments, delay {options.delay}, alpha {options.alpha:g}"
            yield words, replace(parts, delay=options.delay, alpha=options.alpha)
        if options.faults:
            quorum = replace(outer, num_required=options.workers - 1, pace_s=options.pace)
            yield f"outer, {every} inner, {quorum.num_required} of {options.workers}", quorum
            words = f"outer, {every} inner, {quorum.num_required} of {options.workers}, {options.faults} faults"
            yield words, replace(quorum, num_faults=options.faults)


def _in_words(row: dict[str, Any]) -> str:
    figures = [f"{row['loss']:.4f}", f"{row['seconds']:.1f}", f"{row['characters_per_s']:.0f}"]
    longest = f"{row['longest_s']:.1f}" if row["longest_s"] else ""
    return as_row([row["link"], row["steps"], row["wire"], str(row["seed"]), *figures, longest, human_bytes(row["bytes"])])
