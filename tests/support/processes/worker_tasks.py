"""A worker process that carries out a test's tasks: one task a line, answered by one line. Knows `worker_client` as any user does."""

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
    from tests.support.sessions.models import MODELS, WIDTH, contribution, ones
    from worker_client import IndexedSlices, Session

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
def join(session: Session, *, model: str) -> bool:
    """Joins one of the models; whether it was created by this worker."""
    return session.create_or_join(**MODELS[model](), timeout_s=20)


@task
def read(session: Session, *, name: str) -> list[float]:
    """Reads a variable; its least and its largest element."""
    value = session.read()[name]
    return [float(value.min()), float(value.max())]


@task
def push_ones(session: Session, *, times: int, waits: bool = True) -> list[Record]:
    """Pushes ones again and again."""
    gradients = session.gradient_buffers()
    for gradient in gradients.values():
        gradient.fill(1)
    records = []
    for _ in range(times):
        push = session.push(gradients)
        records.append(_record(push))
        if waits:
            session.wait(timeout_s=20)
    return records


@task
def await_token(session: Session) -> bool:
    """Waits until all that the worker has pushed is applied; whether training continues."""
    return session.wait(timeout_s=20)


@task
def train(session: Session, *, max_steps: int = 1_000_000) -> dict[str, Any]:
    """Contributes ones to the model `counting` until the end, or for some steps; its records, and each policy that it has heard of."""
    records: list[Record] = []
    policies, (gradients, updates) = [session.policy.text], ones()
    while not session.is_finished and len(records) < max_steps:
        session.read()
        result = session.step(gradients, updates=updates, timeout_s=30)
        records.append(_record(result))
        if session.policy.text != policies[-1]:
            policies.append(session.policy.text)
    return {"records": records, "policies": policies, "local_step": session.local_step, "is_finished": session.is_finished}


@task
def train_randomly(session: Session, *, times: int, timeout_s: float = 20) -> list[str]:
    """Does steps with random gradients of each variable; names (hashes) of the values read after each."""
    names = []
    for _ in range(times):
        rng = np.random.default_rng([session.worker_index, session.local_step])
        gradients = session.gradient_buffers()
        for gradient in gradients.values():
            gradient[...] = rng.standard_normal(gradient.shape)
        session.step(gradients, timeout_s=timeout_s)
        names.append(hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(session.read().items()))).hexdigest())
    return names


@task
def transport(session: Session) -> list[str]:
    """How gradients and variables come to each parameter server and back."""
    return list(session.transport)


@task
def push_rows(session: Session, *, gradients: dict[str, tuple[list[int], list[list[float]]] | None]) -> Record:
    """Does a step with these rows (indices and values) of each table."""
    rows = {
        name: None if given is None else IndexedSlices(np.array(given[0], np.int64), np.array(given[1], np.float32).reshape(-1, WIDTH))
        for name, given in gradients.items()
    }
    return _record(session.step(rows, timeout_s=20))


@task
def push_random_rows(session: Session, *, tables: dict[str, int | None], rows: int, times: int) -> None:
    """Reads and changes so many rows of each table in each of some steps; `tables` has their numbers of rows, None for no gradient."""
    rng = np.random.default_rng(session.worker_index)
    for _ in range(times):
        gradients: dict[str, Any] = dict.fromkeys(tables)
        for name, num_rows in tables.items():
            if num_rows is not None:
                indices = rng.choice(num_rows, rows, replace=False)
                gradients[name] = IndexedSlices(indices, session.read_rows(name, indices))
        session.step(gradients, timeout_s=20)


@task
def move_table(session: Session, *, name: str, shape: list[int], times: int) -> list[Record]:
    """Takes 1 away from every element of a table, step after step."""
    gradients = {name: np.ones(shape, np.float32)}
    return [_record(session.step(gradients, timeout_s=20)) for _ in range(times)]


@task
def watch_table(session: Session, *, name: str, times: int) -> list[list[float]]:
    """Reads a whole table again and again; of each, the worker's step, its least and its largest element."""
    found = []
    for _ in range(times):
        rows = session.read_rows(name)
        found.append([session.local_step, float(rows.min()), float(rows.max())])
    return found


@task
def read_rows(session: Session, *, name: str, indices: list[int] | None = None) -> list[list[float]]:
    """Reads rows of a table."""
    values: list[list[float]] = session.read_rows(name, indices).tolist()
    return values


@task
def contribute_statistics(session: Session, *, until: int) -> list[Record]:
    """Contributes to the model `statistics`, until a step is reached, what `models.contribution` says for this worker and step."""
    records = []
    while session.local_step < until:
        session.read()
        gradients, updates, metrics = contribution(session.worker_index, session.local_step)
        records.append(_record(session.step(gradients, updates=updates, metrics=metrics, timeout_s=20)))
    return records


def _record(push: worker_client.Push) -> Record:
    return [push.outcome.name, push.step, push.applied_step, push.staleness]


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
