"""What a user may push, and the words for what not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import DtypeMismatch, IncompletePush, InvalidSpec, PsError, ShapeMismatch, VariableNotFound
from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.placement import layouts, place
from ps_protocol.tensors import Array, DataType, VariableSpec
from worker_client.gradients import stage
from worker_client.model_memory import ModelMemory

SHAPES: dict[str, tuple[int, ...]] = {"layer1/weight": (3, 4), "b1": (4,), "loss_scale": (), "nothing": (0, 2)}


@pytest.fixture
def staging() -> ModelMemory:
    variables = tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=shape) for name, shape in SHAPES.items())
    model = ModelSpec(
        variables=(*variables, VariableSpec(name="w64", data_type=DataType.FLOAT64, shape=(2,))),
        optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)),
        placement=PlacementPolicy(split_bytes=16),
    )
    return ModelMemory(model, layouts=layouts(place(model, num_shards=2), num_shards=2), is_writable=True)


def good() -> dict[str, Any]:
    return {**{name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}, "w64": np.ones(2)}


class Tensor:
    """As other frameworks' tensors: it can be read as an array, and is none."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.values


class Unreadable:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise RuntimeError("call .detach() first")


BAD: list[tuple[dict[str, Any], type[PsError], str]] = [
    ({"layer1/wieght": np.ones((3, 4), np.float32)}, VariableNotFound, "'layer1/wieght' not found. Did you mean 'layer1/weight'?"),
    ({"qqq": np.ones(1, np.float32)}, VariableNotFound, "'qqq' not found; the model has layer1/weight, b1, loss_scale, nothing, w64"),
    ({"b1": np.ones(4)}, DtypeMismatch, r"'b1' is float64, variable is float32; cast with \.astype\(np\.float32\)"),
    ({"b1": np.ones(4, np.int64)}, DtypeMismatch, "'b1' is int64, variable is float32"),
    ({"b1": np.array([None] * 4)}, DtypeMismatch, "'b1' is object, variable is float32"),
    ({"b1": np.ones(4, ">f4")}, DtypeMismatch, "'b1': byte order: little-endian only"),
    ({"w64": np.ones(2, np.float32)}, DtypeMismatch, r"cast with \.astype\(np\.float64\)"),
    ({"layer1/weight": np.ones((4, 3), np.float32)}, ShapeMismatch, r"'layer1/weight': shape \(4, 3\), variable \(3, 4\)"),
    ({"loss_scale": np.ones(1, np.float32)}, ShapeMismatch, r"'loss_scale': shape \(1,\), variable \(\); nothing is broadcast"),
    ({"b1": np.float32(1)}, ShapeMismatch, r"'b1': shape \(\), variable \(4,\)"),
    ({"b1": None}, IncompletePush, "'b1' is None; every step needs all variables"),
    ({"b1": [1.0, 2.0, 3.0, 4.0]}, DtypeMismatch, r"'b1' is a list, want an array; use np.asarray\(…, np.float32\)"),
    ({"loss_scale": 1.0}, DtypeMismatch, "'loss_scale' is a float, want an array"),
    ({"b1": "ones"}, DtypeMismatch, "'b1' is the str 'ones', want an array"),
    ({"b1": Unreadable()}, DtypeMismatch, r"'b1' is a Unreadable and cannot be read as an array: call \.detach\(\) first"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_gradient_is_refused_in_words_and_changes_nothing(
    staging: ModelMemory, change: Mapping[str, Any], error: type[PsError], words: str
) -> None:
    with pytest.raises(error, match=words):
        stage({**good(), **change}, into=staging, step=12)
    assert not any(array.any() for array in staging.views.values())
    stage(good(), into=staging, step=12)
    assert all(np.all(array == 1) for array in staging.views.values())


def test_missing_variables_are_named(staging: ModelMemory) -> None:
    gradients = good()
    del gradients["b1"], gradients["w64"]
    with pytest.raises(IncompletePush, match=r"push for step 12 misses 2 of 5 variables: b1, w64 \(push zeros"):
        stage(gradients, into=staging, step=12)
    with pytest.raises(IncompletePush, match="misses 5 of 5 variables"):
        stage({}, into=staging, step=12)


def test_pairs_are_taken_and_a_name_that_occurs_twice_is_not(staging: ModelMemory) -> None:
    stage(good().items(), into=staging, step=0)
    with pytest.raises(InvalidSpec, match="'b1' occurs twice"):
        stage([*good().items(), ("b1", np.ones(4, np.float32))], into=staging, step=0)


@pytest.mark.parametrize("gradients", [None, 3, np.ones(3), "b1", [np.ones(4)], [("b1",)]])
def test_what_is_no_mapping_is_refused(staging: ModelMemory, gradients: Any) -> None:
    with pytest.raises(InvalidSpec, match="want a dict"):
        stage(gradients, into=staging, step=0)


@pytest.mark.parametrize("name", [3, None, b"b1"])
def test_name_must_be_a_str(staging: ModelMemory, name: Any) -> None:
    with pytest.raises(VariableNotFound, match="a name is a str"):
        stage({**good(), name: np.ones(4, np.float32)}, into=staging, step=0)


def test_staging_memory_itself_is_left_where_it_is(staging: ModelMemory) -> None:
    for array in staging.views.values():
        array[...] = 7
    stage(staging.views, into=staging, step=0)
    assert all(np.all(array == 7) for array in staging.views.values())


def test_parts_of_the_staging_memory_may_be_pushed_under_other_names() -> None:
    variables = tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(4,)) for name in "ab")
    model = ModelSpec(variables=variables, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)), placement=PlacementPolicy())
    memory = ModelMemory(model, layouts=layouts(place(model, num_shards=1), num_shards=1), is_writable=True)
    a, b = memory.views["a"], memory.views["b"]
    a[...], b[...] = 1, [2, 3, 4, 5]
    stage({"a": b[::-1], "b": a}, into=memory, step=0)
    np.testing.assert_array_equal(a, [5, 4, 3, 2])
    np.testing.assert_array_equal(b, [1, 1, 1, 1])


def test_tensors_of_other_frameworks_and_numpy_scalars_are_read_as_arrays(staging: ModelMemory) -> None:
    stage({**good(), "b1": Tensor(np.full(4, 3, np.float32)), "loss_scale": np.float32(5)}, into=staging, step=0)
    assert np.all(staging.views["b1"] == 3)
    assert staging.views["loss_scale"] == 5


def test_strided_gradients_are_copied_by_value(staging: ModelMemory) -> None:
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2].T
    stage({**good(), "layer1/weight": weight}, into=staging, step=0)
    np.testing.assert_array_equal(staging.views["layer1/weight"], weight)


def test_not_finite_gradients_are_the_servers_to_count(staging: ModelMemory) -> None:
    stage({**good(), "b1": np.array([np.nan, np.inf, 0, 1], np.float32)}, into=staging, step=0)
    assert np.isnan(staging.views["b1"][0])
