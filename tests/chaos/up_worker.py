"""The chaos worker as `lockstep up` starts it: finds its cluster in the environment, and prints its steps."""

import sys
import threading
from pathlib import Path

import worker_client
from tests.chaos import script


def main() -> None:
    """Contributes until training is finished."""
    directory, pace_s = Path(sys.argv[1]), float(sys.argv[2])
    with worker_client.connect(timeout_s=60) as session:
        session.create_or_join(script.initial_values(), optimizer=script.optimizer(), split_bytes=script.SPLIT_BYTES, timeout_s=60)
        while not session.is_finished:
            step = session.local_step
            threading.Event().wait(pace_s)
            found = session.step(script.gradients(step, session.worker_index), timeout_s=60)
            print(f"step {step} {found.outcome.name}", flush=True)
        script.save(directory / f"worker-{session.worker_index}.npz", session.read())


if __name__ == "__main__":
    main()
