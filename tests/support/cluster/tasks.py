"""A worker that carries out a test's tasks: one task a line, answered by one line. Knows `worker_client` as any user does."""

import hashlib
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

# Of each push: outcome, step of its variables, step that it was applied at, staleness.
Record = list[Any]
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
def read(session: Session) -> list[float]:
    """Reads the variable; its least and its largest element."""
    value = session.read()["w"]
    return [float(value.min()), float(value.max())]


@task
def push_ones(session: Session, *, times: int) -> list[Record]:
    """Pushes ones again and again, and waits for no token."""
    gradients = session.gradient_buffers()
    gradients["w"].fill(1)
    pushes = [session.push(gradients) for _ in range(times)]
    return [[push.outcome.name, push.step, push.applied_step, push.staleness] for push in pushes]


@task
def await_token(session: Session) -> bool:
    """Waits until all that the worker has pushed is applied; whether training continues."""
    return session.wait(timeout_s=20)


@task
def train_randomly(session: Session, *, times: int, timeout_s: float = 20) -> list[str]:
    """Does steps with random gradients; names (hashes) of the values read after each."""
    names = []
    for _ in range(times):
        rng = np.random.default_rng([session.worker_index, session.local_step])
        gradients = session.gradient_buffers()
        gradients["w"][...] = rng.standard_normal(gradients["w"].shape)
        session.step(gradients, timeout_s=timeout_s)
        names.append(hashlib.sha256(session.read()["w"].tobytes()).hexdigest())
    return names


@task
def transport(session: Session) -> list[str]:
    """How gradients and variables come to each parameter server and back."""
    return list(session.transport)


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
