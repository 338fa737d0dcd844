"""A training program in the style of tf.compat.v1.train, made synchronous by SyncReplicasOptimizer, for any number of workers.

python examples/sync_replicas.py
lockstep up --ps 2 --workers 2 -- python examples/sync_replicas.py
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from worker_client import sync_replicas

NUM_STEPS = 200


def main() -> None:
    """Fits a line to noisy points, and prints the result."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    worker_index = int(os.environ.get("LOCKSTEP_WORKER_INDEX", "0"))
    num_workers = int(os.environ.get("LOCKSTEP_NUM_WORKERS", "1"))
    is_chief = worker_index == 0

    # Declare the model: variables, the step, and how they are trained.
    rng = np.random.default_rng(worker_index)
    inputs = rng.normal(size=(1000, 3))
    targets = inputs @ [2.0, -1.0, 0.5] + 4.0 + 0.1 * rng.normal(size=1000)
    weights = sync_replicas.get_variable("weights", np.zeros(3))
    bias = sync_replicas.get_variable("bias", np.zeros(()))
    global_step = sync_replicas.get_or_create_global_step()

    def loss(variables: Mapping[str, Any]) -> Any:
        """Returns the mean squared error of this worker's points, and its gradients by name."""
        error = inputs @ variables["weights"] + variables["bias"] - targets
        return float((error**2).mean()), {"weights": 2 * inputs.T @ error / len(error), "bias": 2 * error.mean()}

    averages = sync_replicas.ExponentialMovingAverage(0.99, num_updates=global_step)
    optimizer = sync_replicas.SyncReplicasOptimizer(
        sync_replicas.GradientDescentOptimizer(0.05),
        replicas_to_aggregate=num_workers,
        total_num_replicas=num_workers,
        variable_averages=averages,
        variables_to_average=[weights, bias],
    )
    train_op = optimizer.minimize(loss, global_step=global_step)
    hooks = [
        optimizer.make_session_run_hook(is_chief, num_tokens=0),  # 0: each step has one gradient from every worker
        sync_replicas.StopAtStepHook(last_step=NUM_STEPS),
        sync_replicas.NanTensorHook(loss),
        sync_replicas.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=50),
    ]

    # Run it as if it were not synchronized. The launcher names the master; without one, the cluster is inside this process.
    with sync_replicas.MonitoredTrainingSession(is_chief=is_chief, hooks=hooks) as session:
        while not session.should_stop():
            session.run(train_op)
        found, average = session.run([weights, averages.average(weights)])
        print(f"worker {worker_index}: weights {found.round(3)} average {average.round(3)} bias {session.run(bias):.3f}")


if __name__ == "__main__":
    main()
