"""One worker of the stragglers' benchmark: learns the digits, is late now and then, says when its steps began. Knows only the SDK."""

import dataclasses
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import worker_client
from lockstep.demo.digits import Examples, evaluate, initial_values, load_digits, loss_and_gradients, split
from ps_protocol.model.variables import Array
from worker_client import Session

SEED = 7
BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerWork:
    """What every worker is given: a batch takes `pace_s` seconds at least, and with `probability` `delay_s` seconds more."""

    num_workers: int
    learning_rate: float
    pace_s: float
    delay_s: float
    probability: float
    seed: int
    look_every: int
    go: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The model on the test examples, with the variables of `step`, which this worker had at `at`."""

    step: int
    at: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """What one worker saw, by a clock that all processes share: when each of its steps began and how long it computed; and the end."""

    steps: list[int] = field(default_factory=list)
    began_at: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)
    num_accepted: int = 0
    num_delayed: int = 0
    ended_at: float = 0.0
    last_step: int = 0
    looks: list[Look] = field(default_factory=list)


def delay_s(work: StragglerWork, *, worker: int, step: int) -> float:
    """Returns the delay of a worker in a step: the same for the same seed, however many contributions a step needs."""
    drawn = np.random.default_rng((work.seed, worker, step)).random()
    return work.delay_s if drawn < work.probability else 0.0


def main() -> None:
    """Trains until the cluster is finished; the work is given as JSON in the first argument."""
    work = StragglerWork(**json.loads(sys.argv[1]))
    train, test = split(load_digits())
    with worker_client.connect() as session:
        session.create_or_join(initial_values(seed=SEED), optimizer=worker_client.sgd(work.learning_rate))
        print(json.dumps({"event": "up"}), flush=True)
        while not Path(work.go).exists():  # so that the time of starting processes is nobody's advantage
            threading.Event().wait(0.002)
        report = _train(session, train.part(session.worker_index, num_parts=work.num_workers), test, work)
        print(json.dumps({"event": "done", "report": dataclasses.asdict(report)}), flush=True)


def _train(session: Session, part: Examples, test: Examples, work: StragglerWork) -> StragglerReport:
    worker = session.worker_index
    steps, began_at, computed_s = [], [], []
    kept: list[tuple[int, float, dict[str, Array]]] = []
    num_accepted = num_delayed = 0
    while not session.is_finished:
        step, begin = session.local_step, time.monotonic()
        variables, gradients = session.read(), session.gradient_buffers()
        if worker == 0 and (not kept or step >= kept[-1][0] + work.look_every):
            kept.append((step, begin, _copy(variables)))  # looked at when nobody waits
        batch = part.batch(BATCH_SIZE, worker=worker, step=step)
        loss_and_gradients(variables, batch.images, batch.labels, into=gradients)
        delayed_s = delay_s(work, worker=worker, step=step)
        threading.Event().wait(max(0.0, work.pace_s + delayed_s - (time.monotonic() - begin)))
        steps.append(step)
        began_at.append(begin)
        computed_s.append(time.monotonic() - begin)
        num_delayed += delayed_s > 0
        num_accepted += session.step(gradients).is_accepted
    ended_at = time.monotonic()
    if worker == 0:
        kept.append((session.local_step, ended_at, _copy(session.read())))
    return StragglerReport(
        steps=steps,
        began_at=began_at,
        computed_s=computed_s,
        num_accepted=num_accepted,
        num_delayed=num_delayed,
        ended_at=ended_at,
        last_step=session.local_step,
        looks=[_look(step, at, variables, test) for step, at, variables in kept],
    )


def _copy(variables: dict[str, Array]) -> dict[str, Array]:
    return {name: value.copy() for name, value in variables.items()}


def _look(step: int, at: float, variables: dict[str, Array], test: Examples) -> Look:
    found = evaluate(variables, test.images, test.labels)
    return Look(step=step, at=at, loss=found.loss, accuracy=found.accuracy)


if __name__ == "__main__":
    main()
