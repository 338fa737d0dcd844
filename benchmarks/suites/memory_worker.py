"""One worker process of `benchmarks.suites.memory`: trains, and says now and then how far it is. Knows the SDK; no other process."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.harness.waiting import await_file
from ps_protocol.model.variables import Array
from worker_client import Session, adam, connect, sgd

RELEASE_VARIABLE = "BENCHMARK_RELEASE"
OPTIMIZERS = {"sgd": lambda: sgd(0.1), "adam": lambda: adam(0.001)}


def main() -> None:
    """Runs the work given as JSON in the first argument; stays until it is told to go, so that the others can be looked at."""
    work = json.loads(sys.argv[1])
    release = Path(os.environ[RELEASE_VARIABLE])
    with connect() as session:
        session.create_or_join(_initial_values(work["bytes"], work["variables"]), optimizer=OPTIMIZERS[work["optimizer"]]())
        for step in range(1, work["steps"] + 1):
            _take_step(session)
            if step % work["every"] == 0:
                print(json.dumps({"event": "step", "step": step}), flush=True)
        await_file(release)


def _initial_values(nbytes: int, num_variables: int) -> dict[str, Array]:
    size = nbytes // 4 // num_variables
    return {f"v{index:04d}": np.full(size, 0.5, np.float32) for index in range(num_variables)}


def _take_step(session: Session) -> None:
    variables, gradients = session.read(), session.gradient_buffers()
    for name, value in variables.items():
        np.multiply(value, 0.001, out=gradients[name])
    session.step(gradients)


if __name__ == "__main__":
    main()
