"""Compiled formulas: the bits of the same formula computed at once, also in place, with as few operations and blocks as by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.expressions import Formula, Value, parse_formula
from ps_protocol.model.programs import MAX_OPERATIONS, MAX_SCRATCH, Program
from tests.unit.ps_protocol.model.test_expressions import DTYPES, FLOATS, FORMULAS, NAMES

ARRAYS = ("v", "g", "s")


def _parsed(text: str, *numbers: str, writable: tuple[str, ...] = ("s",)) -> Formula:
    return parse_formula(text, variable="v", others=("g", "s", *numbers), writable=writable)


def _run(formula: Formula, values: dict[str, Any], *, block: int = 2) -> dict[str, Any]:
    """Runs the compiled formula over blocks of some elements, `s` in place; returns all arrays."""
    program = Program(formula, arrays=ARRAYS, in_place=("s",))
    arrays = {name: np.array(values[name]) for name in ARRAYS}
    dtype, size, out = arrays["v"].dtype, arrays["v"].size, np.full_like(arrays["v"], -7)
    scratch, squares = [np.full(block, -9, dtype) for _ in range(program.num_scratch)], np.empty(block)
    with np.errstate(all="ignore"):
        numbers = program.numbers({name: value for name, value in values.items() if name not in ARRAYS}, float)
        for index in range(program.num_passes + 1):
            sums = None
            for start in range(0, size, block):
                parts = [arrays[name][start : start + block] for name in ARRAYS]
                cut = [one[: parts[0].size] for one in scratch]
                if index == program.num_passes:
                    program.run(parts, (out[start : start + block],) if "v" in formula.writes else (), cut, numbers)
                else:
                    part = program.measure(index, parts, cut, squares, numbers)
                    sums = part if sums is None else [a + b for a, b in zip(sums, part, strict=True)]
            if sums is not None:
                numbers = program.conclude(index, sums, numbers, float)
    for name in ("v", "g"):
        np.testing.assert_array_equal(arrays[name], values[name])
    return {"v": out, "s": arrays["s"]}


def _by_its_parts(formula: Formula, values: Mapping[str, Any]) -> dict[str, Any]:
    """Computes each part of a formula with NumPy, one after the other, as its text has it."""
    dtype, known = values["v"].dtype, dict(values)
    with np.errstate(all="ignore"):
        for target, value in formula.steps:
            result = _part(value, known, dtype)
            if target in formula.writes or not isinstance(result, float):
                result = np.broadcast_to(np.asarray(result, dtype), values["v"].shape if target in formula.writes else np.shape(result))
            known[target] = result
    return {name: known[name] for name in formula.writes}


def _part(value: Value, known: Mapping[str, Any], dtype: Any) -> Any:
    if value.name:
        return known[value.name]
    if value.number is not None:
        return value.number
    assert value.compute is not None
    result = value.compute(*(_part(operand, known, dtype) for operand in value.operands))
    if not np.ndim(result):
        return bool(result) if value.is_condition else float(result)
    return result if value.is_condition else np.asarray(result, dtype)


@given(
    st.lists(FORMULAS, min_size=1, max_size=3),
    st.data(),
    DTYPES,
    st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=5),
    FLOATS,
)
def test_a_compiled_formula_has_the_bits_of_the_formula(formulas: Any, data: Any, dtype: Any, rows: Any, lr: float) -> None:
    targets = [data.draw(st.sampled_from(["v", "s", "x"])) for _ in formulas]
    text = "; ".join(f"{target} = {formula[0]}" for target, formula in zip(targets, formulas, strict=True)) + "; v = v + s"
    columns = np.array(rows, dtype).T
    values = {"v": columns[0], "g": columns[1], "s": columns[2], "lr": float(lr)}
    formula = _parsed(text, "lr")
    try:
        want = _by_its_parts(formula, values)
        # Sums of several blocks are not those of one.
        got = _run(formula, values, block=2 if not formula.needs_all_elements else 8)
    except InvalidSpec as error:
        assert "at once" in str(error)
        return
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=text)


def test_where_of_two_numbers_is_rounded_before_it_meets_another_array() -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=101).astype(np.float32) for name in ARRAYS}
    formula = _parsed("v = where(v > 0, 0.1, 0.2) * g")
    assert _by_its_parts(formula, values)["v"].tobytes() == _run(formula, values)["v"].tobytes()


def test_a_program_that_swaps_or_keeps_arrays_in_place_gives_the_values_of_its_formula() -> None:
    values = {"v": np.arange(5.0), "g": np.arange(5.0) + 10, "s": np.arange(5.0) + 20}
    for text in (
        "x = v; v = s; s = x",
        "s = g; v = s",
        "v = s; s = g",
        "s = 3; v = s",
        "v = v; s = s",
        "s = v; v = s + g",
        "x = s; s = g; v = x",
    ):
        formula = _parsed(text)
        want, got = _by_its_parts(formula, values), _run(formula, values)
        for name in formula.writes:
            np.testing.assert_array_equal(got[name], want[name], err_msg=text)


def test_sums_are_over_all_blocks_and_may_be_nested() -> None:
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=101) for name in ARRAYS}
    text = "u = g / norm(g); s = s + u; v = v - 0.1 * norm(v) / sum(abs(s * u)) * u"
    formula = _parsed(text)
    assert Program(formula, arrays=ARRAYS, in_place=("s",)).num_passes == 2
    for name, want in _by_its_parts(formula, values).items():
        np.testing.assert_allclose(_run(formula, values, block=7)[name], want, rtol=1e-12)


def test_adam_is_as_many_operations_as_by_hand_and_equal_parts_are_computed_once() -> None:
    adam = "m = m + (g - m) * (1 - b1); s = s + (g * g - s) * (1 - b2); v = v - lr * sqrt(1 - b2) / (1 - b1) * m / (sqrt(s) + eps)"
    formula = parse_formula(adam, variable="v", others=("g", "m", "s", "b1", "b2", "lr", "eps"), writable=("m", "s"))
    program = Program(formula, arrays=("v", "g", "m", "s"), in_place=("m", "s"))
    assert (program.num_operations, program.num_scratch, program.num_passes) == (12, 2, 0)
    twice = Program(_parsed("x = (g * g + v) / 2; v = (g * g + v) / 2 + x"), arrays=ARRAYS, in_place=("s",))
    assert (twice.num_operations, twice.num_scratch) == (4, 1)


def test_an_array_in_place_serves_as_memory_for_what_becomes_its_next_value() -> None:
    program = Program(_parsed("s = s * 0.5 + g; v = v - s * 0.1"), arrays=ARRAYS, in_place=("s",))
    assert (program.num_operations, program.num_scratch) == (4, 1)
    values = {"v": np.arange(5.0), "g": np.arange(5.0) + 10, "s": np.arange(5.0) + 20}
    for text in ("s = s * 0.5 + g; v = v - s", "x = s * 2; s = x * g + s; v = x + s", "x = s * 2; s = x * x; v = x"):
        formula = _parsed(text)
        want, got = _by_its_parts(formula, values), _run(formula, values)
        for name in formula.writes:
            np.testing.assert_array_equal(got[name], want[name], err_msg=text)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_chosen_is_0_and_what_is_chosen_keeps_its_bits(dtype: Any) -> None:
    v = np.array([np.nan, -0.0, np.inf, -np.inf, -1e-40, 3.0], dtype)
    for g, text in (
        (np.array([1, 1, 0, 1, 1, 0]), "where(g > 0, v, 0)"),
        (np.ones(6), "where(g > 0, v, 0)"),
        (np.ones(6), "where(1 > 2, v, 0)"),
    ):
        want = np.where(g > 0, v, dtype(0)) if "g" in text else np.zeros_like(v)
        got = _run(_parsed(text), {"v": v, "g": g.astype(dtype), "s": v})["v"]
        assert got.tobytes() == want.tobytes(), text


def test_a_formula_that_needs_too_much_memory_is_refused() -> None:
    names = [f"x{index}" for index in range(MAX_SCRATCH + 1)]
    text = "; ".join(f"{name} = g + {index}" for index, name in enumerate(names)) + f"; v = {'*'.join(names)}; v = v + {'+'.join(names)}"
    with pytest.raises(InvalidSpec, match=rf"{MAX_SCRATCH + 2} values at once, {MAX_SCRATCH} at most"):
        Program(_parsed(text), arrays=ARRAYS, in_place=())


def test_the_arrays_of_these_tests_have_exactly_the_names_that_formulas_use() -> None:
    assert set(ARRAYS) | {"lr"} == set(NAMES)


def test_a_formula_that_computes_the_same_again_for_each_of_many_nested_norms_is_refused() -> None:
    def text(num_norms: int) -> str:
        value = f"e = {'exp(' * 35}v{')' * 35}"
        return "\n".join([value, *(f"a = norm(e * {'a' if index else 'v'})" for index in range(num_norms)), "v = v + a"])

    assert Program(_parsed(text(20)), arrays=ARRAYS, in_place=()).num_passes == 20
    with pytest.raises(InvalidSpec, match=rf"operations with each element in 51 passes, {MAX_OPERATIONS} at most; nest fewer sums"):
        Program(_parsed(text(50)), arrays=ARRAYS, in_place=())
