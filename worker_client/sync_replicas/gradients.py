"""Handles of gradients, and the op that pushes them as one contribution and waits for a token. Knows graphs and runs; no optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import PushOutcome
from worker_client.model.declarations import IndexedSlices
from worker_client.sync_replicas.graph import TRAINS, LossResult, ModelVariable, Run, number_of

__all__ = [
    "TrainOp",
    "TrainResult",
    "map_gradients",
]


class Gradient(Protocol):
    """A gradient that a run will compute."""

    def compute(self, run: Run) -> Any:
        """Returns the gradient in this run: an array, IndexedSlices, or None."""


GradientsAndVariables = Sequence[tuple[Any, ModelVariable]]


class LossGradient:
    """The gradient of a loss for one variable. `map(function)` returns a handle of the changed gradient."""

    phase = 1

    def __init__(self, compute: Callable[[Run], Any], *, loss: Callable[..., Any] | None, words: str) -> None:
        self._compute = compute
        self._words = words
        self.loss = loss

    def __repr__(self) -> str:
        return f"<{self._words}>"

    def compute(self, run: Run) -> Any:
        """Returns the gradient in this run: an array, IndexedSlices, or None if the loss function returns none."""
        return self._compute(run)

    def evaluate(self, run: Run) -> Any:
        """Returns the gradient, for `session.run(gradient)`."""
        return self._compute(run)

    def map(self, function: Callable[[Any], Any]) -> "LossGradient":
        """Returns the handle of `function(gradient)`; where there is no gradient (None) the function is not called."""

        def computed(run: Run) -> Any:
            gradient = self._compute(run)
            return None if gradient is None else function(gradient)

        return LossGradient(computed, loss=self.loss, words=f"changed {self._words}")


def loss_gradient(loss: Callable[..., Any], variable: ModelVariable) -> LossGradient:
    """Returns the handle of the gradient that a loss function returns for the variable."""

    def computed(run: Run) -> Any:
        gradients = run.loss(loss).gradients
        unknown = [name for name in gradients if name not in run.graph.variables]
        if unknown:
            raise ValueError(
                f"loss {loss!r} returned a gradient for {unknown[0]!r}, which the graph does not have; name variables as declared"
            )
        return gradients.get(variable.name)

    return LossGradient(computed, loss=loss, words=f"gradient for {variable.name!r}")


def map_gradients(function: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Any]) -> list[Any]:
    """Returns handles of the gradients that `function` makes of all gradients together, for example clipped by their global norm.

    `function` takes the list of this run's gradients (None where there is none) and returns a list of the same length. It is called once
    for each handle that is used, so it must not have side effects. A gradient that is None in this call stays None.
    """

    def one(index: int) -> Any:
        def computed(run: Run) -> Any:
            changed = function([computed_gradient(gradient, run) for gradient in gradients])
            if len(changed) != len(gradients):
                raise ValueError(f"map_gradients: the function returned {len(changed)} gradients for {len(gradients)}; return one for each")
            return changed[index]

        return LossGradient(computed, loss=_loss_of(gradients), words=f"changed gradient {index}")

    return [None if gradient is None else one(index) for index, gradient in enumerate(gradients)]


def computed_gradient(gradient: Any, run: Run) -> Any:
    """Returns a gradient in this run: a handle's value, or the array, IndexedSlices or None itself."""
    return gradient.compute(run) if hasattr(gradient, "compute") else gradient


def is_gradient(gradient: object) -> bool:
    """Whether an object can be applied as a gradient: a handle, IndexedSlices, or an array of floats or what converts to one."""
    if hasattr(gradient, "compute") or isinstance(gradient, IndexedSlices):
        return True
    if isinstance(gradient, (str, bytes)) or callable(gradient):
        return False
    try:
        return np.asarray(gradient).dtype.kind in "fV"  # V: bfloat16 is foreign to NumPy
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of `session.run(train_op)`: the loss, and the contribution's outcome (see `Push`).

    `loss` is None if the gradients come from no loss function. `outcome` is None if it is unknown: training was finished, or the session
    was lost after the push had begun; such a push is not repeated. `global_step`: the newest step that this worker has heard of.
    """

    loss: float | None
    outcome: PushOutcome | None
    step: int
    global_step: int
    applied_step: int | None = None
    staleness: int = 0
    is_finished: bool = False

    @property
    def is_accepted(self) -> bool:
        """Whether the contribution counts."""
        return self.outcome is PushOutcome.ACCEPTED


class TrainOp:
    """Makes one contribution: computes the gradients, pushes them, and waits until this worker may compute the next ones.

    `session.run()` runs it. Under asynchronous training it waits only for the update itself. The run raises ValueError if no variable has a
    gradient.
    """

    phase = TRAINS

    def __init__(self, name: str, grads_and_vars: GradientsAndVariables) -> None:
        self.name = name
        self._pairs = tuple(grads_and_vars)
        self.loss = _loss_of([gradient for gradient, _ in self._pairs])

    def __repr__(self) -> str:
        return f"<training op {self.name!r}>"

    def evaluate(self, run: Run) -> TrainResult:
        """Runs the op; blocks until there is a token for the next contribution, or the end of training."""
        session = run.session
        if session.is_finished:
            return TrainResult(loss=None, outcome=None, step=session.local_step, global_step=session.global_step, is_finished=True)
        gradients = self._gradients(run)
        loss = run.loss(self.loss) if self.loss is not None else LossResult(value=None)
        value = None if loss.value is None else number_of(loss.value)
        try:
            report = session.step(gradients, updates=loss.updates or None, metrics=loss.metrics or None)
        except InvalidSpec as error:
            raise ValueError(error.message) from error
        result = TrainResult(
            loss=value,
            outcome=report.outcome,
            step=report.step,
            global_step=session.global_step,
            applied_step=report.applied_step,
            staleness=report.staleness,
            is_finished=session.is_finished,
        )
        run.renew()
        return result

    def _gradients(self, run: Run) -> dict[str, Any]:
        gradients: dict[str, Any] = {name: None for name, variable in run.graph.variables.items() if variable.takes_gradients}
        gradients.update({variable.name: computed_gradient(gradient, run) for gradient, variable in self._pairs})
        if all(gradient is None for gradient in gradients.values()):
            names = [variable.name for _, variable in self._pairs]
            raise ValueError(f"No gradients provided for any variable: {names}; the loss must return at least one of them")
        return gradients


def check_pairs(grads_and_vars: Sequence[Any]) -> list[tuple[Any, ModelVariable]]:
    """Returns the pairs as a list.

    Raises TypeError unless all are pairs of gradient and variable, ValueError for a variable named twice.
    """
    seen: set[str] = set()
    pairs: list[tuple[Any, ModelVariable]] = []
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], ModelVariable):
            raise TypeError(f"grads_and_vars: got the item {pair!r}, want pairs (gradient, variable) as compute_gradients() returns them")
        gradient, variable = pair
        if variable.name in seen:
            # In the original both go to one accumulator, and each push counts twice.
            raise ValueError(f"variable {variable.name!r} occurs twice; add its two gradients first")
        seen.add(variable.name)
        if not variable.takes_gradients:
            raise ValueError(f"variable {variable.name!r} is a Buffer: it takes updates (LossResult.updates), not gradients")
        pairs.append((gradient, variable))
    return pairs


def _loss_of(gradients: Sequence[Any]) -> Callable[..., Any] | None:
    losses: Mapping[int, Callable[..., Any]] = {
        id(gradient.loss): gradient.loss for gradient in gradients if getattr(gradient, "loss", None) is not None
    }
    return next(iter(losses.values()), None)
