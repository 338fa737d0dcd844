"""All that a shard's next steps depend on, tensors and numbers, as a checkpoint has it. Knows layouts and texts; no model, file or lock.

The numbers stand in a file's metadata, written so that the same bits come back.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

import numpy as np

from ps_protocol.errors import DataLoss
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import AppliedPush, MetricCell, ShardSpec, WorkerPushes
from ps_server.numbers.apply import averaged_slices
from ps_server.optimizers.rule import UpdateRule

# The state besides its tensors that a shard's next steps depend on, as texts in its file.


HIDDEN_STATE = "shard"
_FORMAT = 1

Item = TypeVar("Item")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class HiddenState:
    """`powers` by the key of the optimizer (empty: the model's own); `average_product`: of the averages' decays of the steps gone by.

    `phase`: the number of the phase of training, and its first step.
    """

    step: int
    powers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    phase: tuple[int, int] = (0, 0)
    average_product: float = 1.0
    num_nonfinite: int = 0
    metrics: tuple[MetricCell, ...] = ()
    pushes: tuple[WorkerPushes, ...] = ()


def encode_hidden_state(state: HiddenState) -> dict[str, str]:
    """Returns the texts for the file's metadata."""
    fields = {
        "format": _FORMAT,
        "step": state.step,
        "powers": state.powers,
        "phase": state.phase,
        "average_product": state.average_product,
        "num_nonfinite": state.num_nonfinite,
        "metrics": [[cell.name, cell.worker, *_numbers(cell)] for cell in state.metrics],
        "pushes": [[one.worker, one.incarnation, [[push.sequence, push.step] for push in one.applied]] for one in state.pushes],
    }
    return {HIDDEN_STATE: json.dumps(fields, separators=(",", ":"))}


def decode_hidden_state(metadata: Mapping[str, str], *, where: str) -> HiddenState:
    """Returns the state that `encode_hidden_state` was given. Raises DataLoss for other texts; `where` names the file."""
    try:
        fields = json.loads(metadata[HIDDEN_STATE])
        if fields["format"] != _FORMAT:
            raise ValueError(f"format {fields['format']}")
        return HiddenState(
            step=_natural(fields["step"]),
            powers={str(key): _each(powers, _finite) for key, powers in fields["powers"].items()},
            phase=_phase(fields["phase"]),
            average_product=_finite(fields["average_product"]),
            num_nonfinite=_natural(fields["num_nonfinite"]),
            metrics=_each(fields["metrics"], _cell),
            pushes=_each(fields["pushes"], _worker_pushes),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: the state of the shard in its header cannot be read ({str(error)[:80]})") from None


def _numbers(cell: MetricCell) -> tuple[object, ...]:
    # JSON has no number that is not finite, and a loss may be one.
    return repr(cell.total), repr(cell.weight), cell.count, repr(cell.last)


def _cell(fields: list[Any]) -> MetricCell:
    name, worker, total, weight, count, last = fields
    return MetricCell(
        name=str(name),
        worker=_natural(worker),
        total=float(total),
        weight=_finite(float(weight)),
        count=_natural(count),
        last=float(last),
    )


def _worker_pushes(fields: list[Any]) -> WorkerPushes:
    worker, incarnation, applied = fields
    return WorkerPushes(worker=_natural(worker), incarnation=_natural(incarnation), applied=_each(applied, _applied))


def _applied(fields: list[Any]) -> AppliedPush:
    sequence, step = fields
    return AppliedPush(sequence=_natural(sequence), step=_natural(step))


def _phase(fields: object) -> tuple[int, int]:
    number, first_step = _each(fields, _natural)
    return number, first_step


def _each(items: object, decode: Callable[[Any], Item]) -> tuple[Item, ...]:
    if not isinstance(items, list):
        raise ValueError("a list is missing")
    return tuple(decode(item) for item in items)


def _natural(value: object) -> int:
    # Not isinstance: a bool is an int.
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"got {str(value)[:40]}, want a whole number from 0")
    return value


def _finite(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)):  # type: ignore[arg-type]  # type is known from the line itself
        raise ValueError(f"got {str(value)[:40]}, want a finite number")
    return float(value)  # type: ignore[arg-type]


# The name of the moving averages in a file; no slot of an optimizer has this name.
AVERAGE_PART = "average"


@light_dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One slice's values (`part` empty), or one of its slots, or its average: a view of the memory, in the slice's shape."""

    piece: VariableSlice
    part: str
    memory: Array

    @property
    def content(self) -> Array:
        """The same memory as bytes."""
        content: Array = self.memory.reshape(-1).view(np.uint8)
        return content


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateMemory:
    """The memories of one step: arenas of values, slots and averages, and each table's rows and slots."""

    values: Array
    slots: Mapping[str, Array]
    average: Array | None
    tables: Sequence[tuple[Array, Mapping[str, Array]]]

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in a fixed order."""
        averages = [] if self.average is None else [self.average]
        tables = [memory for rows, slots in self.tables for memory in (rows, *slots.values())]
        return [self.values, *self.slots.values(), *averages, *tables]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(memory.nbytes for memory in self.arrays)


def memory_like(state: StateMemory, allocate: Callable[[int], Array]) -> StateMemory:
    """Returns memories of the same sizes, with the contents that `allocate` gives so many bytes."""
    pieces = iter([allocate(memory.nbytes).view(memory.dtype).reshape(memory.shape) for memory in state.arrays])
    return StateMemory(
        values=next(pieces),
        slots={name: next(pieces) for name in state.slots},
        average=None if state.average is None else next(pieces),
        tables=[(next(pieces), {name: next(pieces) for name in slots}) for _, slots in state.tables],
    )


def tensors_of(spec: ShardSpec, rules: Sequence[UpdateRule], memory: StateMemory) -> Iterator[StateTensor]:
    """Yields the tensors of the state: for each slice its values, its optimizer's slots, and its average if it has one."""
    layout = spec.layout
    averaged = set(averaged_slices(layout, spec.averages)) if spec.averages is not None and memory.average is not None else set()
    of_rule = {"" if optimizer is None else optimizer.key: rules[position] for position, optimizer in enumerate(layout.rules)}
    for index, piece in enumerate(layout.slices):
        yield StateTensor(piece, "", layout.view(memory.values, index))
        for name in of_rule[_rule_key(piece)].slots:
            yield StateTensor(piece, name, layout.view(memory.slots[name], index))
        if index in averaged and memory.average is not None:
            yield StateTensor(piece, AVERAGE_PART, layout.view(memory.average, index))
    for piece, (rows, slots) in zip(layout.tables, memory.tables, strict=True):
        yield StateTensor(piece, "", rows.reshape(piece.shape))
        for name, slot in slots.items():
            yield StateTensor(piece, name, slot.reshape(piece.shape))


@light_dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One step of a shard: tensors in `memory`, and the rest in `hidden`. Holds no model."""

    spec: ShardSpec
    rules: Sequence[UpdateRule]
    hidden: HiddenState
    memory: StateMemory

    def tensors(self) -> Iterator[StateTensor]:
        """Yields the tensors of the state; takes long for a large state."""
        return tensors_of(self.spec, self.rules, self.memory)


def rule_keys(layout: Layout) -> list[str]:
    """Returns the keys of the layout's optimizers, in their order; the model's own has an empty one."""
    return ["" if optimizer is None else optimizer.key for optimizer in layout.rules]


def _rule_key(piece: VariableSlice) -> str:
    return "" if piece.variable.optimizer is None else piece.variable.optimizer.key
