"""Formulas that a program sends as text, such as an optimizer's: checked before they run, and computed on arrays. Runs none of it as code.

A formula is one expression, which gives the variable its new value, or assignments, one a line or separated by `;`:

    m = b1 * m + (1 - b1) * g
    v = v - lr * sign(m)

It has numbers, names, `+ - * /`, `**` with a number, comparisons, and the functions of FUNCTIONS. Everything is by element; two operands
have one shape, or one of them is a single number. An optimizer's formula may also raise its numbers to the power of the step. Python's
parser reads it; nothing of Python runs it.
"""

import ast
import keyword
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec, VariableNotFound
from ps_protocol.model.light_dataclass import light_dataclass

Array = npt.NDArray[Any]

# What a formula calls the variable that it is for.
VARIABLE = "v"
MAX_NAME = 64
MAX_TEXT = 4096
MAX_PARTS = 512
MAX_DEPTH = 40
MAX_EXPONENT = 16.0
# So many elements are computed at a time.
BLOCK = 64 * 1024

Shape = tuple[int, ...]


@light_dataclass(frozen=True, slots=True)
class _Function:
    """A function that formulas may call by its name. `takes_condition`: of its arguments, the first is a comparison."""

    num_arguments: tuple[int, int]
    compute: Callable[..., Any]
    takes_condition: bool = False
    gives_one_number: bool = False
    # Takes two operands, and more by being applied again.
    is_folded: bool = False


def norm_of(value: Any) -> Any:
    """Returns the Euclidean norm of all elements, as float64."""
    return np.sqrt(sum_of(np.square(value, dtype=np.float64)))


def sum_of(value: Any) -> Any:
    """Returns the sum of all elements, as float64."""
    # A sum in halves or floats would depend on how it is cut, and halves stop growing.
    return np.sum(value, dtype=np.float64)


# So large that even the smallest number, multiplied by it twice, is over 1.
_HUGE = {2: 2.0**15, 4: 2.0**127, 8: 2.0**1023}


def sign_of(value: Any, out: Any = None) -> Any:
    """Returns -1, 0 or 1 for each element, as np.sign does, which takes ten times as long where the signs have no pattern."""
    if getattr(value, "ndim", 0) == 0:
        return np.sign(value, out=out)
    huge, one = (value.dtype.type(number) for number in (_HUGE[value.dtype.itemsize], 1))
    out = np.multiply(value, huge, out=out)
    np.multiply(out, huge, out=out)
    np.clip(out, -one, one, out=out)
    return np.add(out, value.dtype.type(0), out=out)  # -0 becomes 0


_MANY = 8
FUNCTIONS: Mapping[str, _Function] = {
    "abs": _Function((1, 1), np.abs),
    "clip": _Function((3, 3), np.clip),
    "exp": _Function((1, 1), np.exp),
    "log": _Function((1, 1), np.log),
    "max": _Function((2, _MANY), np.maximum, is_folded=True),
    "min": _Function((2, _MANY), np.minimum, is_folded=True),
    "mod": _Function((2, 2), np.mod),  # what is left of a division, with the divisor's sign
    "norm": _Function((1, 1), norm_of, gives_one_number=True),
    "round": _Function((1, 1), np.rint),  # to the nearest whole number, of two the even one
    "sign": _Function((1, 1), sign_of),
    "sqrt": _Function((1, 1), np.sqrt),
    "sum": _Function((1, 1), sum_of, gives_one_number=True),
    "where": _Function((3, 3), np.where, takes_condition=True),
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
}
# Faster, and the same in NumPy's own `**`.
_POWERS: Mapping[float, Callable[[Any], Any]] = {2.0: np.square, 0.5: np.sqrt}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}
# What people write, and why it is not there.
_REFUSED: Mapping[type[ast.AST], str] = {
    ast.Attribute: "attributes are not allowed",
    ast.Subscript: "indexing is not allowed",
    ast.Lambda: "functions cannot be defined",
    ast.Import: "nothing can be imported",
    ast.ImportFrom: "nothing can be imported",
    ast.FunctionDef: "functions cannot be defined",
    ast.ClassDef: "classes cannot be defined",
    ast.IfExp: "there is no if; write where(condition, a, b)",
    ast.BoolOp: "there is no and, or; nest where()",
    ast.NamedExpr: "values are assigned by a line of their own, name = …",
    ast.AugAssign: "write v = v + … in full",
    ast.AnnAssign: "write name = … without a type",
    ast.ListComp: "there are no loops",
    ast.GeneratorExp: "there are no loops",
    ast.SetComp: "there are no loops",
    ast.DictComp: "there are no loops",
    ast.For: "there are no loops",
    ast.While: "there are no loops",
    ast.JoinedStr: "there is no text in a formula",
    ast.Starred: "arguments cannot be unpacked",
}


@light_dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A part of a formula: its place in the text, what it needs, how to compute it, and its value if that is a number of the text.

    One with a name is what has that name at this place. Of "b ** t", `base` is "b".
    """

    line: int
    column: int
    operands: tuple["Value", ...]
    compute: Callable[..., Any] | None = None
    name: str = ""
    base: str = ""
    number: float | None = None
    is_condition: bool = False
    gives_one_number: bool = False


@light_dataclass(frozen=True, slots=True)
class Formula:
    """A checked formula. `reads` are the names that must be given, `writes` those of them that get a new value.

    `steps`: what is assigned to which name, one after the other. `bases`: the names that are raised to the power of the step.
    """

    text: str
    reads: frozenset[str]
    writes: tuple[str, ...]
    steps: tuple[tuple[str, Value], ...]
    bases: tuple[str, ...] = ()

    @property
    def needs_all_elements(self) -> bool:
        """Whether an element of the results needs others than that element: whether there is a sum or a norm."""
        return any(_needs_all(value) for _, value in self.steps)

    def check_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Raises InvalidSpec, with the place, where operands do not fit or a value does not fit what it is assigned to."""
        known = dict(shapes)
        for name in sorted(self.reads - known.keys()):
            raise VariableNotFound(f"formula {short(self.text)}: nothing was given for {name!r}")
        for target, value in self.steps:
            shape = self._shape_of(value, known)
            if target in self.writes and shape not in ((), shapes[target]):
                raise _error(
                    self.text, value.line, value.column, f"a value of shape {shape} is assigned to {target!r} of shape {shapes[target]}"
                )
            known[target] = shapes[target] if target in self.writes else shape

    def _shape_of(self, value: Value, known: Mapping[str, Shape]) -> Shape:
        if value.name:
            return known[value.name]
        shapes = [self._shape_of(operand, known) for operand in value.operands]
        if value.gives_one_number:
            return ()
        whole = [shape for shape in shapes if shape]
        for shape in whole:
            if shape != whole[0]:
                raise _error(
                    self.text, value.line, value.column, f"shapes {whole[0]} and {shape} do not fit; nothing is broadcast but numbers"
                )
        return whole[0] if whole else ()


def parse_formula(
    text: str, *, variable: str, others: Collection[str], writable: Collection[str] = (), step: str = "", bases: Collection[str] = ()
) -> Formula:
    """Returns the formula of this text, checked; nothing of it has run.

    It may use the names `variable` and `others`, and assign to the variable, to those of `others` in `writable`, and to new names of its
    own. A single expression is assigned to the variable. Those of `others` in `bases` may be raised to the power of the one called `step`.
    Raises InvalidSpec with line, column and reason.
    """
    if not isinstance(text, str):
        raise InvalidSpec(f"formula: got a {type(text).__name__}, want a str")
    if len(text) > MAX_TEXT:
        raise InvalidSpec(f"formula: {len(text)} characters, want <= {MAX_TEXT}")
    try:
        tree = _tree_of(text)
    except SyntaxError as error:
        raise _error(text, error.lineno or 1, (error.offset or 1) - 1, f"this cannot be read: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise InvalidSpec(f"formula {short(text)}: nested too deeply, want <= {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidSpec(f"formula {short(text)}: this cannot be read: {error}") from None
    return _Parser(text, variable=variable, others=others, writable=writable, step=step, bases=bases).formula(tree)


def check_own_name(what: str, name: object, *, taken: Collection[str] = ()) -> None:
    """Raises InvalidSpec unless a program may call something so in a formula; `taken` have a meaning there, as functions have."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or len(name) > MAX_NAME:
        raise InvalidSpec(f"{what} {str(name)[:80]!r}: want a name of letters, digits and _, {MAX_NAME} characters at most")
    if name in taken or name in FUNCTIONS:
        raise InvalidSpec(f"{what} {name!r}: this name has a meaning in formulas already; choose another one")


def _tree_of(text: str) -> ast.Module:
    # `;` stands between assignments, and a formula may be indented as a whole.
    return ast.parse("\n".join(line.strip() for line in text.strip().splitlines()))


class _Parser:
    """Turns what Python's parser made of one formula into values, or refuses it."""

    def __init__(
        self, text: str, *, variable: str, others: Collection[str], writable: Collection[str], step: str, bases: Collection[str]
    ) -> None:
        self._text, self._variable = text, variable
        self._step, self._bases = step, bases
        self._raised: dict[str, None] = {}
        self._given = {variable, *others}
        self._writable = {variable, *writable}
        self._known = set(self._given)
        self._reads: set[str] = set()
        self._num_parts = 0

    def formula(self, tree: ast.Module) -> Formula:
        """Returns the formula, or raises InvalidSpec."""
        steps: list[tuple[str, Value]] = []
        if not tree.body:
            raise InvalidSpec("formula: it is empty; write an expression, such as 'v - lr * g'")
        for statement in tree.body:
            if isinstance(statement, ast.Expr) and len(tree.body) == 1:
                target, expression = self._variable, statement.value
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
                target, expression = self._target(statement.targets[0]), statement.value
            else:
                raise self._refused(statement, "want one expression, or lines of the form name = expression")
            value = self._value(expression, 0)
            if value.is_condition:
                raise self._at(expression, "a comparison is no number; write where(condition, a, b)")
            steps.append((target, value))
            self._known.add(target)
        writes = tuple(dict.fromkeys(target for target, _ in steps if target in self._writable))
        if not writes:
            raise InvalidSpec(f"formula {short(self._text)}: it assigns nothing to {self._variable!r}")
        return Formula(self._text, frozenset(self._reads & self._given) | set(writes), writes, tuple(steps), tuple(self._raised))

    def _target(self, node: ast.Name) -> str:
        if node.id in FUNCTIONS:
            raise self._at(node, f"{node.id!r} is a function; choose another name")
        if node.id in self._given and node.id not in self._writable:
            raise self._at(node, f"{node.id!r} is an argument and cannot be assigned to")
        return node.id

    def _value(self, node: ast.expr, depth: int) -> Value:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise self._at(node, f"too long: more than {MAX_PARTS} parts")
        if depth > MAX_DEPTH:
            raise self._at(node, f"nested too deeply, want <= {MAX_DEPTH} levels")
        if isinstance(node, ast.Constant):
            return self._number(node)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            operand = self._operand(node.operand, depth)
            return self._made(node, (operand,), np.negative if isinstance(node.op, ast.USub) else np.positive)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._binary(node, depth)
        if isinstance(node, ast.Compare):
            return self._comparison(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        raise self._refused(node, "this is not part of the language")

    def _operand(self, node: ast.expr, depth: int) -> Value:
        value = self._value(node, depth + 1)
        if value.is_condition:
            raise self._at(node, "a comparison is no number; write where(condition, a, b)")
        return value

    def _number(self, node: ast.Constant) -> Value:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise self._at(node, f"a {type(node.value).__name__} is no number")
        try:
            number = float(node.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._at(node, "this number is too large")
        return Value(node.lineno, node.col_offset, (), number=number)

    def _name(self, node: ast.Name) -> Value:
        if node.id not in self._known:
            if node.id in FUNCTIONS:
                raise self._at(node, f"{node.id!r} is a function; write {node.id}(…)")
            raise self._at(node, f"unknown name {node.id!r}; known are {', '.join(sorted(self._known))}")
        self._reads.add(node.id)
        return Value(node.lineno, node.col_offset, (), name=node.id)

    def _binary(self, node: ast.BinOp, depth: int) -> Value:
        left, right = self._operand(node.left, depth), self._operand(node.right, depth)
        if isinstance(node.op, ast.Div) and right.number == 0:
            raise self._at(node.right, "division by zero")
        if isinstance(node.op, ast.Pow):
            return self._power(node, left, right)
        return self._made(node, (left, right), _BINARY[type(node.op)])

    def _power(self, node: ast.BinOp, base: Value, exponent: Value) -> Value:
        if self._step and exponent.name == self._step:
            if base.name not in self._bases:
                names = ", ".join(self._bases) or "none"
                raise self._at(node.left, f"only a hyper-parameter ({names}) can be raised to the power of {self._step}")
            self._raised[base.name] = None
            return Value(node.lineno, node.col_offset, (), name=f"{base.name} ** {self._step}", base=base.name)
        if exponent.number is None or abs(exponent.number) > MAX_EXPONENT:
            raise self._at(
                node.right, f"want a number from -{MAX_EXPONENT:g} to {MAX_EXPONENT:g} as the exponent; exp() and log() do the rest"
            )
        if exponent.number in _POWERS:
            return self._made(node, (base,), _POWERS[exponent.number])
        return self._made(node, (base, exponent), np.power)

    def _comparison(self, node: ast.Compare, depth: int) -> Value:
        if len(node.ops) > 1:
            raise self._at(node, "comparisons cannot be chained; nest where()")
        if type(node.ops[0]) not in _COMPARISONS:
            raise self._at(node, "this comparison is not part of the language")
        left, right = self._operand(node.left, depth), self._operand(node.comparators[0], depth)
        return Value(node.lineno, node.col_offset, (left, right), _COMPARISONS[type(node.ops[0])], is_condition=True)

    def _call(self, node: ast.Call, depth: int) -> Value:
        if not isinstance(node.func, ast.Name):
            raise self._refused(node.func, "only functions of the language can be called")
        function = FUNCTIONS.get(node.func.id)
        if function is None:
            raise self._at(node.func, f"unknown function {node.func.id!r}; known are {', '.join(FUNCTIONS)}")
        if node.keywords:
            raise self._at(node, f"{node.func.id}() takes no named arguments")
        least, most = function.num_arguments
        if not least <= len(node.args) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise self._at(node, f"{node.func.id}() takes {wanted} arguments, got {len(node.args)}")
        first = self._value(node.args[0], depth + 1) if function.takes_condition else self._operand(node.args[0], depth)
        if function.takes_condition and not first.is_condition:
            raise self._at(node.args[0], f"want a comparison as the first argument of {node.func.id}()")
        operands = (first, *(self._operand(argument, depth) for argument in node.args[1:]))
        if function.is_folded:
            for operand in operands[1:]:
                first = self._made(node, (first, operand), function.compute)
            return first
        return self._made(node, operands, function.compute, gives_one_number=function.gives_one_number)

    def _made(self, node: ast.expr, operands: tuple[Value, ...], compute: Callable[..., Any], *, gives_one_number: bool = False) -> Value:
        """A value of these operands; one of numbers alone is computed at once, and refused if it is none."""
        number = None
        if all(operand.number is not None for operand in operands):
            with np.errstate(all="ignore"):
                number = float(compute(*(np.float64(operand.number or 0.0) for operand in operands)))
            if not math.isfinite(number):
                raise self._at(node, "this is no finite number")
        return Value(node.lineno, node.col_offset, operands, compute, number=number, gives_one_number=gives_one_number)

    def _refused(self, node: ast.AST, otherwise: str) -> InvalidSpec:
        inner = node.value if isinstance(node, ast.Expr) else node
        return self._at(inner, _REFUSED.get(type(inner), otherwise))

    def _at(self, node: ast.AST, reason: str) -> InvalidSpec:
        return _error(self._text, getattr(node, "lineno", 1), getattr(node, "col_offset", 0), reason)


def _needs_all(value: Value) -> bool:
    return value.gives_one_number or any(_needs_all(operand) for operand in value.operands)


def _error(text: str, line: int, column: int, reason: str) -> InvalidSpec:
    lines: Sequence[str] = [one.strip() for one in text.strip().splitlines()] or [""]
    there = lines[min(line, len(lines)) - 1]
    return InvalidSpec(f"formula, line {line}, column {column + 1}: {reason}: {short(there[max(column - 10, 0) :])}")


def short(text: str) -> str:
    """Returns a text for a message, cut if it is long."""
    return repr(text if len(text) <= 60 else text[:60] + "…")
