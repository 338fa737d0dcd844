"""Changes of a model's optimizers, checked. Knows what the model has and what was changed; decides nothing about when."""

from difflib import get_close_matches

from chief.cluster import Cluster
from chief.wording import optimizers_words
from ps_protocol.chief import HyperparameterChange
from ps_protocol.errors import InvalidSpec, NotInitialized, VariableNotFound
from ps_protocol.optimizer_spec import INITIAL_HYPERPARAMETERS, OptimizerSpec

# By key, as the model has it and as it is: those that were changed.
Optimizers = dict[str, tuple[OptimizerSpec, OptimizerSpec]]


def changed_optimizers(cluster: Cluster, optimizers: Optimizers, change: HyperparameterChange) -> Optimizers:
    """Returns the optimizers as they are after a change. Raises InvalidSpec, VariableNotFound or NotInitialized."""
    original = _original(cluster, change.variable)
    fixed = sorted(INITIAL_HYPERPARAMETERS.intersection(change.hyperparameters))
    if fixed:
        raise InvalidSpec(
            f"optimizer {original.name!r}: {', '.join(fixed)} cannot be changed while training: the slots are made by it"
            " when the model is created; start the cluster again"
        )
    current = optimizers.get(original.key, (original, original))[1]
    learning_rate = current.learning_rate if change.learning_rate is None else change.learning_rate
    numbers = {**current.hyperparameters, **change.hyperparameters}
    new = OptimizerSpec(name=current.name, learning_rate=learning_rate, hyperparameters=numbers)
    return {**optimizers, original.key: (original, new)}


def _original(cluster: Cluster, name: str) -> OptimizerSpec:
    model = cluster.registry.model
    if model is None or not cluster.registry.is_ready:
        raise NotInitialized("there is no model yet whose optimizer could be changed; create the model first")
    if not name:
        return model.optimizer
    variable = next((variable for variable in model.variables if variable.name == name), None)
    if variable is None:
        known = ", ".join(repr(variable.name) for variable in model.variables[:5])
        close = get_close_matches(name, [variable.name for variable in model.variables], n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise VariableNotFound(f"the model has no variable {name!r}; it has {known}{', …' if len(model.variables) > 5 else ''}{meant}")
    if variable.optimizer is None:
        raise InvalidSpec(f"variable {name!r} has no optimizer of its own; change the model's, by naming no variable")
    return variable.optimizer


def words_of(cluster: Cluster, optimizers: Optimizers) -> str:
    """Says what the optimizers are."""
    model = cluster.registry.model
    assert model is not None
    return optimizers_words(model, {key: spec for key, (_, spec) in optimizers.items()})
