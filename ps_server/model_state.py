"""The tensors of a shard's state, taken from a model, copied, given to another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.shard import ShardSpec
from ps_protocol.tensors import Array
from ps_server.averages import averaged_slices
from ps_server.hidden_state import HiddenState
from ps_server.shard_model import ShardModel
from ps_server.update_rule import UpdateRule

# What the moving averages are called in a file; no slot of an optimizer has this name.
AVERAGE_PART = "average"


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One slice's values (`part` empty), or one of its slots, or its average: a view of the memory, in the slice's shape."""

    piece: VariableSlice
    part: str
    memory: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateMemory:
    """The memories of one step: arenas of values, slots and averages, and each table's rows and slots."""

    values: Array
    slots: Mapping[str, Array]
    average: Array | None
    tables: Sequence[tuple[Array, Mapping[str, Array]]]

    @property
    def arrays(self) -> list[Array]:
        """All of them, in a fixed order."""
        averages = [] if self.average is None else [self.average]
        tables = [memory for rows, slots in self.tables for memory in (rows, *slots.values())]
        return [self.values, *self.slots.values(), *averages, *tables]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(memory.nbytes for memory in self.arrays)


def memory_of(model: ShardModel, *, values: Array) -> StateMemory:
    """Returns a model's memories; `values` is the one of its two arenas that is meant."""
    tables = [model.tables.table(position) for position in range(len(model.tables))]
    return StateMemory(
        values=values,
        slots=model.arena.slots,
        average=model.arena.average,
        tables=[(table.values, table.slots) for table in tables],
    )


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
    """Yields what stands for the state: for each slice its values, the slots that its optimizer has, and its average if it has one."""
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


def hidden_state_of(model: ShardModel, *, step: int) -> HiddenState:
    """Returns what a model's next steps depend on besides tensors; `step` is the one that it is saved as."""
    return HiddenState(
        step=step,
        powers=dict(zip(rule_keys(model.spec.layout), (rule.powers for rule in model.settings.rules), strict=True)),
        average_product=model.fused.average_product(model.step),
        num_nonfinite=model.num_nonfinite,
        metrics=tuple(model.metrics.cells()),
        pushes=model.applied.lately(),
    )


def resume(model: ShardModel, state: HiddenState) -> None:
    """Lets a new model, whose tensors have been filled, go on from there. Raises InvalidSpec, LimitExceeded if it is not its state."""
    for key, rule in zip(rule_keys(model.spec.layout), model.settings.rules, strict=True):
        rule.resume(state.powers.get(key, rule.powers))
    model.fused.resume_averages(state.average_product)
    model.metrics.resume(state.metrics)
    model.applied.resume(state.pushes)
    model.num_nonfinite = state.num_nonfinite


def rule_keys(layout: Layout) -> list[str]:
    """Returns the keys of the layout's optimizers, in their order; the model's own has an empty one."""
    return ["" if optimizer is None else optimizer.key for optimizer in layout.rules]


def _rule_key(piece: VariableSlice) -> str:
    return "" if piece.variable.optimizer is None else piece.variable.optimizer.key
