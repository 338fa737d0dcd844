"""A worker whose state must fit the variables at every step: both count its contributions. Run as `state_worker.py STEPS`."""

import os
import sys
import threading

import numpy as np

import worker_client

# Longer than a step takes, so that training lasts for all that is done to the cluster, however fast the machine is.
PACE_S = 0.005
NUM_WORKERS = 2


def main() -> None:
    num_steps = int(sys.argv[1])
    with worker_client.connect() as session:
        session.create_or_join({"count": np.zeros(NUM_WORKERS)}, optimizer=worker_client.sgd(float(NUM_WORKERS)))
        state, index = session.user_state, session.worker_index
        print("joined at", state.get("n", 0), flush=True)
        while not session.is_finished and session.local_step < num_steps:
            count = session.read()["count"][index]
            n, noise = state.get("n", 0), state.get("noise", b"")
            if (count, len(noise)) != (n, n % 100):
                print(f"step {session.local_step}: the variables have {count} contributions, the state {n} and {len(noise)}", flush=True)
                os._exit(3)
            threading.Event().wait(PACE_S)
            gradient = np.zeros(NUM_WORKERS)
            gradient[index] = -1
            state["n"], state["noise"] = n + 1, os.urandom((n + 1) % 100)
            session.step({"count": gradient})
        print("ended at", state["n"], "of step", session.local_step, flush=True)


if __name__ == "__main__":
    main()
