"""Variables with a rule of their own at every `Shard`: other optimizers, plain updates, constraints, moving averages."""

import dataclasses

import numpy as np
import pytest

from ps_protocol.errors import SlotNotFound, VariableExists
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import AVERAGE_SLOT, AverageSpec, ClipSpec
from ps_protocol.model.variables import Constraint, ConstraintKind, DataType, Initializer, InitializerKind, VariableSpec
from ps_protocol.roles.shard import Shard, ShardSpec, ShardStatusRequest
from tests.support.parameter_servers.shards import Trainer, layout_of, table, variable, views

MOMENTUM = OptimizerSpec(name="momentum", learning_rate=constant(1.0))
MEAN, ADD = (OptimizerSpec(name=name, learning_rate=constant(0.0)) for name in ("assign_mean", "add"))
NON_NEGATIVE = Constraint(kind=ConstraintKind.NON_NEGATIVE)


def _variable(
    name: str, data_type: DataType = DataType.FLOAT32, *, optimizer: OptimizerSpec | None = None, constraint: Constraint | None = None
) -> VariableSlice:
    spec = VariableSpec(name=name, data_type=data_type, shape=(3,), optimizer=optimizer, constraint=constraint)
    return VariableSlice(variable=spec, start=0, stop=3)


RULES = layout_of(
    _variable("seen", optimizer=MEAN),
    _variable("w"),
    _variable("m", optimizer=MOMENTUM),
    _variable("count", DataType.FLOAT64, optimizer=ADD),
    _variable("kept", constraint=NON_NEGATIVE),
    _variable("half", DataType.FLOAT16),
)


def test_slot_is_zero_where_a_variable_has_none(shard: Shard) -> None:
    trainer = Trainer(shard, RULES)
    trainer.create(1.0)
    header, _ = trainer.push_rows(dense=trainer.arena(2.0))
    trainer.apply(header.push_id)
    assert list(shard.call(ShardStatusRequest()).slots) == ["momentum"]
    slots = views(RULES, trainer.slot("momentum")[1])
    assert {name: float(values[0]) for name, values in slots.items() if values.any()} == {"m": 2.0}
    with pytest.raises(SlotNotFound, match="no slot 'velocity'; it has momentum"):
        trainer.slot("velocity")


def test_moving_averages_are_kept_and_read_like_a_slot(shard: Shard) -> None:
    trainer = Trainer(shard, layout_of(variable("w", (4,)), variable("b", (2,))))
    trainer.adopt()
    spec = dataclasses.replace(trainer.spec(), averages=AverageSpec(decay=0.5, variables=("w",)))
    assert shard.create_variables(spec, trainer.first_values(4.0))
    trainer.train(0, value=4.0)
    trainer.train(1, value=4.0)
    averages = views(trainer.layout, trainer.slot(AVERAGE_SLOT)[1])
    # Of 4, 2 and 0.
    np.testing.assert_array_equal(averages["w"], [0.5 * 3.0] * 4)
    np.testing.assert_array_equal(averages["b"], [0.0] * 2)
    assert list(shard.call(ShardStatusRequest()).slots) == []


def test_without_averages_there_is_no_such_slot(trainer: Trainer) -> None:
    trainer.create()
    with pytest.raises(SlotNotFound, match="no variable here has a moving average"):
        trainer.slot(AVERAGE_SLOT)


def test_variables_with_other_options_are_other_variables(shard: Shard) -> None:
    initializer = Initializer(kind=InitializerKind.CONSTANT, low=1.0)
    trainer = Trainer(shard, layout_of(variable("w", (4,)), table("emb", (4, 2))))
    trainer.create()
    spec: ShardSpec = trainer.spec()
    assert not shard.create_variables(spec, trainer.first_values())
    others = {
        "initializer is Initializer": layout_of(variable("w", (4,)), table("emb", (4, 2), initializer=initializer)),
        "optimizer is OptimizerSpec": layout_of(variable("w", (4,)), table("emb", (4, 2), optimizer=MOMENTUM)),
    }
    for words, layout in others.items():
        with pytest.raises(VariableExists, match=rf"slices\[1\].variable.{words}.*, the shard's is None"):
            shard.create_variables(trainer.spec(layout), Trainer(shard, layout).first_values())
    with pytest.raises(VariableExists, match=r"averages is AverageSpec.*, the shard's is None"):
        shard.create_variables(dataclasses.replace(spec, averages=AverageSpec(decay=0.5)), trainer.first_values())
    with pytest.raises(VariableExists, match=r"clip.norm is 1.0, the shard's is 0.0"):
        shard.create_variables(dataclasses.replace(spec, clip=ClipSpec(norm=1.0)), trainer.first_values())
