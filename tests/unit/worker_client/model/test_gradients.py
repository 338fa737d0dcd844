"""Gradients that a user may push, and the errors for invalid ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import DtypeMismatch, IncompletePush, IndexOutOfRange, InvalidSpec, PsError, ShapeMismatch, VariableNotFound
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, DataType, Partition, VariableSpec
from ps_protocol.roles.shard import Metric, SparsePart
from worker_client.model.declarations import IndexedSlices
from worker_client.model.gradients import ShardParts, Staging, as_metrics, row_gradient
from worker_client.model.memory import ModelMemory

SHAPES: dict[str, tuple[int, ...]] = {"layer1/weight": (3, 4), "b1": (4,), "loss_scale": (), "nothing": (0, 2)}


def staging_of(model: ModelSpec) -> Staging:
    return Staging(model, ModelMemory(model, layouts=layouts(place(model, num_shards=2), num_shards=2), is_writable=True))


@pytest.fixture
def staging() -> Staging:
    variables = tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=shape) for name, shape in SHAPES.items())
    model = ModelSpec(
        variables=(*variables, VariableSpec(name="w64", data_type=DataType.FLOAT64, shape=(2,))),
        optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)),
        placement=PlacementPolicy(split_bytes=16),
    )
    return staging_of(model)


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
    ({"layer1/wieght": np.ones((3, 4), np.float32)}, VariableNotFound, "'layer1/wieght' not found; did you mean 'layer1/weight'?"),
    ({"qqq": np.ones(1, np.float32)}, VariableNotFound, "'qqq' not found; the model has layer1/weight, b1, loss_scale, nothing, w64"),
    ({"b1": np.ones(4)}, DtypeMismatch, r"'b1' is float64, variable is float32; cast with \.astype\(np\.float32\)"),
    ({"b1": np.ones(4, np.int64)}, DtypeMismatch, "'b1' is int64, variable is float32"),
    ({"b1": np.array([None] * 4)}, DtypeMismatch, "'b1' is object, variable is float32"),
    ({"b1": np.ones(4, ">f4")}, DtypeMismatch, "'b1': byte order: little-endian only"),
    ({"w64": np.ones(2, np.float32)}, DtypeMismatch, r"cast with \.astype\(np\.float64\)"),
    ({"layer1/weight": np.ones((4, 3), np.float32)}, ShapeMismatch, r"'layer1/weight': shape \(4, 3\), variable \(3, 4\)"),
    ({"loss_scale": np.ones(1, np.float32)}, ShapeMismatch, r"'loss_scale': shape \(1,\), variable \(\); nothing is broadcast"),
    ({"b1": np.float32(1)}, ShapeMismatch, r"'b1': shape \(\), variable \(4,\)"),
    ({"b1": IndexedSlices([1], np.ones(1, np.float32))}, InvalidSpec, "'b1' takes dense gradients; declare it as an EmbeddingTable"),
    ({"b1": [1.0, 2.0, 3.0, 4.0]}, DtypeMismatch, r"'b1' is a list, want an array; use np.asarray\(…, np.float32\)"),
    ({"loss_scale": 1.0}, DtypeMismatch, "'loss_scale' is a float, want an array"),
    ({"b1": "ones"}, DtypeMismatch, "'b1' is the str 'ones', want an array"),
    ({"b1": Unreadable()}, DtypeMismatch, r"'b1' is a Unreadable and cannot be read as an array: call \.detach\(\) first"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_a_bad_gradient_is_refused_with_a_reason_and_changes_nothing(
    staging: Staging, change: Mapping[str, Any], error: type[PsError], words: str
) -> None:
    with pytest.raises(error, match=words):
        staging.stage({**good(), **change}, step=12)
    assert not any(array.any() for array in staging.views.values())
    staging.stage(good(), step=12)
    assert all(np.all(array == 1) for array in staging.views.values())


def test_missing_variables_are_named(staging: Staging) -> None:
    gradients = good()
    del gradients["b1"], gradients["w64"]
    with pytest.raises(IncompletePush, match=r"push for step 12 misses 2 of 5 variables: b1, w64 \(give None"):
        staging.stage(gradients, step=12)
    with pytest.raises(IncompletePush, match="misses 5 of 5 variables"):
        staging.stage({}, step=12)


def test_pairs_are_taken_and_a_name_that_occurs_twice_is_not(staging: Staging) -> None:
    staging.stage(good().items(), step=0)
    with pytest.raises(InvalidSpec, match="'b1' occurs twice"):
        staging.stage([*good().items(), ("b1", np.ones(4, np.float32))], step=0)


@pytest.mark.parametrize("gradients", [None, 3, np.ones(3), "b1", [np.ones(4)], [("b1",)]])
def test_gradients_that_are_no_mapping_are_refused(staging: Staging, gradients: Any) -> None:
    with pytest.raises(InvalidSpec, match="want a dict"):
        staging.stage(gradients, step=0)


@pytest.mark.parametrize("name", [3, None, b"b1"])
def test_a_gradient_name_that_is_no_string_is_refused(staging: Staging, name: Any) -> None:
    with pytest.raises(VariableNotFound, match="a name is a str"):
        staging.stage({**good(), name: np.ones(4, np.float32)}, step=0)


def test_staging_memory_itself_is_left_where_it_is(staging: Staging) -> None:
    for array in staging.views.values():
        array[...] = 7
    staging.stage(staging.views, step=0)
    assert all(np.all(array == 7) for array in staging.views.values())


def test_parts_of_the_staging_memory_may_be_pushed_under_other_names() -> None:
    variables = tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(4,)) for name in "ab")
    model = ModelSpec(variables=variables, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)), placement=PlacementPolicy())
    memory = staging_of(model)
    a, b = memory.views["a"], memory.views["b"]
    a[...], b[...] = 1, [2, 3, 4, 5]
    memory.stage({"a": b[::-1], "b": a}, step=0)
    np.testing.assert_array_equal(a, [5, 4, 3, 2])
    np.testing.assert_array_equal(b, [1, 1, 1, 1])


def test_tensors_of_other_frameworks_and_numpy_scalars_are_read_as_arrays(staging: Staging) -> None:
    staging.stage({**good(), "b1": Tensor(np.full(4, 3, np.float32)), "loss_scale": np.float32(5)}, step=0)
    assert np.all(staging.views["b1"] == 3)
    assert staging.views["loss_scale"] == 5


def test_strided_gradients_are_copied_by_value(staging: Staging) -> None:
    weight = np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2].T
    staging.stage({**good(), "layer1/weight": weight}, step=0)
    np.testing.assert_array_equal(staging.views["layer1/weight"], weight)


def test_not_finite_gradients_are_the_servers_to_count(staging: Staging) -> None:
    staging.stage({**good(), "b1": np.array([np.nan, np.inf, 0, 1], np.float32)}, step=0)
    assert np.isnan(staging.views["b1"][0])


SGD = OptimizerSpec(name="sgd", learning_rate=constant(0.1))
ADD = OptimizerSpec(name="add", learning_rate=constant(1.0))
W = np.ones(3, np.float32)


@pytest.fixture
def mixed() -> Staging:
    """A table cut in two, a dense variable, and one that takes updates."""
    halves = Partition(axis=0, num_slices=2)
    variables = (
        VariableSpec(name="t", data_type=DataType.FLOAT16, shape=(10, 2), is_sparse=True, partition=halves),
        VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(3,)),
        VariableSpec(name="n", data_type=DataType.FLOAT32, shape=(2,), optimizer=ADD),
    )
    return staging_of(ModelSpec(variables=variables, optimizer=SGD, placement=PlacementPolicy()))


def rows(indices: Any, values: Any = None, **options: Any) -> IndexedSlices:
    return IndexedSlices(indices, np.ones((len(indices), 2), np.float16) if values is None else values, **options)


def test_rows_are_sorted_and_those_of_one_index_summed() -> None:
    variable = VariableSpec(name="t", data_type=DataType.FLOAT32, shape=(10, 2), is_sparse=True)
    values = np.array([[1, 1], [2, 2], [2048, 3], [1, 4], [1, 5]], np.float32)
    gradient = row_gradient(rows(np.array([7, 0, 3, 3, 3], np.uint8), values), variable)
    np.testing.assert_array_equal(gradient.indices, [0, 3, 7])
    np.testing.assert_array_equal(gradient.values, np.array([[2, 2], [2050, 12], [1, 1]], np.float32))
    assert (gradient.indices.dtype.name, gradient.values.dtype.name) == ("int64", "float32")


def test_half_precision_rows_are_sorted_and_left_to_the_server_to_sum(mixed: Staging) -> None:
    values = np.array([[1, 1], [2, 2], [2048, 3], [1, 4], [60000, 5]], np.float16)
    gradient = mixed.stage({"t": rows(np.array([7, 0, 3, 3, 3], np.uint8), values), "w": W}, step=0).rows["t"]
    np.testing.assert_array_equal(gradient.indices, [0, 3, 3, 3, 7])
    # A half-precision sum would stop at 2048, or be infinite.
    np.testing.assert_array_equal(gradient.values, np.array([[2, 2], [2048, 3], [1, 4], [60000, 5], [1, 1]], np.float16))
    assert (gradient.indices.dtype.name, gradient.values.dtype.name) == ("int64", "float16")


def test_rows_in_order_are_sent_from_where_they_are(mixed: Staging) -> None:
    values = np.ones((2, 2), np.float16)
    assert mixed.stage({"t": rows([3, 7], values), "w": W}, step=0).rows["t"].values is values


def test_dense_gradient_of_a_table_is_all_its_rows(mixed: Staging) -> None:
    gradient = mixed.stage({"t": np.ones((10, 2), np.float16), "w": W}, step=0).rows["t"]
    np.testing.assert_array_equal(gradient.indices, range(10))


def test_a_variable_without_gradient_and_update_is_sent_as_absent(mixed: Staging) -> None:
    staged = mixed.stage({"t": None, "w": W}, step=0)
    assert (staged.absent, staged.rows) == (("n",), {})
    updated = mixed.stage({"t": rows([1]), "w": None}, step=0, updates={"n": np.array([3, 4], np.float32)})
    assert (updated.absent, list(updated.rows)) == (("w",), ["t"])
    np.testing.assert_array_equal(mixed.memory.views["n"], [3, 4])


def test_each_shard_gets_its_rows_and_no_arena_if_it_has_nothing_in_it(mixed: Staging) -> None:
    shard_parts = ShardParts(mixed.memory.layouts)
    ordinary = shard_parts.parts(mixed.stage({"t": None, "w": W}, step=0))
    assert shard_parts.parts(mixed.stage({"t": None, "w": W}, step=1)) is ordinary, "steps that are alike cost nothing"
    parts = shard_parts.parts(mixed.stage({"t": rows([9, 1, 5]), "w": None}, step=2))
    assert [part.sparse for part in parts] == [(SparsePart(table=0, num_rows=1),), (SparsePart(table=0, num_rows=2),)]
    contents = [b"".join(bytes(data) for _, data in part.segments.chunks(1 << 20)) for part in parts]
    ones = np.ones(2, np.float16).tobytes()
    assert contents == [np.int64(1).tobytes() + ones, np.array([0, 4]).tobytes() + ones + ones]
    assert [len(part.absent) for part in parts] == [len(layout.slices) for layout in mixed.memory.layouts]


BAD_ROWS: list[tuple[Any, type[PsError], str]] = [
    (rows([1, 2, 3], np.ones((2, 2), np.float16)), ShapeMismatch, "'t': indices 3, values 2 rows"),
    (rows([0, 10]), IndexOutOfRange, r"'t': indices\[1\] = 10, want 0..9"),
    (rows([-1]), IndexOutOfRange, r"indices\[0\] = -1"),
    (rows(np.array([2**63], np.uint64)), IndexOutOfRange, "= 9223372036854775808"),
    (rows([0.0]), DtypeMismatch, "indices are float64, want integers"),
    (rows([True]), DtypeMismatch, "indices are bool, want integers"),
    (rows([[1], [2]]), ShapeMismatch, "want one axis"),
    (rows([1], np.ones((1, 2), np.float32)), DtypeMismatch, "'t' is float32, variable is float16"),
    (rows([1], np.ones((1, 3), np.float16)), ShapeMismatch, r"values have the shape \(1, 3\), want \(rows, 2\)"),
    (rows([1], np.ones(2, np.float16)), ShapeMismatch, r"values have the shape \(2,\)"),
    (rows([1], dense_shape=(11, 2)), ShapeMismatch, r"dense_shape \(11, 2\), variable \(10, 2\)"),
    (np.ones((9, 2), np.float16), ShapeMismatch, r"'t': shape \(9, 2\), variable \(10, 2\)"),
]


@pytest.mark.parametrize(("gradient", "error", "words"), BAD_ROWS)
def test_bad_rows_are_refused_with_a_reason(mixed: Staging, gradient: Any, error: type[PsError], words: str) -> None:
    with pytest.raises(error, match=words):
        mixed.stage({"t": gradient, "w": W}, step=0)
    assert not mixed.memory.views["w"].any()


@pytest.mark.parametrize(
    ("gradients", "updates", "error", "words"),
    [
        ({"t": None, "w": None}, {"n": W[:2]}, InvalidSpec, r"No gradients provided for any variable: \['t', 'w'\]"),
        ({"w": W}, None, IncompletePush, "misses 1 of 2 variables: t"),
        ({"t": None, "w": W, "n": W[:2]}, None, InvalidSpec, "'n' is a Buffer: it takes no gradient"),
        ({"t": None, "w": W}, {"w": W}, InvalidSpec, "update for 'w': it takes gradients"),
        ({"t": None, "w": W}, {"m": W}, VariableNotFound, "'m' not found; did you mean 'n'|'m' not found; the model has n"),
        ({"t": None, "w": W}, {"n": W}, ShapeMismatch, r"update for 'n': shape \(3,\), variable \(2,\)"),
        ({"t": None, "w": W}, [("n", W[:2]), ("n", W[:2])], InvalidSpec, "the update of 'n' occurs twice"),
        ({"t": None, "w": W}, {"n": None}, InvalidSpec, "update for 'n' is None; leave it out"),
    ],
)
def test_gradients_and_updates_have_their_own_variables(
    mixed: Staging, gradients: Any, updates: Any, error: type[PsError], words: str
) -> None:
    with pytest.raises(error, match=words):
        mixed.stage(gradients, step=0, updates=updates)


def test_a_metric_may_be_the_scalar_of_any_library() -> None:
    class Scalar:
        """As PyTorch's and JAX's arrays without dimensions are."""

        def item(self) -> float:
            return 0.25

    assert as_metrics({"loss": Scalar()}) == {"loss": Metric(value=0.25)}  # type: ignore[dict-item]


def test_metrics_are_numbers_with_or_without_weights() -> None:
    found = as_metrics({"loss": np.float32(0.5), "accuracy": (np.array(1), 32)})  # type: ignore[dict-item]
    assert found == {"loss": Metric(value=0.5), "accuracy": Metric(value=1.0, weight=32.0)}
    for bad in (
        {"loss": "low"},
        {"loss": None},
        {"loss": True},
        {"": 1.0},
        {"loss": (1.0, -1)},
        {"loss": 10**400},
        [("loss", 1.0)],
        {"loss": np.ones(2)},
    ):
        with pytest.raises(InvalidSpec):
            as_metrics(bad)  # type: ignore[arg-type]
