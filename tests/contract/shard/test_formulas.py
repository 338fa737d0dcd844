"""Contributions with formulas at every `Shard`: new values of variables, computed at the shard, once."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.layout import Segments, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.updates import MAX_UPDATES, FormulaUpdate
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_protocol.roles.shard import PushHeader, PushResult, Shard, ShardStatusRequest
from tests.support.parameter_servers.shards import Trainer, layout_of, variable, views

PLAIN = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0))
# More than one block of what is computed at a time.
SIZE = 150_000


def state(name: str, shape: tuple[int, ...] = (SIZE,), data_type: DataType = DataType.FLOAT32, *, rows: int | None = None) -> VariableSlice:
    spec = VariableSpec(name=name, data_type=data_type, shape=shape, optimizer=PLAIN)
    return VariableSlice(variable=spec, start=0, stop=rows or spec.num_rows)


# Positions: 0 is trained, 1 and 2 have one shape and type, 3 another type, 4 another shape, 5 lies elsewhere in part, 6 is half as precise.
LAYOUT = layout_of(
    variable("trained", (50,)),
    state("a"),
    state("b"),
    state("d", data_type=DataType.FLOAT64),
    state("one", ()),
    state("cut", (10, 2), rows=5),
    state("half", (4,), DataType.FLOAT16),
)
ALL = tuple(range(len(LAYOUT.slices)))


@pytest.fixture
def model(shard: Shard) -> Trainer:
    """All variables, of ones."""
    trainer = Trainer(shard, LAYOUT)
    trainer.create(1.0)
    return trainer


def pushed(trainer: Trainer, *formulas: FormulaUpdate, worker: int = 0, step: int = 0, gradients: Array | None = None) -> PushHeader:
    """Pushes formulas, with an arena if there are arrays, and nothing else that counts."""
    operands = {position for formula in formulas for position in formula.arrays.values()}
    header = replace(trainer.header(worker, step=step, absent=tuple(sorted(set(ALL) - operands))), formulas=formulas)
    trainer.shard.push_gradients(header, Segments([gradients] if gradients is not None else []))
    return header


def values(trainer: Trainer) -> dict[str, Array]:
    return views(LAYOUT, trainer.read()[1])


def test_a_formula_reads_and_writes_variables_of_its_shard_as_numpy_would(model: Trainer) -> None:
    text = "b = b + g * g; v = v - rate * g / sqrt(b)"
    formula = FormulaUpdate(text=text, variables={"v": 1, "b": 2}, arrays={"g": 1}, numbers={"rate": 0.25})
    a = b = np.ones(SIZE, np.float32)
    for step in range(3):
        arena = model.random(step)
        header = pushed(model, formula, step=step, gradients=arena)
        model.apply(header.push_id, step=step)
        g = views(LAYOUT, arena)["a"]
        b = b + g * g
        a = a - np.float32(0.25) * g / np.sqrt(b)
        found = values(model)
        assert (found["a"].tobytes(), found["b"].tobytes()) == (a.tobytes(), b.tobytes())
    assert all((found[name] == 1).all() for name in ("trained", "d", "one", "cut", "half"))


def test_sums_and_norms_are_of_the_whole_variable_and_formulas_need_no_array(model: Trainer) -> None:
    formulas = (
        FormulaUpdate(text="v / norm(v)", variables={"v": 3}),
        FormulaUpdate(text="v + k", variables={"v": 4}, numbers={"k": 2.0}),
    )
    header = pushed(model, *formulas)
    model.apply(header.push_id)
    assert values(model)["d"].tolist() == [1 / np.sqrt(np.float64(SIZE))] * SIZE
    assert values(model)["one"] == 3


def test_formulas_follow_the_plain_updates_and_each_other_in_the_order_of_push_ids(model: Trainer) -> None:
    plain = model.header(2, absent=tuple(set(ALL) - {1}))
    model.push(plain, model.arena(5.0))
    second = pushed(model, FormulaUpdate(text="v * v + b", variables={"v": 1, "b": 2}), worker=1)
    doubled = FormulaUpdate(text="v * 2", variables={"v": 2})
    first = pushed(model, doubled, FormulaUpdate(text="v + b", variables={"v": 1, "b": 2}), worker=0)
    model.apply(second.push_id, plain.push_id, first.push_id)
    found = values(model)
    assert (set(found["a"].tolist()), set(found["b"].tolist())) == ({(5 + 2) ** 2 + 2}, {2})


def test_a_formula_that_is_pushed_and_applied_repeatedly_counts_once(model: Trainer) -> None:
    header = replace(
        model.header(absent=tuple(set(ALL) - {1})), formulas=(FormulaUpdate(text="v + g", variables={"v": 1}, arrays={"g": 1}),)
    )
    results = [model.push(header, model.arena(2.0)).result for _ in range(3)]
    assert results == [PushResult.STAGED, PushResult.DUPLICATE, PushResult.DUPLICATE]
    assert [model.apply(header.push_id).repeated_request for _ in range(3)] == [False, True, True]
    assert set(values(model)["a"].tolist()) == {3}


def test_a_shard_that_applies_on_arrival_computes_at_once(model: Trainer) -> None:
    model.configure(1, applies_on_arrival=True)
    for step in range(3):
        pushed(model, FormulaUpdate(text="v + g", variables={"v": 1}, arrays={"g": 1}), step=step, gradients=model.arena(2.0))
    assert set(values(model)["a"].tolist()) == {7}


@pytest.mark.parametrize("encoding", [FloatEncoding.BFLOAT16, FloatEncoding.INT8_BLOCKS, FloatEncoding.TOP_K])
def test_arrays_of_formulas_travel_as_they_are_also_where_gradients_do_not(model: Trainer, encoding: FloatEncoding) -> None:
    arena = model.random(1)
    encoded = GradientEncoder(LAYOUT, encoding, fraction=0.1).encode(Segments([arena]), absent=(3,))
    header = replace(
        model.header(absent=(3,)),
        encoding=encoding,
        encoded_bytes=encoded.nbytes,
        formulas=(FormulaUpdate(text="v + g", variables={"v": 1}, arrays={"g": 1}),),
    )
    model.push(header, encoded)
    model.apply(header.push_id)
    assert values(model)["a"].tobytes() == (np.float32(1) + views(LAYOUT, arena)["a"]).tobytes()


def test_formulas_of_a_contribution_that_its_step_leaves_out_are_not_computed(model: Trainer) -> None:
    header = pushed(model, FormulaUpdate(text="v * 9", variables={"v": 1}))
    other = pushed(model, FormulaUpdate(text="v + 1", variables={"v": 1}), worker=1)
    model.apply(header.push_id, other.push_id, without=(header.push_id,))
    assert set(values(model)["a"].tolist()) == {2}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text": "v + 1", "variables": {"v": 0}}, r"'trained' takes gradients; only variables declared as Buffer"),
    ({"text": "v + 1", "variables": {"v": 7}}, r"'v' is at position 7 of the shard's 7 slices"),
    ({"text": "v + d", "variables": {"v": 1, "d": 3}}, r"'a' and 'd' have other shapes or types; nothing is broadcast but numbers"),
    ({"text": "v + one", "variables": {"v": 1, "one": 4}}, r"'a' and 'one' have other shapes or types"),
    ({"text": "v + 1", "variables": {"v": 5}}, r"'cut' is split over shards; place it whole"),
    ({"text": "v + 1", "variables": {"v": 6}}, r"'half' is float16, want float32 or float64"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_a_formula_that_does_not_fit_the_shard_is_refused_and_changes_nothing(model: Trainer, words: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        pushed(model, FormulaUpdate(**words))
    with pytest.raises(InvalidSpec, match=r"its array 'g' lies where the contribution has nothing"):
        header = replace(model.header(absent=ALL), formulas=(FormulaUpdate(text="v + g", variables={"v": 1}, arrays={"g": 1}),))
        model.shard.push_gradients(header, Segments([]))
    with pytest.raises(InvalidSpec, match=r"two of one contribution assign to the same variable"):
        pushed(model, *(FormulaUpdate(text=f"v + {number}", variables={"v": 1}) for number in range(2)))
    assert model.shard.call(ShardStatusRequest()).report.num_staged == 0
    assert all((value == 1).all() for value in values(model).values())


def test_the_formulas_of_a_contribution_are_bounded_in_number_and_length(model: Trainer) -> None:
    short = FormulaUpdate(text="v + 1", variables={"v": 1})
    long = FormulaUpdate(text="v + 1" + " " * 4000, variables={"v": 1})
    for formulas, words in (((short,) * (MAX_UPDATES + 1), r"513 of 2565 characters"), ((long,) * 17, r"17 of 68085 characters")):
        with pytest.raises(LimitExceeded, match=rf"formulas: {words} in one contribution, 512 of 65536 at most"):
            pushed(model, *formulas)


def test_the_slowest_formula_costs_a_shard_less_than_its_length_in_passes_over_the_variable(model: Trainer) -> None:
    """The cost of a contribution is bounded by the size of the model: no operation is made more often than it is written."""
    text = "\n".join(f"x{number} = v * {number} + {number}" for number in range(40)) + "\nv = " + " + ".join(f"x{n}" for n in range(40))
    with pytest.raises(InvalidSpec, match=r"values at once, 16 at most"):
        FormulaUpdate(text=text, variables={"v": 1})
    sums = "v = " + " + ".join(itertools.repeat("v / norm(v)", 30))
    update = FormulaUpdate(text=sums, variables={"v": 1})
    # Equal parts are one operation.
    assert update.program.num_operations == 1 + 29 and update.program.num_passes == 1
    header = pushed(model, update)
    model.apply(header.push_id)
    np.testing.assert_allclose(values(model)["a"], 30 / np.sqrt(SIZE), rtol=1e-5)
