"""One worker of the scale benchmarks: trains on one cluster or, by turns, on several, and reports its times. Knows only the SDK.

Gradients are not computed but written once, so that only the parameter servers' part of a step is timed.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.worker import Station
from benchmarks.harness.workload import OPTIMIZERS, own_cpu_s, own_peak_rss_bytes
from ps_protocol.model.variables import Array
from worker_client import Session

NUM_WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWork:
    """`chiefs[i]` has a model of `total_bytes` in `num_variables[i]` variables; each gets `num_rounds` turns of `num_steps` steps."""

    worker: int
    chiefs: Sequence[str]
    num_variables: Sequence[int]
    total_bytes: int
    num_rounds: int
    num_steps: int
    optimizer: str = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of each step of a turn and of its calls, and the process's CPU seconds of the turn."""

    target: int
    step_s: list[float]
    read_s: list[float]
    cpu_s: float


def work(orders: dict[str, Any], station: Station) -> None:
    """Does the work as one worker process, and stays until it is released."""
    work, sessions = ScaleWork(**orders), []
    for target, num_variables in enumerate(work.num_variables):
        begin = time.monotonic()
        session = worker_client.connect(work.chiefs[target], worker_index=work.worker)
        connected = time.monotonic()
        session.create_or_join(_values(work.total_bytes, num_variables), optimizer=OPTIMIZERS[work.optimizer]())
        joined = {"connect_s": connected - begin, "join_s": time.monotonic() - connected}
        for gradient in session.gradient_buffers().values():
            gradient.fill(0.001)
        sessions.append(session)
        station.say("joined", target=target, **joined, transport=[str(kind) for kind in getattr(session, "transport", ())])
    for session in sessions:
        _turn(session, 0, num_steps=NUM_WARMUP_STEPS)
    station.say("warm")
    turns = [_turn(session, target, num_steps=work.num_steps) for _ in range(work.num_rounds) for target, session in enumerate(sessions)]
    turned = [dataclasses.asdict(turn) for turn in turns]
    station.say("done", worker=work.worker, turns=turned, peak_rss_bytes=own_peak_rss_bytes())
    station.await_release()
    for session in sessions:
        session.close()


def _values(total_bytes: int, num_variables: int) -> dict[str, Array]:
    num_elements = total_bytes // 4 // num_variables
    return {f"layer{index // 10}/weights{index % 10}": np.ones(num_elements, np.float32) for index in range(num_variables)}


def _turn(session: Session, target: int, *, num_steps: int) -> Turn:
    step_s, read_s, cpu_s = [], [], own_cpu_s()
    for _ in range(num_steps):
        begin = time.perf_counter()
        session.views()
        read_s.append(time.perf_counter() - begin)
        result = session.step(session.gradient_buffers())
        step_s.append(time.perf_counter() - begin)
        if not result.is_accepted:
            raise RuntimeError(f"step {result.step}: the contribution is {result.outcome.name}, so this is no measurement")
    return Turn(target=target, step_s=step_s, read_s=read_s, cpu_s=own_cpu_s() - cpu_s)
