"""One worker of the policies' benchmark: learns the digits at its own pace and reports what became of its work. Knows only the SDK."""

import dataclasses
import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import worker_client
from lockstep.demo.digits import Examples, evaluate, initial_values, load_digits, loss_and_gradients, split
from worker_client import Session

SEED = 7
BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWork:
    """What every worker is given: a batch takes `pace_s` seconds at least, of the worker `slow_worker` `slowdown` times as many."""

    num_workers: int
    learning_rate: float
    pace_s: float
    slow_worker: int
    slowdown: float
    go: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReport:
    """What one worker saw: seconds from its first batch to the end, and of them waiting for others; its contributions and how stale."""

    seconds: float
    waiting_s: float
    num_accepted: int
    num_dropped: int
    staleness: list[int]
    test_accuracy: float
    loss: float
    step: int


def main() -> None:
    """Trains until the cluster is finished; the work is given as JSON in the first argument."""
    work = PolicyWork(**json.loads(sys.argv[1]))
    train, test = split(load_digits())
    with worker_client.connect() as session:
        session.create_or_join(initial_values(seed=SEED), optimizer=worker_client.sgd(work.learning_rate))
        _say({"event": "up"})
        while not Path(work.go).exists():  # so that the time of starting processes is nobody's advantage
            threading.Event().wait(0.002)
        report = _train(session, train.part(session.worker_index, num_parts=work.num_workers), test, work)
        _say({"event": "done", "report": dataclasses.asdict(report)})


def _train(session: Session, part: Examples, test: Examples, work: PolicyWork) -> WorkReport:
    pace_s = work.pace_s * (work.slowdown if session.worker_index == work.slow_worker else 1.0)
    begin, waiting_s, staleness, num_batches = time.perf_counter(), 0.0, [], 0
    while not session.is_finished:
        batch_begin = time.perf_counter()
        batch = part.batch(BATCH_SIZE, worker=session.worker_index, step=num_batches)
        gradients = session.gradient_buffers()
        loss_and_gradients(session.read(), batch.images, batch.labels, into=gradients)
        threading.Event().wait(max(0.0, pace_s - (time.perf_counter() - batch_begin)))
        push_begin = time.perf_counter()
        result = session.step(gradients)
        waiting_s += time.perf_counter() - push_begin
        num_batches += 1
        if result.is_accepted:
            staleness.append(result.staleness)
    seconds, found = time.perf_counter() - begin, evaluate(session.read(), test.images, test.labels)
    return WorkReport(
        seconds=seconds,
        waiting_s=waiting_s,
        num_accepted=len(staleness),
        num_dropped=num_batches - len(staleness),
        staleness=staleness,
        test_accuracy=found.accuracy,
        loss=found.loss,
        step=session.local_step,
    )


def _say(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
