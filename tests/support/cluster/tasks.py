"""A worker that carries out a test's tasks: one task a line, answered by one line. Knows `worker_client` as any user does."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ps_protocol.process.memory import importing_for_good

with importing_for_good():
    import numpy as np

    import worker_client
    from worker_client import Session

TASKS: dict[str, Callable[..., Any]] = {}
# How many seconds a server that does not answer is waited for.
PATIENCE_VARIABLE = "TEST_PATIENCE_S"


def task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function something that a test can ask for by its name."""
    TASKS[function.__name__] = function
    return function


@task
def join(session: Session) -> bool:
    """Joins a model of a variable large enough to be applied in many blocks; whether it was created by this worker."""
    return session.create_or_join({"w": np.zeros(1 << 20, np.float32)}, optimizer=worker_client.sgd(1.0), timeout_s=20)


@task
def train_randomly(session: Session, *, times: int, timeout_s: float = 20) -> None:
    """Does steps with random gradients, and reads after each."""
    for _ in range(times):
        rng = np.random.default_rng([session.worker_index, session.local_step])
        gradients = session.gradient_buffers()
        gradients["w"][...] = rng.standard_normal(gradients["w"].shape)
        session.step(gradients, timeout_s=timeout_s)
        session.read()


def main() -> None:
    """Connects as the worker named on the command line and does what standard input says until that ends."""
    chief, index = sys.argv[1:]
    patience_s = float(os.environ.get(PATIENCE_VARIABLE, "20"))
    with worker_client.connect(chief, worker_index=int(index), timeout_s=patience_s) as session:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = {"result": TASKS[order["task"]](session, **order["arguments"])}
            except Exception as error:
                traceback.print_exc()  # another worker's wait for this one may be what the test hears of first
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
