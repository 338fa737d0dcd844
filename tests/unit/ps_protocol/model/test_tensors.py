"""Names, element types and shapes of variables."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.variables import DataType, VariableSpec, data_type_of


def spec(name: str = "w", shape: tuple[Any, ...] = (3,)) -> VariableSpec:
    return VariableSpec(name=name, data_type=DataType.FLOAT32, shape=shape)


@pytest.mark.parametrize("name", ["w", "layer 1/weight:0", "Gewicht ä", "重み", "x" * 256, "é" * 128])
def test_valid_variable_names_are_accepted(name: str) -> None:
    assert spec(name).name == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "name is empty"),
        ("x" * 257, "257 bytes, want <= 256"),
        ("é" * 129, "258 bytes, want <= 256"),
        ("a\nb", "control character"),
        ("a\0b", "control character"),
        ("\x1b[31mred", "control character"),
        (" w", "begins or ends with a space"),
        ("w ", "begins or ends with a space"),
        ("\ud800", "not valid UTF-8"),
        (b"w", "got bytes, want a str"),
    ],
)
def test_invalid_variable_names_are_refused(name: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        spec(name)


@pytest.mark.parametrize(
    ("shape", "size", "num_rows"), [((), 1, 1), ((0,), 0, 0), ((0, 5), 0, 0), ((5, 0), 0, 5), ((2, 3), 6, 2), ((1,) * 32, 1, 1)]
)
def test_any_rank_up_to_32_and_zero_extents_are_accepted(shape: tuple[int, ...], size: int, num_rows: int) -> None:
    variable = spec(shape=shape)
    assert (variable.size, variable.nbytes, variable.num_rows) == (size, 4 * size, num_rows)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1,) * 33, "rank 33, want <= 32"),
        ((3, -1), r"shape\[1\] = -1, want >= 0"),
        ((3, 2.5), r"shape\[1\] is 2.5, want an int"),
        ((True,), r"shape\[0\] is True, want an int"),
        ((1 << 40, 1 << 40), "too large"),
        ((1 << 40, 1 << 40, 0), "too large"),
        ((4_194_305, 4_194_305, 4_194_305), "too large"),
    ],
)
def test_invalid_shapes_are_refused(shape: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        spec(shape=shape)


def test_too_many_bytes_are_refused_with_the_limit() -> None:
    with pytest.raises(LimitExceeded, match=r"variable 'w': \d+ bytes, limit \d+"):
        spec(shape=(1 << 35,))


def test_element_types_are_recognised() -> None:
    assert data_type_of(np.zeros(1, np.float32), name="w") is DataType.FLOAT32
    assert data_type_of(np.zeros(1, "<f8"), name="w") is DataType.FLOAT64
    assert (DataType.FLOAT32.itemsize, DataType.FLOAT64.itemsize) == (4, 8)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, object, "U3", bool])
def test_an_unsupported_element_type_is_refused_with_the_conversion_to_call(dtype: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"variable 'w': dtype .* want one of float32, float64, float16, bfloat16; convert with"):
        data_type_of(np.zeros(1, dtype), name="w")


def test_a_big_endian_array_is_refused_with_the_conversion_to_call() -> None:
    with pytest.raises(InvalidSpec, match=r"variable 'w': byte order: little-endian only; convert with .astype\('float64'\)"):
        data_type_of(np.zeros(1, ">f8"), name="w")
