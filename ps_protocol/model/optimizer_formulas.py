"""The formula of an optimizer with its numbers at each step. Parameter servers and strategies run it. Knows arrays; no variable.

The formulas are texts, which `ps_protocol/model/optimizers.py` has and `ps_protocol/model/programs.py` compiles to operations on blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ps_protocol.model.optimizers import LEARNING_RATE, STEP, OptimizerSpec, single
from ps_protocol.model.programs import Numbers


class OptimizerFormula:
    """The computation of a checked specification. Holds no state: slots and powers are the caller's.

    Its `program` takes the value, the gradient, and the slots, in the order of their names, which it updates in place; it writes the next
    values beside the present ones. `decays`: the values of `bases`, which it needs to the power of the steps applied, the present one
    included. `rounded` gives the learning rate and the powers their precision. `uses_step`: its numbers are others at another step, with
    the same learning rate and powers.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec, parsed = spec, spec.parsed
        self.is_single, self.bases = spec.kind.is_single, parsed.bases
        self.program = spec.program
        self.rounded: Callable[[float], float] = single if self.is_single else float
        self._given = {name: self.rounded(value) for name, value in spec.numbers.items()}
        self.decays = tuple(self._given[base] for base in self.bases)
        self.uses_step = STEP in parsed.reads

    def number(self, dtype: np.dtype[Any]) -> Callable[[Any], Any]:
        """Returns what makes a number of the precision in which numbers are computed for arrays of this type."""
        return dtype.type if self.is_single else float

    def numbers(self, rate: float, powers: Sequence[float], step: int, dtype: np.dtype[Any]) -> Numbers:
        """Returns the program's numbers at a step: `powers` are those of `decays`, `step` is that of the gradients."""
        at_rate = self._spec.kind.at_rate
        others = at_rate(self._spec, rate) if at_rate is not None else {}
        raised = {f"{base} ** {STEP}": power for base, power in zip(self.bases, powers, strict=True)}
        given = {**self._given, **others, **raised, LEARNING_RATE: rate, STEP: step + 1}
        return self.program.numbers(given, self.number(dtype))

    def initial_powers(self) -> tuple[float, ...]:
        """Returns the powers of the decays for the first step."""
        return tuple(map(self.rounded, self.decays))

    def next_powers(self, powers: tuple[float, ...]) -> tuple[float, ...]:
        """Returns the powers for the step after: a product a step, as in the original. A power computed anew would be rounded otherwise."""
        # In double precision the product of two float32 numbers is exact, so that it is rounded once.
        return tuple(self.rounded(power * decay) for power, decay in zip(powers, self.decays, strict=True))
