"""What a program has one step use of hyper-parameters, as it says it and as it travels. Knows the model's optimizers; no step, no wire."""

from collections.abc import Mapping

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.model.spec import ModelSpec, StepNumbers
from worker_client.model.optimizers import plain_number

# A name to a number: of the model's optimizer; a group to such names and numbers: of the optimizer of that group.
Hyperparameters = Mapping[str, float | Mapping[str, float]]


class GivenNumbers:
    """Makes what travels of what a program gives, for one model. What was given last is not checked again."""

    def __init__(self, model: ModelSpec) -> None:
        self._numbers = StepNumbers(model)

    def of(self, given: Hyperparameters) -> tuple[StepHyperparameter, ...]:
        """Raises InvalidSpec if the model has no such group or hyper-parameter, or it may not have such a value."""
        if not isinstance(given, Mapping):
            raise InvalidSpec(f"hyperparameters: got a {type(given).__name__}, want a dict such as {{'learning_rate': 0.01}}")
        found: list[StepHyperparameter] = []
        for name, value in given.items():
            if isinstance(value, Mapping):
                found += (_one(name, own, number) for own, number in value.items())
            else:
                found.append(_one("", name, value))
        numbers = tuple(found)
        self._numbers.check(numbers)
        return numbers


def _one(group: object, name: object, value: float) -> StepHyperparameter:
    for text in (group, name):
        if not isinstance(text, str):
            raise InvalidSpec(f"hyperparameters: got the name {text!r}, want a str")
    number = plain_number(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return StepHyperparameter(group=str(group), name=str(name), value=float(number) if is_number else number)
