"""What a program has one step use of hyper-parameters, as it says it and as it travels. Knows names and numbers; no model, no wire."""

from collections.abc import Mapping

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import StepHyperparameter
from worker_client.model.optimizers import plain_number

# A name to a number: of the model's optimizer; a group to such names and numbers: of the optimizer of that group.
Hyperparameters = Mapping[str, float | Mapping[str, float]]


def step_hyperparameters(given: Hyperparameters) -> tuple[StepHyperparameter, ...]:
    """Returns what a program gives as it travels; whether the model has such groups and names is for `StepNumbers`. Raises InvalidSpec."""
    if not isinstance(given, Mapping):
        raise InvalidSpec(f"hyperparameters: got a {type(given).__name__}, want a dict such as {{'learning_rate': 0.01}}")
    found: list[StepHyperparameter] = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            found += (_one(name, own, number) for own, number in value.items())
        else:
            found.append(_one("", name, value))
    return tuple(found)


def _one(group: object, name: object, value: float) -> StepHyperparameter:
    for text in (group, name):
        if not isinstance(text, str):
            raise InvalidSpec(f"hyperparameters: got the name {text!r}, want a str")
    number = plain_number(value)
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    return StepHyperparameter(group=str(group), name=str(name), value=float(number) if is_number else number)
