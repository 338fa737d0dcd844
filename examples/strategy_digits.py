"""Learns handwritten digits with replicas: strategy.run, reductions, and updates by formulas, alone or over the workers of a cluster.

python examples/strategy_digits.py
lockstep up --ps 2 --workers 3 -- python examples/strategy_digits.py
"""

import functools
import os
from contextlib import ExitStack
from typing import Any

import numpy as np

import lockstep
from lockstep.demo.digits import load_digits, split
from worker_client.strategy import (
    ParameterServerStrategy,
    ValueContext,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)

NUM_STEPS = 120
REPLICAS_PER_WORKER = 2
BATCH = 60  # of all replicas together
MOMENTUM = "m = 0.9 * m + g; v = v - rate * m"


def logits(variables: dict[str, Any], images: Any) -> tuple[Any, Any]:
    """Returns the hidden layer and the output of the network."""
    hidden = np.tanh(images @ variables["w1"] + variables["b1"])
    return hidden, hidden @ variables["w2"] + variables["b2"]


def gradients(variables: dict[str, Any], images: Any, labels: Any) -> tuple[float, dict[str, Any]]:
    """Returns the mean loss of a batch, and its gradient by variable."""
    hidden, output = logits(variables, images)
    chances = np.exp(output - output.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(chances[rows, labels] + 1e-9).mean())
    chances[rows, labels] -= 1
    error = chances / len(labels)
    back = (error @ variables["w2"].T) * (1 - hidden**2)
    return loss, {"w1": images.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def part_of(batch: Any, context: ValueContext) -> Any:
    """Returns one replica's part of the batch."""
    return batch[context.replica_id_in_sync_group :: context.num_replicas_in_sync]


def main() -> None:
    """Trains, and prints the loss and the accuracy on digits that were not trained on."""
    train, test = split(load_digits())
    with ExitStack() as stack:
        session = stack.enter_context(lockstep.connect()) if "LOCKSTEP_CHIEF" in os.environ else None
        strategy = stack.enter_context(ParameterServerStrategy(REPLICAS_PER_WORKER, session=session))
        rng = np.random.default_rng(0)
        shapes = {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}
        with strategy.scope():
            variables, slots = {}, {}
            for name, shape in shapes.items():
                variables[name] = Variable(rng.normal(0, 0.2, shape) if len(shape) == 2 else np.zeros(shape), name=name)
                with strategy.extended.colocate_vars_with(variables[name]):
                    slots[name] = Variable(np.zeros(shape), name=f"{name}/momentum")
            total_loss = Variable(0.0, name="loss", aggregation=VariableAggregation.MEAN, synchronization=VariableSynchronization.ON_READ)

        def apply(strategy: ParameterServerStrategy, found: dict[str, Any]) -> None:
            pairs = [(gradient, variables[name]) for name, gradient in found.items()]
            for name, gradient in zip(found, strategy.extended.batch_reduce_to("MEAN", pairs), strict=True):
                strategy.extended.update(variables[name], MOMENTUM, kwargs={"m": slots[name], "g": gradient, "rate": 0.1})

        def step(chosen: Any) -> None:
            context = get_replica_context()
            assert context is not None
            values = {name: variable.read_value() for name, variable in variables.items()}
            loss, found = gradients(values, train.images[chosen], train.labels[chosen])
            total_loss.assign_add(loss)
            context.merge_call(apply, args=(found,))

        for number in range(NUM_STEPS):
            batch = np.random.default_rng(number).integers(len(train.labels), size=BATCH)
            parts = strategy.experimental_distribute_values_from_function(functools.partial(part_of, batch))
            strategy.run(step, args=(parts,))

        _, output = logits({name: variable.read_value() for name, variable in variables.items()}, test.images)
        accuracy = float((output.argmax(1) == test.labels).mean())
        print(
            f"{strategy.num_replicas_in_sync} replicas: mean loss {float(total_loss.read_value()) / NUM_STEPS:.4f}, accuracy {accuracy:.4f}"
        )


if __name__ == "__main__":
    main()
