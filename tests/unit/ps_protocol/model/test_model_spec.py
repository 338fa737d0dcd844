"""Valid placement policies, and the words for differences in optimizers and placement between two models."""

import dataclasses
from typing import Any

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import Constraint, ConstraintKind, DataType, Partition, VariableSpec

SGD = OptimizerSpec(name="sgd", learning_rate=constant(0.1))


def differences(mine: OptimizerSpec, theirs: OptimizerSpec) -> list[str]:
    variables = (VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(3,)),)
    first, second = (ModelSpec(variables=variables, optimizer=optimizer, placement=PlacementPolicy()) for optimizer in (mine, theirs))
    return first.differences(second)


def momentum(**hyperparameters: float) -> OptimizerSpec:
    return OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters=hyperparameters)


def decaying(**arguments: float) -> OptimizerSpec:
    return OptimizerSpec(
        name="sgd", learning_rate=Schedule(name="exponential_decay", arguments={"initial": 0.1, "decay_rate": 0.5, **arguments})
    )


def piecewise(*values: float) -> OptimizerSpec:
    return OptimizerSpec(name="sgd", learning_rate=Schedule(name="piecewise_constant", boundaries=(10.0,), values=values))


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            SGD,
            OptimizerSpec(name="sgd", learning_rate=constant(0.2)),
            ["optimizer.learning_rate.arguments['value'] is 0.2, the cluster's is 0.1"],
        ),
        (SGD, momentum(), ["optimizer.name is 'momentum', the cluster's is 'sgd'"]),
        (
            momentum(momentum=0.9),
            momentum(momentum=0.5, use_nesterov=1),
            [
                "optimizer.hyperparameters['momentum'] is 0.5, the cluster's is 0.9",
                "optimizer.hyperparameters['use_nesterov'] is not among the cluster's",
            ],
        ),
        (momentum(), momentum(momentum=0.9), ["optimizer.hyperparameters['momentum'] is not among the cluster's"]),
        (
            decaying(decay_steps=10),
            decaying(decay_steps=20),
            ["optimizer.learning_rate.arguments['decay_steps'] is 20, the cluster's is 10"],
        ),
        (
            SGD,
            decaying(decay_steps=10),
            ["optimizer.learning_rate.name is 'exponential_decay', the cluster's is 'constant'"],
        ),
        (piecewise(0.2, 0.1), piecewise(0.2, 0.3), ["optimizer.learning_rate.values is (0.2, 0.3), the cluster's is (0.2, 0.1)"]),
        (SGD, SGD, []),
    ],
)
def test_optimizers_are_distinguished_field_by_field(mine: OptimizerSpec, theirs: OptimizerSpec, words: list[str]) -> None:
    assert differences(mine, theirs) == words


@pytest.mark.parametrize("value", [True, False, 1.0, float("nan"), float("inf"), "64", None, -1, [64]])
def test_a_threshold_that_is_no_size_is_refused_with_a_reason(value: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"split_bytes: got .*, want a whole number >= 0"):
        PlacementPolicy(split_bytes=value)


def test_a_threshold_that_no_message_can_carry_is_refused_with_a_reason() -> None:
    with pytest.raises(InvalidSpec, match=r"split_bytes: got more than 2\^64 - 1"):
        PlacementPolicy(split_bytes=1 << 64)


@pytest.mark.parametrize("value", [0, 1, (1 << 64) - 1])
def test_any_size_is_a_threshold(value: int) -> None:
    assert PlacementPolicy(split_bytes=value).split_bytes == value


@pytest.mark.parametrize("value", [None, 0, True, b"greedy_bytes", ["greedy_bytes"], {}, "", "greedy"])
def test_a_strategy_that_is_not_the_name_of_one_is_refused_with_a_reason(value: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"placement strategy .*; want one of greedy_bytes, round_robin"):
        PlacementPolicy(strategy=value)


def with_variable(**options: Any) -> ModelSpec:
    variable = VariableSpec(name="w", **{"data_type": DataType.FLOAT32, "shape": (4, 4), **options})
    return ModelSpec(variables=(variable,), optimizer=SGD, placement=PlacementPolicy())


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (with_variable(shape=(4, 5)), "variables['w'].shape is (4, 5), the cluster's is (4, 4)"),
        (with_variable(is_sparse=True), "variables['w'].is_sparse is True, the cluster's is False"),
        (with_variable(optimizer=momentum()), "variables['w'].optimizer is OptimizerSpec(name='momentum',"),
        (with_variable(constraint=Constraint(kind=ConstraintKind.NON_NEGATIVE)), "variables['w'].constraint is Constraint("),
        (with_variable(partition=Partition(axis=1, num_slices=2)), "variables['w'].partition is Partition(axis=1, num_slices=2)"),
        (dataclasses.replace(with_variable(), averages=AverageSpec(decay=0.5)), "averages is AverageSpec(decay=0.5"),
        (dataclasses.replace(with_variable(), clip=ClipSpec(norm=1.0)), "clip.norm is 1.0, the cluster's is 0.0"),
        (
            dataclasses.replace(with_variable(), placement=PlacementPolicy(pins=(("w", 1),))),
            "placement.pins is (('w', 1),), the cluster's is ()",
        ),
    ],
)
def test_every_option_of_a_model_is_distinguished(theirs: ModelSpec, words: str) -> None:
    (difference,) = with_variable().differences(theirs)
    assert difference.startswith(words)
    assert with_variable().differences(with_variable()) == []
