"""The trainer whose steps are followed: of the language model, or of many bytes of which a given share changes. Knows only the SDK."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import worker_client
from benchmarks.harness.language import Language
from benchmarks.harness.worker import Station
from ps_protocol.model.variables import Array
from worker_client import adamw, piecewise_constant, sgd

_NUM_VARIABLES = 16
# The language model learns at the usual rate first, so that its gradients and moments are those of a model that is being refined.
NUM_FIRST_STEPS = 150
_FIRST_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWork:
    """`rate`: of AdamW on the language model; 0: `nbytes` of float32, of which a `share` changes in each step, so that bfloat16 shows it.

    Each of the clusters gets `num_rounds` times `num_steps` steps by turns, after `num_warmup_steps`, with a pause of `pause_s` between.
    """

    chiefs: Sequence[str]
    num_steps: int
    num_warmup_steps: int
    pause_s: float
    num_rounds: int = 1
    rate: float = 0.0
    nbytes: int = 0
    share: float = 0.0


class Sparse:
    """Many values, of which a share changes by a hundredth."""

    def __init__(self, nbytes: int, share: float) -> None:
        self._random, self._share = np.random.default_rng(0), share
        size = nbytes // 4 // _NUM_VARIABLES
        self.values: dict[str, Array] = {f"v{index:02}": self._random.standard_normal(size, np.float32) for index in range(_NUM_VARIABLES)}
        self._before: dict[str, Array] = {}
        self._places: dict[str, Array] = {}
        self.loss = 0.0

    def prepare(self) -> None:
        """Draws which elements change next."""
        self._before = self._places
        sizes = {name: value.size for name, value in self.values.items()}
        self._places = {name: np.flatnonzero(self._random.random(size, np.float32) < self._share) for name, size in sizes.items()}

    def fill(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Writes their gradients; all others are zero."""
        for name, places in self._places.items():
            if name in self._before:
                gradients[name][self._before[name]] = 0.0
            gradients[name][places] = values[name][places] / 100


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as one worker process."""
    trainer = TrainerWork(**orders)
    optimizer = adamw(piecewise_constant([NUM_FIRST_STEPS], [_FIRST_RATE, trainer.rate])) if trainer.rate else sgd(1.0)
    sessions = [worker_client.connect(chief, worker_index=0) for chief in trainer.chiefs]
    # One for each: it knows what its session's gradients are.
    models = [Language() if trainer.rate else Sparse(trainer.nbytes, trainer.share) for _ in sessions]
    for session, model in zip(sessions, models, strict=True):
        session.create_or_join(model.values, optimizer=optimizer)
        for _ in range(trainer.num_warmup_steps):
            _step(session, model, pause_s=0.0)
    station.say("joined", num_bytes=sum(value.nbytes for value in models[0].values.values()), transport=str(sessions[0].transport))
    station.await_go()
    made = []
    for turn in range(trainer.num_rounds):
        # Who comes first changes, because the machine does.
        for target in range(len(sessions))[:: 1 - 2 * (turn % 2)]:
            made += [(turn, target, *_step(sessions[target], models[target], pause_s=trainer.pause_s)) for _ in range(trainer.num_steps)]
    station.say("done", steps=made, loss=models[0].loss)
    station.await_release()
    for session in sessions:
        session.close()


def _step(session: worker_client.Session, model: Sparse | Language, *, pause_s: float) -> tuple[int, float, float]:
    """Returns the step that was made, when `step()` had returned, and the seconds since the variables were read."""
    model.prepare()
    time.sleep(pause_s)  # stands for the work of a larger model
    begin = time.monotonic()
    gradients = session.gradient_buffers()
    model.fill(session.views(), gradients)
    made = session.step(gradients)
    end = time.monotonic()
    if not made.is_accepted:
        raise RuntimeError(f"step {made.step}: the contribution is {made.outcome.name}, so this is no measurement")
    return session.local_step, end, end - begin
