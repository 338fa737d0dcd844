"""All that a shard's next steps depend on, tensors and numbers, as a checkpoint has it. Knows layouts; no model, file or lock."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ps_protocol.model.keys import ROWS_PART
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import HiddenState, ShardSpec
from ps_server.numbers.apply import averaged_slices
from ps_server.optimizers.rule import UpdateRule

# The name of the moving averages in a file; no slot of an optimizer has this name.
AVERAGE_PART = "average"


@light_dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One slice's values (`part` empty), one of its slots, its average, or its keys: a view of the memory, in the slice's shape.

    That of a keyed table has as many rows as there are.
    """

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
    """The memories of one step: arenas of values, slots and averages, and each table's rows, slots and keys by their names in a file.

    Where a table has a part with the numbers of rows (ROWS_PART), the others have only those.
    """

    values: Array
    slots: Mapping[str, Array]
    average: Array | None
    tables: Sequence[Mapping[str, Array]]

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in a fixed order."""
        averages = [] if self.average is None else [self.average]
        tables = [memory for parts in self.tables for memory in parts.values()]
        return [self.values, *self.slots.values(), *averages, *tables]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(memory.nbytes for memory in self.arrays)

    @property
    def lacks_rows(self) -> bool:
        """Whether some table does not have all of its rows."""
        return any(ROWS_PART in parts for parts in self.tables)


def memory_like(state: StateMemory, allocate: Callable[[int], Array]) -> StateMemory:
    """Returns memories of the same sizes, with the contents that `allocate` gives so many bytes."""
    pieces = iter([allocate(memory.nbytes).view(memory.dtype).reshape(memory.shape) for memory in state.arrays])
    return StateMemory(
        values=next(pieces),
        slots={name: next(pieces) for name in state.slots},
        average=None if state.average is None else next(pieces),
        tables=[{name: next(pieces) for name in parts} for parts in state.tables],
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
    for piece, parts in zip(layout.tables, memory.tables, strict=True):
        for name, part in parts.items():
            yield StateTensor(piece, name, part if part.ndim == 1 else part.reshape(len(part), *piece.variable.shape[1:]))


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
