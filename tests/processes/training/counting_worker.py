"""A worker that counts each sample of the training data in the model, and its own contributions there and in its state.

Run as `counting_worker.py SAMPLES SIZE PASSES`.
"""

import os
import sys
import threading

import numpy as np

import worker_client

# Longer than a step takes, so that the data lasts for all that is done to the cluster, however fast the machine is.
PACE_S = 0.005


def main() -> None:
    num_samples, batch_size, num_epochs = map(int, sys.argv[1:])
    with worker_client.connect() as session:
        session.create_or_join({"samples": np.zeros(num_samples, np.float32), "own": np.zeros(2)}, optimizer=worker_client.sgd(1.0))
        state, index = session.user_state, session.worker_index
        for batch in session.batches("train", num_samples=num_samples, batch_size=batch_size, num_epochs=num_epochs, shuffle_seed=1):
            own = session.read()["own"][index]
            n, noise = state.get("n", 0), state.get("noise", b"")
            if (own, len(noise)) != (n, n % 100):
                print(f"step {session.local_step}: the variables have {own} contributions, the state {n} and {len(noise)}", flush=True)
                os._exit(3)
            threading.Event().wait(PACE_S)
            samples, contribution = np.zeros(num_samples, np.float32), np.zeros(2)
            samples[batch.start : batch.stop] = contribution[index] = -1
            state["n"], state["noise"] = n + 1, os.urandom((n + 1) % 100)
            result = session.step({"samples": samples, "own": contribution})
            if result.outcome is worker_client.PushOutcome.LATE:  # another worker's contribution has counted the range meanwhile
                state["n"], state["noise"] = n, noise


if __name__ == "__main__":
    main()
