"""The processes of the benchmark of followers: one that trains, those that follow, one that reads the whole. Knows only the SDK."""

import time
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.worker import Station
from ps_protocol.model.variables import Array
from worker_client import Session

_NUM_VARIABLES = 16
_NUM_READS = 3


def work(orders: dict[str, Any], station: Station) -> None:
    """Does the work of a role."""
    {"trainer": _train, "follower": _follow, "observer": _observe}[orders["role"]](orders, station)


def _train(orders: dict[str, Any], station: Station) -> None:
    rng = np.random.default_rng(0)
    count = orders["size"] // 4 // _NUM_VARIABLES
    values = {f"v{index}": rng.normal(scale=0.02, size=count).astype(np.float32) for index in range(_NUM_VARIABLES)}
    updates = [_update(values, orders["share"], rng, sign) for sign in (1, -1)]
    with worker_client.connect() as session:
        session.create_or_join(values, optimizer=worker_client.sgd(1.0))
        _steps(session, updates, orders, count=3)
        step_s, _ = _steps(session, updates, orders)
        station.say("alone", step_s=step_s, last_step=session.global_step + orders["num_steps"])
        station.await_go()
        step_s, made_at = _steps(session, updates, orders)
        station.say("trained", step_s=step_s, made_at=made_at)
        station.await_release()


def _update(values: dict[str, Array], share: float, rng: np.random.Generator, sign: int) -> dict[str, Array]:
    """Returns gradients that move a share of the elements to a neighbour in bfloat16, at 1 %, and leave the others."""
    found = {}
    for name, value in values.items():
        found[name] = np.zeros_like(value)
        chosen = rng.random(value.shape) < share
        found[name][chosen] = sign * (0.01 * np.abs(value[chosen]) + 1e-4)
    return found


def _steps(
    session: Session, updates: list[dict[str, Array]], orders: dict[str, Any], *, count: int | None = None
) -> tuple[list[float], list[tuple[int, float]]]:
    """Makes steps; returns how long each took, and when it was there."""
    step_s, made_at = [], []
    for number in range(count or orders["num_steps"]):
        begin = time.perf_counter()
        session.step(updates[number % 2])
        step_s.append(time.perf_counter() - begin)
        made_at.append((session.global_step, time.time()))
        time.sleep(orders["pace_s"])
    return step_s, made_at


def _follow(orders: dict[str, Any], station: Station) -> None:
    with worker_client.follow(wire="bfloat16") as weights:
        target = {name: np.zeros(shape, np.float32) for name, shape in weights.shapes.items()} if weights.wait() is not None else {}
        weights.into(target)
        received, answers = weights.received_bytes, weights.num_patches + weights.num_wholes
        station.say("ready")
        swapped_at = []
        while weights.step is None or weights.step < orders["last_step"]:
            weights.wait(step=(weights.step or 0) + 1)
            step = weights.into(target)
            swapped_at.append((step, time.time()))
        answers = weights.num_patches + weights.num_wholes - answers
        station.say("followed", swapped_at=swapped_at, bytes=weights.received_bytes - received, answers=answers)
        station.await_release()


def _observe(orders: dict[str, Any], station: Station) -> None:
    read_s = []
    for _ in range(_NUM_READS):
        with worker_client.observe(wire="bfloat16") as observer:  # one that holds nothing yet
            observer.model()
            begin = time.perf_counter()
            observer.views()
            read_s.append(time.perf_counter() - begin)
    station.say("read", read_s=read_s)
    station.await_release()
