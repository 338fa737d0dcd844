"""A worker that goes through training data and counts each sample in the model itself. Run as `data_worker.py SAMPLES SIZE PASSES`."""

import sys
import threading

import numpy as np

import worker_client

# Longer than a step takes, so that the data lasts for all that is done to the cluster, however fast the machine is.
PACE_S = 0.005


def main() -> None:
    num_samples, batch_size, num_epochs = map(int, sys.argv[1:])
    with worker_client.connect() as session:
        session.create_or_join({"count": np.zeros(num_samples, np.float32)}, optimizer=worker_client.sgd(1.0))
        print("joined", flush=True)
        for batch in session.batches("train", num_samples=num_samples, batch_size=batch_size, num_epochs=num_epochs, shuffle_seed=1):
            session.read()
            threading.Event().wait(PACE_S)
            gradient = np.zeros(num_samples, np.float32)
            gradient[batch.start : batch.stop] = -1
            session.step({"count": gradient})


if __name__ == "__main__":
    main()
