"""A worker process of the equivalence tests: joins one cluster after the other, trains in each, and writes what came out."""

import argparse
import threading
from pathlib import Path

import numpy as np

import worker_client
from ps_protocol.model.variables import Array
from tests.processes.training.equivalence import NUM_STEPS, Values, gradients, initial_values, rows_of, spec_of
from worker_client import Session

MAX_DELAY_S = 0.004


def train(session: Session, *, optimizer: str, images: Array, labels: Array, delay_seed: int) -> Values:
    """Trains to the last step, pausing at random before each contribution, and returns copies of the final variables."""
    delays = np.random.default_rng([delay_seed, session.worker_index])
    with session:
        # Small variables, split all the same, so that every shard has a part of the arithmetic.
        session.create_or_join(initial_values(), optimizer=spec_of(optimizer), split_bytes=1000, timeout_s=30)
        staging = session.gradient_buffers()
        while not session.is_finished:
            found = gradients(session.read(), images, labels, rows_of(session.worker_index, session.local_step, labels.size))
            threading.Event().wait(MAX_DELAY_S * delays.random() ** 3)
            for name, gradient in found.items():
                staging[name][...] = gradient
            result = session.step(staging, timeout_s=30)
            assert result.is_accepted, result
        assert session.local_step == NUM_STEPS
        return {name: value.copy() for name, value in session.read().items()}


def main() -> None:
    """Trains once for each `--run OPTIMIZER=CHIEF`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--delay-seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", action="append", required=True)
    arguments = parser.parse_args()
    images, labels = np.load(arguments.data / "images.npy"), np.load(arguments.data / "labels.npy")  # noqa: TID251 (our own)
    for run in arguments.run:
        optimizer, _, chief = run.partition("=")
        session = worker_client.connect(chief, worker_index=arguments.worker, timeout_s=30)
        values = train(session, optimizer=optimizer, images=images, labels=labels, delay_seed=arguments.delay_seed)
        arguments.out.joinpath(f"{optimizer}-{arguments.worker}").mkdir()
        for name, value in values.items():
            np.save(arguments.out / f"{optimizer}-{arguments.worker}" / f"{name}.npy", value)


if __name__ == "__main__":
    main()
