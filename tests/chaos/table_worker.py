"""A worker that contributes rows of two tables, one of them with keys, by a script; and the values that must result."""

import threading
from collections.abc import Mapping

import numpy as np

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.model.variables import Array
from tests.chaos import worker
from worker_client import EmbeddingTable, IndexedSlices, Session

NUM_ROWS = 500
KEYS = np.arange(-1050, 1050, 7, dtype=np.int64)


def join(session: Session) -> None:
    """Brings the model, or joins it."""
    first = worker_client.uniform_initializer(-1.0, 1.0, seed=3)
    # So few rows that each of the few buckets halves its counters, and rows make room for others.
    keyed = EmbeddingTable(4, keys="int64", initializer=first, admit_after=3, max_rows=100)
    tables = {"rows": EmbeddingTable((NUM_ROWS, 4), initializer=first), "keyed": keyed}
    session.create_or_join({"b": np.ones(13), **tables}, optimizer=worker_client.adagrad(0.1), split_bytes=600, timeout_s=60)


def gradients(step: int, index: int) -> Mapping[str, Array | IndexedSlices]:
    """Returns what a worker contributes to a step: a few rows of each table."""
    rng = np.random.default_rng([step, index])
    found: dict[str, Array | IndexedSlices] = {"b": rng.normal(size=13)}
    for name, known in (("rows", np.arange(NUM_ROWS)), ("keyed", KEYS)):
        found[name] = IndexedSlices(np.sort(rng.choice(known, size=5, replace=False)), rng.normal(size=(5, 4)).astype(np.float32))
    return found


def values(session: Session) -> dict[str, Array]:
    """Reads all that has been trained."""
    read = {name: session.read_rows(name, known) for name, known in (("rows", np.arange(NUM_ROWS)), ("keyed", KEYS))}
    return {"b": session.read()["b"], **read}


def reference(*, num_steps: int, num_workers: int) -> dict[str, Array]:
    """Returns the values after a run without a fault, in this process."""
    cluster = InProcessCluster(replicas_to_aggregate=num_workers, total_num_replicas=num_workers, max_steps=num_steps)
    sessions = [worker_client.local(cluster, worker_index=index) for index in range(num_workers)]
    for session in sessions:
        join(session)
    for step in range(num_steps):
        for index, session in enumerate(sessions):
            session.push(gradients(step, index))
        for session in sessions:
            session.wait()
    found = values(sessions[0])
    for session in sessions:
        session.close()
    return found


def train(session: Session, diary: worker.Diary, *, pace_s: float, fails_at: int | None, failure: str) -> None:
    """Contributes until training is finished."""
    join(session)
    diary.write("joined", step=session.local_step)
    while not session.is_finished:
        step = session.local_step
        threading.Event().wait(pace_s)
        found = session.step(gradients(step, session.worker_index), timeout_s=90)
        diary.write("step", step=step, outcome=found.outcome.name, after=session.local_step, epoch=session.epoch)
    diary.write("finished", step=session.local_step)


if __name__ == "__main__":
    worker.main(train, values)
