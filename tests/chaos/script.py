"""The contributions of every worker to every step, in spite of all faults, and the values that must result. Knows the SDK; no process.

The gradients depend on step and worker alone, so that any run that applies each contribution once, and none twice, ends with the same
bytes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array

Values = dict[str, Array]
SHAPES: dict[str, tuple[tuple[int, ...], type]] = {"w": ((61, 7), np.float32), "b": ((13,), np.float64), "v": ((40,), np.float32)}
# Small variables, split all the same, so that each server has a part of the arithmetic.
SPLIT_BYTES = 600


def initial_values() -> Values:
    """Returns the first values."""
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def gradients(step: int, worker: int) -> Values:
    """Returns what this worker contributes to this step."""
    rng = np.random.default_rng([step, worker])
    return {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def without_a_number(step: int, worker: int) -> Values:
    """Returns `gradients` with one element that is not a number."""
    found = gradients(step, worker)
    found["b"][3] = np.nan
    return found


def optimizer() -> OptimizerSpec:
    """Returns one with slots and a counter of steps, which must come back with the values."""
    return worker_client.adam(0.01)


def reference(
    *,
    num_steps: int,
    num_workers: int,
    gradients_of: Callable[[int, int], Values] = gradients,
    see: Callable[[int, Values], object] = lambda step, values: None,
) -> Values:
    """Returns the values after a run without a fault, in this process; `gradients_of`: what a worker contributes to a step.

    `see` is shown the values of each step.
    """
    cluster = InProcessCluster(replicas_to_aggregate=num_workers, total_num_replicas=num_workers, max_steps=num_steps)
    sessions = [worker_client.local(cluster, worker_index=index) for index in range(num_workers)]
    for session in sessions:
        session.create_or_join(initial_values(), optimizer=optimizer(), split_bytes=SPLIT_BYTES)
    for step in range(num_steps):
        see(step, sessions[0].read())
        for index, session in enumerate(sessions):
            session.push(gradients_of(step, index))
        for session in sessions:
            session.wait()
    values = {name: value.copy() for name, value in sessions[0].read().items()}
    see(num_steps, values)
    for session in sessions:
        session.close()
    return values


def save(path: Path, values: Mapping[str, Array]) -> None:
    """Writes values where `load` finds them, whole or not at all."""
    temporary, arrays = path.with_suffix(".tmp"), dict[str, Any](values)
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    temporary.rename(path)


def load(path: Path) -> Values:
    """Reads what `save` has written."""
    with np.load(path) as found:  # noqa: TID251 (our own)
        return {name: found[name] for name in found.files}


def assert_same_bytes(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """Fails, naming the variable, unless all values are the same to the last bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = found[name].tobytes() == value.tobytes()
        assert same, f"{name} differs in {int((found[name] != value).sum())} of {value.size} elements"
