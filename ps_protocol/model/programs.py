"""Formulas compiled to operations on blocks of arrays: each value computed once, in memory that the caller lends. Knows no optimizer.

A program makes as many passes over the arrays as its formula nests sums and norms, and none if there are none; then one pass computes the
results. What is a number, and no array, is computed once for all blocks.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ps_protocol.errors import DtypeMismatch, InvalidSpec
from ps_protocol.model.expressions import BLOCK, VARIABLE, Array, Formula, Value, norm_of, parse_formula, short
from ps_protocol.model.light_dataclass import light_dataclass

# Numbers in the precision of one element type or of Python (conditions: truth values), and what makes one.
Numbers = tuple[Any, ...]
Number = Callable[[Any], Any]
_Function = Callable[..., Any]
_Operation = tuple[_Function, Callable[[Sequence[Any]], Iterable[Any]], int]  # of a file of registers, its operands; and its result
_Register = tuple[str, int]  # what kind, and which of it


def _quotient(a: float, b: float) -> float:
    return a / b if b else float(np.divide(a, b))


def _root(a: float) -> float:
    return math.sqrt(a) if a >= 0 else math.nan


# The same of two NumPy numbers, or of two floats, many times as fast: they are computed anew at every step.
_OF_NUMBERS: Mapping[_Function, _Function] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.sqrt: np.sqrt,
}
_OF_FLOATS: Mapping[_Function, _Function] = {**_OF_NUMBERS, np.divide: _quotient, np.sqrt: _root}

# Each takes a block of memory of every thread.
MAX_SCRATCH = 16
# With each element, in all passes together: what several sums need is computed for each of them.
MAX_OPERATIONS = 1024


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A value of a formula: given by name, a number of the text, or a function of other nodes.

    `is_array`: it has a value for each element. `is_total`: a sum or norm of an array. `level`: how many passes come before it.
    """

    function: _Function | None = None
    operands: tuple[int, ...] = ()
    name: str = ""
    number: float = 0.0
    is_array: bool = False
    is_condition: bool = False
    is_total: bool = False
    level: int = 0


class _Graph:
    """The nodes of a formula, each after its operands; equal parts of the formula are one node."""

    def __init__(self, formula: Formula, arrays: Sequence[str]) -> None:
        self.nodes: list[_Node] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._names = {name: self._added(_Node(name=name, is_array=True)) for name in arrays}
        for target, value in formula.steps:
            index = self._of(value)
            # One number that is assigned to an array fills it.
            self._names[target] = index if self.nodes[index].is_array or target not in arrays else self._copied(index)
        # What is assigned as it was given is copied: whatever is given in place may be overwritten.
        self.results = {
            name: self._names[name] if self._is_operation(self._names[name]) else self._copied(self._names[name]) for name in formula.writes
        }

    def reached(self, roots: Iterable[int], *, through_totals: bool) -> list[int]:
        """Returns the nodes that these are made of, themselves included, in order."""
        found, left = set[int](), list(roots)
        while left:
            index = left.pop()
            if index not in found:
                found.add(index)
                node = self.nodes[index]
                left.extend(node.operands if through_totals or not node.is_total else ())
        return sorted(found)

    def operations(self, roots: Iterable[int]) -> list[int]:
        """Returns those of the nodes that these are made of that are computed for each element."""
        return [index for index in self.reached(roots, through_totals=False) if self._is_operation(index)]

    def _is_operation(self, index: int) -> bool:
        node = self.nodes[index]
        return node.is_array and node.function is not None

    def _copied(self, index: int) -> int:
        return self._added(_Node(function=_copy, operands=(index,), is_array=True, level=self.nodes[index].level))

    def _of(self, value: Value) -> int:
        if value.name:
            return self._names[value.name] if value.name in self._names else self._added(_Node(name=value.name))
        if value.number is not None:
            return self._added(_Node(number=value.number))
        operands = tuple(self._of(operand) for operand in value.operands)
        of_arrays = any(self.nodes[operand].is_array for operand in operands)
        is_total = value.gives_one_number and of_arrays
        return self._added(
            _Node(
                function=value.compute,
                operands=operands,
                is_array=of_arrays and not is_total,
                is_condition=value.is_condition,
                is_total=is_total,
                level=max(self.nodes[operand].level for operand in operands) + is_total,
            )
        )

    def _added(self, node: _Node) -> int:
        # The text of a number tells 0 from -0.
        key = (node.function, node.operands, node.name, repr(node.number))
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(node)
        return self._known[key]


class Program:
    """A compiled formula. `arrays`: the names of its arrays, in the order in which they are given; all others are numbers.

    Arrays of one call have one length and element type. Those `in_place` are changed where they are. Thread-safe: it holds no values.
    Raises InvalidSpec for a formula that needs more than MAX_SCRATCH blocks at once, or MAX_OPERATIONS.
    """

    def __init__(self, formula: Formula, *, arrays: Sequence[str], in_place: Sequence[str]) -> None:
        graph = _Graph(formula, arrays)
        nodes = self._nodes = graph.nodes
        reached = graph.reached(graph.results.values(), through_totals=True)
        totals = [index for index in reached if nodes[index].is_total]
        # The number of times that all blocks must be measured before `run`.
        self.num_passes = max((nodes[index].level for index in totals), default=0)
        self._totals = [[index for index in totals if nodes[index].level == level + 1] for level in range(self.num_passes)]
        # The numbers of each level, in the order in which they become known.
        numbers = [index for index in reached if not nodes[index].is_array]
        self._of_level = [[index for index in numbers if nodes[index].level == level] for level in range(self.num_passes + 1)]
        self._places = {index: place for place, index in enumerate(index for level in self._of_level for index in level)}
        operands = [[nodes[index].operands[0] for index in of_pass] for of_pass in self._totals]
        self._measures = [_Code(graph, self._places, arrays=arrays, roots=roots) for roots in operands]
        self._code = _Code(graph, self._places, arrays=arrays, results=graph.results, in_place=in_place)
        self.num_scratch = max(code.num_scratch for code in (*self._measures, self._code))
        if self.num_scratch > MAX_SCRATCH:
            raise InvalidSpec(f"formula: it needs {self.num_scratch} values at once, {MAX_SCRATCH} at most; use what is computed sooner")
        num_operations = sum(code.num_operations for code in (*self._measures, self._code)) + len(totals)
        if num_operations > MAX_OPERATIONS:
            raise InvalidSpec(
                f"formula: it makes {num_operations} operations with each element in {self.num_passes + 1} passes, "
                f"{MAX_OPERATIONS} at most; nest fewer sums and norms, or compute less in them"
            )

    @property
    def num_operations(self) -> int:
        """How many operations `run` makes with each block."""
        return self._code.num_operations

    def numbers(self, given: Mapping[str, Any], number: Number) -> Numbers:
        """Returns the numbers that the first pass needs, from those that are given by name; `number` makes one of the element type."""
        return self._extended((), 0, given, {}, number)

    def measure(self, index: int, inputs: Sequence[Array], scratch: Sequence[Array], squares: Array, numbers: Numbers) -> list[float]:
        """Returns the sums of a block that pass `index` is for; `squares`: scratch memory for as many float64."""
        code = self._measures[index]
        found = code.run(inputs, (), scratch, numbers)
        sums = []
        for total, values in zip(self._totals[index], found, strict=True):
            if self._nodes[total].function is norm_of:
                np.multiply(values, values, out=squares[: values.size], dtype=np.float64)
                values = squares[: values.size]
            sums.append(float(np.sum(values, dtype=np.float64)))
        return sums

    def conclude(self, index: int, sums: Sequence[float], numbers: Numbers, number: Number) -> Numbers:
        """Returns the numbers that the pass after `index` needs, from the sums of all blocks."""
        found = {
            total: number(np.sqrt(np.float64(value)) if self._nodes[total].function is norm_of else value)
            for total, value in zip(self._totals[index], sums, strict=True)
        }
        return self._extended(numbers, index + 1, {}, found, number)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], scratch: Sequence[Array], numbers: Numbers) -> None:
        """Writes the results of a block, those in place to their inputs and the others to `outputs`, in the order of `writes`."""
        self._code.run(inputs, outputs, scratch, numbers)

    def compute(self, inputs: Sequence[Array], outputs: Sequence[Array], numbers: Numbers, number: Number) -> None:
        """Does the same to whole arrays, which have one axis: measures all blocks as often as it takes, and then computes their results."""
        size, dtype = inputs[0].size, inputs[0].dtype
        scratch, squares = [np.empty(min(size, BLOCK), dtype) for _ in range(self.num_scratch)], np.empty(min(size, BLOCK))
        blocks = [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
        for index in range(self.num_passes):
            sums = [0.0] * len(self._totals[index])
            for block in blocks:
                cut = [one[: block.stop - block.start] for one in scratch]
                parts = self.measure(index, [one[block] for one in inputs], cut, squares, numbers)
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
            numbers = self.conclude(index, sums, numbers, number)
        for block in blocks:
            cut = [one[: block.stop - block.start] for one in scratch]
            self.run([one[block] for one in inputs], [one[block] for one in outputs], cut, numbers)

    def _extended(self, numbers: Numbers, level: int, given: Mapping[str, Any], totals: Mapping[int, Any], number: Number) -> Numbers:
        known, faster = list(numbers), _OF_FLOATS if number is float else _OF_NUMBERS
        for index in self._of_level[level]:
            node = self._nodes[index]
            if index in totals:
                value = totals[index]
            elif node.name:
                value = number(given[node.name])
            elif node.function is None:
                value = number(node.number)
            else:
                operands = [known[self._places[operand]] for operand in node.operands]
                if node.function in faster:
                    value = faster[node.function](*operands)
                else:
                    value = node.function(*operands)
                    value = value if node.is_condition else number(value)
            known.append(value)
        return tuple(known)


class _Code:
    """Operations on one block, one after the other. They make `results`, those `in_place` in the arrays of their names; or `roots`, which
    are returned.

    Operands lie in a file of registers: the arrays, the outputs, scratch blocks, the same as truth values, and the numbers.
    """

    def __init__(
        self,
        graph: _Graph,
        places: Mapping[int, int],
        *,
        arrays: Sequence[str],
        roots: Sequence[int] = (),
        results: Mapping[str, int] | None = None,
        in_place: Sequence[str] = (),
    ) -> None:
        results = results or {}
        outputs = [name for name in results if name not in in_place]
        homes = {name: ("array", arrays.index(name)) if name in in_place else ("output", outputs.index(name)) for name in results}
        scratch = _Scratch()
        where: dict[int, _Register] = {place: ("array", place) for place in range(len(arrays))}
        where.update({index: ("number", place) for index, place in places.items()})
        order = graph.operations([*roots, *results.values()])
        last_uses = {operand: position for position, index in enumerate(order) for operand in graph.nodes[index].operands}
        left = dict(results)  # those that are not where they belong yet
        made = {index: position for position, index in enumerate(order)}
        # Which node lies in each array in place: first its own, which has the same number.
        holds = {name: arrays.index(name) for name in results if name in in_place}
        steps: list[tuple[_Function, list[_Register]]] = []
        for position, index in enumerate(order):
            node = graph.nodes[index]
            function = _select if node.function is np.where else node.function
            assert function is not None
            operands = [where[operand] for operand in node.operands]
            kept = {*roots, *left.values()}
            ended = [one for one in dict.fromkeys(node.operands) if last_uses[one] == position and one not in kept]
            can_overwrite = function is not _select and not node.is_condition
            if can_overwrite:
                scratch.release(ended)
            # An array in place is overwritten when nothing needs what lies in it any more.
            last_use = position if can_overwrite else position - 1
            free = [name for name in left if name not in holds or last_uses.get(holds[name], -1) <= last_use]
            home = next((name for name in free if left[name] == index), None)
            if home is not None:
                del left[home]
            elif index not in kept and not node.is_condition:
                # Until its own result is made, it serves as a scratch block.
                home = next((name for name in free if name in holds and last_uses[index] <= made[left[name]]), None)
            if home is not None:
                where[index] = homes[home]
                holds.update({home: index} if home in holds else {})
            else:
                where[index] = ("truth" if node.is_condition else "scratch", scratch.take(index))
            if not can_overwrite:
                scratch.release(ended)
            steps.append((function, [*operands, where[index]]))
        steps.extend((_copy, [where[index], homes[name]]) for name, index in left.items())
        self.num_scratch = scratch.num_blocks
        self.num_operations = len(steps)
        self._truths = sorted({number for kind, number in where.values() if kind == "truth"})
        sizes = {"array": len(arrays), "output": len(outputs), "scratch": self.num_scratch, "truth": len(self._truths)}
        firsts = dict(zip((*sizes, "number"), itertools.accumulate(sizes.values(), initial=0), strict=True))

        def at(register: _Register) -> int:
            kind, number = register
            return firsts[kind] + (self._truths.index(number) if kind == "truth" else number)

        self._steps: list[_Operation] = [(function, _taking([*map(at, operands)]), at(result)) for function, (*operands, result) in steps]
        self._roots = [at(where[index]) for index in roots]

    def run(self, arrays: Sequence[Array], outputs: Sequence[Array], scratch: Sequence[Array], numbers: Numbers) -> list[Array]:
        """Computes a block; returns the roots, which are valid until the scratch blocks are used again."""
        blocks = scratch[: self.num_scratch]
        file = [*arrays, *outputs, *blocks, *(blocks[number].view(np.bool_)[: blocks[number].size] for number in self._truths), *numbers]
        for function, operands, result in self._steps:
            function(*operands(file), out=file[result])
        return [file[place] for place in self._roots]


class _Scratch:
    """Which scratch block holds which node."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._free: list[int] = []
        self._taken: dict[int, int] = {}

    def take(self, node: int) -> int:
        """Returns a block for a node: the one that was released last, which is in the cache."""
        if self._free:
            block = self._free.pop()
        else:
            block = self.num_blocks
            self.num_blocks += 1
        self._taken[node] = block
        return block

    def release(self, nodes: Iterable[int]) -> None:
        """Takes back the blocks of these nodes, where they have any."""
        self._free.extend(self._taken.pop(node) for node in nodes if node in self._taken)


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Returns what takes these of a list, many times as fast as a loop would."""
    return operator.itemgetter(*places) if len(places) > 1 else operator.itemgetter(slice(places[0], places[0] + 1))


def _copy(source: Any, out: Array) -> None:
    np.copyto(out, source)


def _select(condition: Any, chosen: Any, otherwise: Any, out: Array) -> None:
    if condition.all():
        np.copyto(out, chosen)
    elif condition.ndim and np.ndim(chosen) and not np.ndim(otherwise) and not otherwise and not np.signbit(otherwise):
        # Twenty times as fast as a copy under a random mask: all bits set for elements that are chosen, none for 0.
        bits = np.dtype(f"i{out.itemsize}")
        np.negative(condition.view(np.int8), out=out.view(bits), dtype=bits)
        np.bitwise_and(out.view(bits), chosen.view(bits), out=out.view(bits))
    else:
        np.copyto(out, otherwise)
        np.copyto(out, chosen, where=condition)


class Names(NamedTuple):
    """What the names in a formula's text are: arrays, of which those `in_place` may be assigned to and are changed where they are, and
    numbers, of which `bases` may be raised to the power of the one called `step`. The text may also assign to VARIABLE, which is an array.
    """

    arrays: tuple[str, ...]
    in_place: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    step: str = ""
    bases: tuple[str, ...] = ()


# As many as a model may have formulas of its own in practice; each of its variables comes with its own copy of a text.
@functools.lru_cache(maxsize=256)
def parsed(text: str, names: Names) -> Formula:
    """Returns the formula of this text. Raises InvalidSpec with line, column and reason."""
    others = (*names.arrays, *names.numbers)
    return parse_formula(text, variable=VARIABLE, others=others, writable=names.in_place, step=names.step, bases=names.bases)


@functools.lru_cache(maxsize=256)
def compiled(text: str, names: Names) -> Program:
    """Returns its program, for these arrays in their order. Raises InvalidSpec, also for one that needs too much memory."""
    return Program(parsed(text, names), arrays=names.arrays, in_place=names.in_place)


def compute(formula: Formula, values: Mapping[str, Array | float]) -> dict[str, Array]:
    """Returns the new values by name; `values`: Python's floats, which are numbers, and arrays of floats of one type, which results have.

    Numbers are computed in double precision and rounded where they meet an array; an array of no axes is one beside others that have some.
    Every step sees what the steps before it assigned. Dividing by an element that is 0, and roots and logarithms of what has none, give
    infinities and NaN, as IEEE 754 has it. Raises InvalidSpec, VariableNotFound and DtypeMismatch.
    """
    # NumPy's float64 is a float, too.
    arrays = {name: np.asarray(values[name]) for name in sorted(formula.reads & values.keys()) if not isinstance(values[name], float)}
    dtype = next((array.dtype for array in arrays.values()), np.dtype(np.float64))
    for name, array in arrays.items():
        if array.dtype.kind != "f" or array.dtype != dtype:
            raise DtypeMismatch(
                f"formula {short(formula.text)}: {name!r} is {array.dtype}, want floats of one type, {dtype}; cast with .astype()"
            )
    formula.check_shapes({name: np.shape(values[name]) for name in formula.reads & values.keys()})
    shape = arrays[formula.writes[0]].shape
    for name in formula.writes:
        if arrays[name].shape != shape:
            raise InvalidSpec(
                f"formula {short(formula.text)}: {name!r} has shape {arrays[name].shape}, {formula.writes[0]!r} {shape}; want one shape"
            )
    given = {name: float(values[name]) for name in formula.reads if name not in arrays or arrays[name].shape != shape}
    flat = {name: np.array(array).reshape(-1) for name, array in arrays.items() if name not in given}
    names = Names((*flat,), in_place=formula.writes, numbers=(*given,))
    program = compiled(formula.text, names)
    with np.errstate(all="ignore"):
        program.compute((*flat.values(),), (), program.numbers(given, float), float)
    return {name: flat[name].reshape(shape) for name in formula.writes}
