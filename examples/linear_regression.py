"""Fits a line to noisy points, alone or with any number of workers, each with points of its own.

python examples/linear_regression.py
lockstep up --ps 2 --workers 3 -- python examples/linear_regression.py
"""

import os

import numpy as np

import lockstep

NUM_STEPS = 200


def main() -> None:
    """Trains until the last step, and prints the result."""
    session = lockstep.connect() if "LOCKSTEP_CHIEF" in os.environ else lockstep.local()
    with session:
        rng = np.random.default_rng(session.worker_index)
        inputs = rng.normal(size=(1000, 3))
        targets = inputs @ [2.0, -1.0, 0.5] + 4.0 + 0.1 * rng.normal(size=1000)

        session.create_or_join({"weights": np.zeros(3), "bias": np.zeros(())}, optimizer=lockstep.sgd(0.1))
        while not session.is_finished:
            variables = session.read()
            error = inputs @ variables["weights"] + variables["bias"] - targets
            session.step({"weights": inputs.T @ error / len(error), "bias": error.mean()})
            if session.local_step >= NUM_STEPS:
                session.finish("enough steps")

        variables = session.read()
        print(f"worker {session.worker_index}: weights {variables['weights'].round(3)} bias {variables['bias']:.3f}")


if __name__ == "__main__":
    main()
