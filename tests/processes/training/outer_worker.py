"""`python -m tests.processes.training.outer_worker DIRECTORY [int4]`: a worker of outer steps in fragments, until its training ends.

With int4 so few bits travel, both ways. Its values at the end are in a file of DIRECTORY, where it keeps what another process in its place
goes on from.
"""

import sys
from pathlib import Path

import numpy as np

import lockstep

FIRST = {"a": np.linspace(-1, 1, 300, dtype=np.float32), "b": np.full((7, 5), 2.0, np.float32)}


def main() -> None:
    """Trains by gradients with momentum, which is the inner optimizer's state."""
    directory, outer, wire = Path(sys.argv[1]), lockstep.momentum(0.5, 0.8, use_nesterov=True), None
    if sys.argv[2:] == ["int4"]:
        outer, wire = lockstep.outer_optimizer(6, bits=4), lockstep.WireFormat(gradients="int4", variables="int4", error_feedback=False)
    with lockstep.connect(wire=wire) as session:
        session.create_or_join(FIRST, optimizer=outer)
        options = {"sync_every": 6, "fragments": 2, "delay": 2, "alpha": 0.5}
        with lockstep.DiLoCo(session, inner_state_dir=directory / "state", **options) as loop:  # type: ignore[arg-type]
            values, moments = loop.values, {name: loop.inner_state.get(name, np.zeros_like(value)) for name, value in FIRST.items()}
            while not loop.is_finished:
                random = np.random.default_rng([session.worker_index, loop.num_inner_steps])
                for name, value in values.items():
                    moments[name] = 0.9 * moments[name] + 0.1 * (value - random.standard_normal(value.shape, np.float32))
                    value -= 0.05 * moments[name]
                values |= loop.step(values, lambda: moments)
            with (directory / f"worker-{session.worker_index}.values").open("wb") as file:
                np.savez(file, **values)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
