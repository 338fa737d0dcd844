"""Moving averages of variables, as the servers keep them: which, and by what decay. Knows no array.

Source: tf.compat.v1.train.ExponentialMovingAverage.
"""

from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec

# The averages are read like an optimizer's slot, under this name.
AVERAGE_SLOT = "ExponentialMovingAverage"


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSpec:
    """average -= (1 - decay) * (average - variable), after each step, for `variables` (empty: all dense ones that take gradients).

    `use_num_updates`: the decay is min(decay, (1 + n) / (10 + n)), where n is the step after the update. `zero_debias`: the average starts
    from 0 and is divided by 1 - the product of the decays, instead of starting from the variable's first value.
    """

    decay: float
    use_num_updates: bool = False
    zero_debias: bool = False
    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay <= 1:
            raise InvalidSpec(f"averages: decay = {self.decay!r}, want 0 to 1")
        if len(set(self.variables)) < len(self.variables):
            raise InvalidSpec("averages: a variable occurs twice; name each once")

    def decay_at(self, num_updates: int) -> float:
        """Returns the decay of the update after which the step is `num_updates`."""
        return min(self.decay, (1 + num_updates) / (10 + num_updates)) if self.use_num_updates else self.decay
