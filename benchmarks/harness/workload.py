"""The measured work: variables of a given size, a gradient that costs almost nothing, one worker's loop. Knows only the SDK."""

import dataclasses
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.arguments import WrongArguments
from benchmarks.harness.process_memory import peak_rss_bytes, pss_bytes
from benchmarks.harness.worker import Station
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array
from worker_client import Session, adagrad, adam, connect, momentum, sgd

# The first steps fill pools and caches, and the very first waits until every worker is up.
NUM_WARMUP_STEPS = 3

OPTIMIZERS: dict[str, Callable[[], OptimizerSpec]] = {
    "sgd": lambda: sgd(0.1),
    "momentum": lambda: momentum(0.1),
    "adagrad": lambda: adagrad(0.1),
    "adam": lambda: adam(0.001),
}
# The number of slots, each of a variable's size, of each optimizer.
NUM_SLOTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`total_bytes` of float32 split evenly over `num_variables`; `num_steps` are measured, after the warm-up."""

    total_bytes: int
    num_variables: int
    num_workers: int
    num_ps: int
    num_steps: int
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        for name in ("num_variables", "num_workers", "num_ps", "num_steps"):
            if getattr(self, name) < 1:
                raise WrongArguments(f"{name}: got {getattr(self, name)}, want >= 1")
        if self.num_elements < 1:
            raise WrongArguments(
                f"{self.total_bytes} bytes are less than a float32 for each of {self.num_variables} variables; want more bytes"
            )

    @property
    def num_elements(self) -> int:
        """Elements of one variable."""
        return self.total_bytes // 4 // self.num_variables

    def initial_values(self) -> dict[str, Array]:
        """The first values, the same in every worker."""
        random = np.random.default_rng(0)
        return {f"v{index:04d}": random.standard_normal(self.num_elements, np.float32) for index in range(self.num_variables)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """One worker's measurements: wall seconds of each step, its process's CPU seconds over all steps, bytes of memory.

    `transports`: its session's transport to each shard.
    """

    step_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    num_accepted: int = 0
    pss_bytes: int = 0
    transports: Sequence[str] = ()


def work(orders: dict[str, Any], station: Station) -> None:
    """Runs the workload as one worker process, and stays until it is released.

    `keeps_stepping`: it continues to make steps after measuring, so that asynchronous workers do not become faster as others end.
    `say_every`: the number of measured steps between two reports.
    """
    workload, say_every = Workload(**orders["workload"]), orders.get("say_every")

    def on_step(step: int) -> None:
        if say_every and step % say_every == 0:
            station.say("step", step=step)

    with connect() as session:
        figures = run_worker(session, workload, on_joined=station.await_go, on_warm=lambda: station.say("warm"), on_step=on_step)
        station.say("done", figures=dataclasses.asdict(figures))
        while orders["keeps_stepping"] and not station.is_released:
            take_step(session)
        station.await_release()


def run_worker(
    session: Session,
    workload: Workload,
    *,
    on_joined: Callable[[], object],
    on_warm: Callable[[], object],
    on_step: Callable[[int], None] = lambda step: None,
) -> WorkerFigures:
    """Trains and measures. Leaves the session open.

    Calls `on_joined` once it has the model; `on_joined` must not return before all workers have joined, because an asynchronous worker
    would otherwise train alone for a while. Calls `on_warm` between warm-up and measurement, and `on_step` after each measured step.
    """
    session.create_or_join(workload.initial_values(), optimizer=OPTIMIZERS[workload.optimizer]())
    on_joined()
    for _ in range(NUM_WARMUP_STEPS):
        take_step(session)
    on_warm()
    step_s, num_accepted, cpu_s = [], 0, own_cpu_s()
    for step in range(1, workload.num_steps + 1):
        begin = time.perf_counter()
        num_accepted += take_step(session)
        step_s.append(time.perf_counter() - begin)
        on_step(step)
    cpu_s = own_cpu_s() - cpu_s
    return WorkerFigures(
        step_s=step_s,
        cpu_s=cpu_s,
        peak_rss_bytes=own_peak_rss_bytes(),
        num_accepted=num_accepted,
        pss_bytes=pss_bytes(),
        transports=transports_of(session),
    )


def take_step(session: Session) -> bool:
    """Reads every byte and pushes every byte, as a user would. Returns whether the contribution counts."""
    variables, gradients = session.views(), session.gradient_buffers()
    for name, value in variables.items():
        np.multiply(value, 0.001, out=gradients[name])
    return session.step(gradients).is_accepted


def transports_of(session: Session) -> list[str]:
    """The session's transport to each shard."""
    transports = session.transport
    return [transports] if isinstance(transports, str) else list(transports)


def own_cpu_s() -> float:
    """CPU seconds of this process so far, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    # ru_maxrss only as a fallback: it begins with the parent's memory at the fork.
    return peak_rss_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
