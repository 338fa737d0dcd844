"""Formulas as text: results compared with NumPy, and refusals before anything runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import DtypeMismatch, InvalidSpec, VariableNotFound
from ps_protocol.model.expressions import BLOCK, MAX_DEPTH, MAX_PARTS, MAX_TEXT, parse_formula
from ps_protocol.model.programs import compute

NAMES = ("v", "g", "s", "lr")
FLOATS = st.floats(-4, 4, width=32)
DTYPES = st.sampled_from([np.float16, np.float32, np.float64])

# Formulas and the same in NumPy, made together: text, and a function of the names' arrays and numbers.
Made = tuple[str, Any]


def _plain(value: Any) -> Any:
    """A number is one of Python, which is rounded where it meets an array."""
    return value if np.ndim(value) else float(value)


def _binary(operator: str, function: Any) -> Any:
    def made(pair: tuple[Made, Made]) -> Made:
        (left, first), (right, second) = pair
        return f"({left} {operator} {right})", lambda a: _plain(function(first(a), second(a)))

    return made


def _call(name: str, function: Any) -> Any:
    return lambda parts: (f"{name}({', '.join(text for text, _ in parts)})", lambda a: _plain(function(*(part(a) for _, part in parts))))


def _chosen(condition: Any, then: Any, otherwise: Any, dtype: Any) -> Any:
    found = np.where(condition, then, otherwise)
    return found.astype(dtype) if np.ndim(found) else found


def _compared(parts: tuple[Made, Made, Made, Made]) -> Made:
    texts, (left, right, then, otherwise) = [text for text, _ in parts], [part for _, part in parts]
    return f"where({texts[0]} <= {texts[1]}, {texts[2]}, {texts[3]})", lambda a: _plain(
        _chosen(left(a) <= right(a), then(a), otherwise(a), a["v"].dtype)
    )


def _total(name: str, function: Any) -> Any:
    return lambda part: (f"{name}({part[0]})", lambda a: float(function(np.asarray(part[1](a), np.float64))))


def _larger(inner: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(_binary("+", np.add)),
        pairs.map(_binary("-", np.subtract)),
        pairs.map(_binary("*", np.multiply)),
        st.tuples(inner, st.just(("(abs(v) + 1)", lambda a: np.abs(a["v"]) + a["v"].dtype.type(1)))).map(_binary("/", np.divide)),
        pairs.map(_call("max", np.maximum)),
        pairs.map(_call("min", np.minimum)),
        pairs.map(_call("mod", np.mod)),
        st.tuples(inner).map(_call("abs", np.abs)),
        st.tuples(inner).map(_call("sign", np.sign)),
        st.tuples(inner).map(_call("sqrt", np.sqrt)),
        st.tuples(inner).map(_call("exp", np.exp)),
        st.tuples(inner).map(_call("log", np.log)),
        st.tuples(inner, inner, inner).map(_call("clip", lambda x, low, high: np.minimum(_plain(np.maximum(x, low)), high))),
        st.tuples(inner, inner, inner, inner).map(_compared),
        inner.map(_total("sum", np.sum)),
        inner.map(_total("norm", lambda x: np.sqrt(np.sum(np.square(x))))),
        inner.map(lambda made: (f"-{made[0]}", lambda a: _plain(np.negative(made[1](a))))),
        inner.map(lambda made: (f"({made[0]}) ** 2", lambda a: _plain(np.square(made[1](a))))),
    )


LEAVES = st.sampled_from(NAMES).map(lambda name: (name, lambda a: a[name]))
FORMULAS = st.recursive(LEAVES, _larger, max_leaves=6)


@given(FORMULAS, DTYPES, st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=5), FLOATS)
def test_a_formula_is_what_numpy_computes_in_the_variables_type(formula: Made, dtype: Any, rows: Any, lr: float) -> None:
    columns = np.array(rows, dtype).T
    values = {"v": columns[0], "g": columns[1], "s": columns[2], "lr": float(lr)}
    before = {name: np.copy(value) for name, value in values.items()}
    parsed = parse_formula(formula[0], variable="v", others=NAMES[1:])
    got = compute(parsed, values)["v"]
    with np.errstate(all="ignore"):
        want = np.broadcast_to(np.asarray(formula[1](values), dtype), columns[0].shape)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == dtype
    for name, value in before.items():
        np.testing.assert_array_equal(values[name], value)


def test_each_line_of_a_formula_sees_the_values_assigned_before_it_and_may_write_slots() -> None:
    formula = parse_formula(
        """
        m = b * m + (1 - b) * g
        step = lr * m
        v = v - step
        """,
        variable="v",
        others=("m", "b", "g", "lr"),
        writable=("m",),
    )
    assert formula.writes == ("m", "v")
    assert formula.reads == {"v", "m", "b", "g", "lr"}
    number = np.asarray
    new = compute(formula, {"v": np.ones(2), "m": np.zeros(2), "b": number(0.5), "g": np.full(2, 4.0), "lr": number(0.1)})
    assert (new["m"].tolist(), new["v"].tolist()) == ([2, 2], [0.8, 0.8])


def test_one_number_fills_the_variable_and_dividing_by_an_element_that_is_zero_is_as_in_ieee_754() -> None:
    assert compute(parse_formula("0.5", variable="v", others=()), {"v": np.zeros((2, 2))})["v"].tolist() == [[0.5, 0.5]] * 2
    quotient = compute(parse_formula("1 / v", variable="v", others=()), {"v": np.array([0.0, -0.0, 2.0])})["v"]
    assert quotient.tolist() == [np.inf, -np.inf, 0.5]


@pytest.mark.parametrize("shape", [(BLOCK - 1,), (BLOCK,), (3, BLOCK + 1), (0,), ()])
def test_a_formula_on_large_arrays_gives_the_result_of_one_numpy_call_in_any_memory_order(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    v, m, g = (rng.normal(size=shape[::-1]).astype(np.float32).T for _ in range(3))
    lr, half = np.asarray(0.1, np.float32), np.float32(0.5)
    formula = parse_formula("m = m * 0.5 + g; v = v - lr * m", variable="v", others=("m", "g", "lr"), writable=("m",))
    new = compute(formula, {"v": v, "m": m, "g": g, "lr": lr})
    np.testing.assert_array_equal(new["m"], m * half + g)
    np.testing.assert_array_equal(new["v"], v - lr * (m * half + g))
    # A sum needs all of them.
    scaled = compute(parse_formula("v / (norm(g) + 1) * sum(g)", variable="v", others=("g",)), {"v": v, "g": g})["v"]
    norm, total = (np.float32(f) for f in (np.sqrt(np.sum(np.square(g, dtype=np.float64))), np.sum(g, dtype=np.float64)))
    np.testing.assert_array_equal(scaled, v / (norm + np.float32(1)) * total)


REFUSED = [
    ("", "it is empty"),
    ("v -", "cannot be read"),
    ("v - $", "cannot be read"),
    ("v\x00", "cannot be read"),
    ("v.__class__", "column 1: attributes are not allowed"),
    ("v - g.data", "column 5: attributes are not allowed"),
    ("().__class__.__bases__[0].__subclasses__()", "attributes are not allowed"),
    ("g.sum()", "attributes are not allowed"),
    ("v[0]", "indexing is not allowed"),
    ("import os", "nothing can be imported"),
    ("from os import system", "nothing can be imported"),
    ("__import__('os')", "unknown function '__import__'"),
    ("eval('1')", "unknown function 'eval'"),
    ("open('/etc/passwd')", "unknown function 'open'"),
    ("exp('1')", "a str is no number"),
    ("lambda: v", "functions cannot be defined"),
    ("(lambda: v)()", "functions cannot be defined"),
    ("def f(): pass", "functions cannot be defined"),
    ("[x for x in v]", "there are no loops"),
    ("for x in v: pass", "there are no loops"),
    ("while 1: pass", "there are no loops"),
    ("v if g else s", "write where"),
    ("v and g", "nest where"),
    ("(x := v)", "a line of their own"),
    ("v += g", "in full"),
    ("v: float = g", "without a type"),
    ("f'{v}'", "no text"),
    ("'text'", "a str is no number"),
    ("b'text'", "a bytes is no number"),
    ("None", "a NoneType is no number"),
    ("True", "a bool is no number"),
    ("...", "a ellipsis is no number"),
    ("1j", "a complex is no number"),
    ("1e999", "too large"),
    ("9" * 400, "too large"),
    ("unknown - v", "column 1: unknown name 'unknown'; known are g, lr, s, v"),
    ("sqrt", "'sqrt' is a function"),
    ("v @ g", "not part of the language"),
    ("v % 2", "not part of the language"),
    ("v // 2", "not part of the language"),
    ("v << 2", "not part of the language"),
    ("~v", "not part of the language"),
    ("not v", "not part of the language"),
    ("(v, g)", "not part of the language"),
    ("{}", "not part of the language"),
    ("v is g", "not part of the language"),
    ("v ** g", "as the exponent"),
    ("v ** 17", "as the exponent"),
    ("9 ** 9 ** 9", "as the exponent"),
    ("10 ** 16 * 10 ** 16 * v ** -17", "as the exponent"),
    ("v / 0", "column 5: division by zero"),
    ("v / (1 - 1)", "division by zero"),
    ("0 ** -1", "no finite number"),
    ("log(0) * v", "no finite number"),
    ("sqrt(-1) * v", "no finite number"),
    ("v > 0", "a comparison is no number"),
    ("(v > 0) * g", "a comparison is no number"),
    ("where(v, g, s)", "want a comparison"),
    ("where(0 < v < 1, g, s)", "cannot be chained"),
    ("sqrt()", "takes 1 arguments, got 0"),
    ("sqrt(v, g)", "takes 1 arguments, got 2"),
    ("max(v)", "takes 2 to 8 arguments"),
    ("exp(x=v)", "no named arguments"),
    ("exp(*v)", "cannot be unpacked"),
    ("exp(**v)", "no named arguments"),
    ("lr = v", "'lr' is an argument and cannot be assigned to"),
    ("sqrt = v", "'sqrt' is a function"),
    ("v.x = g", "name = expression"),
    ("v = g = s", "name = expression"),
    ("v, g = s", "name = expression"),
    ("x = v", "assigns nothing to 'v'"),
    ("v; g", "name = expression"),
    ("v = g\nv = h", "line 2, column 5: unknown name 'h'"),
    ("v = x; x = v", "unknown name 'x'"),
    ("(" * 150 + "v" + ")" * 150, ""),
    ("(" * 1000 + "v" + ")" * 1000, ""),
    ("-" * (MAX_DEPTH + 2) + "v", "too deeply"),
    ("-" * 4000 + "v", "too deeply"),
    ("v" + "+v" * 2000, "too deeply"),
    ("v" * (MAX_TEXT + 1), "characters"),
    ("v = " + "; v = ".join(["v + v"] * (MAX_PARTS // 3 + 1)), "too long"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text[:30] or "empty" for text, _ in REFUSED])
def test_a_text_that_is_no_formula_is_refused_before_it_runs(text: str, words: str) -> None:
    if text == "(" * 150 + "v" + ")" * 150:  # parentheses alone are no depth
        assert parse_formula(text, variable="v", others=()).writes == ("v",)
        return
    with pytest.raises(InvalidSpec) as raised:
        parse_formula(text, variable="v", others=NAMES[1:])
    assert words in raised.value.message
    assert len(raised.value.message) < 400


@given(st.text(max_size=60) | st.text(alphabet="vgs01+-*/()=<>;, \n.[]'", max_size=60))
def test_any_text_is_parsed_as_a_formula_or_refused_with_a_reason(text: str) -> None:
    try:
        formula = parse_formula(text, variable="v", others=NAMES[1:])
    except InvalidSpec as error:
        assert error.message.startswith("formula")
    else:
        assert compute(formula, dict.fromkeys(NAMES, np.ones(2)))["v"].shape == (2,)


def test_shapes_that_do_not_fit_are_refused_with_the_place() -> None:
    formula = parse_formula("v - lr * (g + s)", variable="v", others=NAMES[1:])
    formula.check_shapes({"v": (2, 3), "lr": (), "g": (2, 3), "s": ()})
    with pytest.raises(InvalidSpec, match=r"line 1, column 11: shapes \(2, 3\) and \(3,\) do not fit"):
        formula.check_shapes({"v": (2, 3), "lr": (), "g": (2, 3), "s": (3,)})
    with pytest.raises(InvalidSpec, match=r"value of shape \(3,\) is assigned to 'v' of shape \(2,\)"):
        parse_formula("g", variable="v", others=NAMES[1:]).check_shapes({"v": (2,), "g": (3,)})
    with pytest.raises(VariableNotFound, match="nothing was given for 's'"):
        formula.check_shapes({"v": (), "lr": (), "g": ()})
    with pytest.raises(DtypeMismatch, match="'v' is float32"):
        compute(formula, {"v": np.zeros(2, np.float32), "lr": np.float64(1), "g": np.zeros(2), "s": np.zeros(2)})
    with pytest.raises(InvalidSpec, match="got a int"):
        parse_formula(3, variable="v", others=())  # type: ignore[arg-type]
