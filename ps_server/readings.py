"""How each reading begins: of the variables, a slot, or rows."""

from ps_protocol.shard import RowsRequest
from ps_server.shard_model import ShardModel
from ps_server.transactions import Reading, RowReading
from ps_server.turns import Turns


def begin_variables(model: ShardModel, turns: Turns, *, step: int | None) -> Reading:
    """Begins to read the variables of `step` (None: the latest); raises StepGone or StepNotReady."""
    buffer = model.buffer(step)
    version, found, is_torn_allowed = buffer.version, buffer.step, model.settings.current.applies_on_arrival
    assert found is not None
    return Reading(
        buffer.memory,
        layout=model.spec.layout,
        step=found,
        is_intact=lambda: is_torn_allowed or buffer.version == version,
        hold=turns.reading,
        name="the copy of the variables",
    )


def begin_slot(model: ShardModel, turns: Turns, *, name: str) -> Reading:
    """Begins to read one slot of the dense variables; no step may be under way. Raises SlotNotFound."""
    arena, version, is_torn_allowed = model.arena, model.arena.slots_version, model.settings.current.applies_on_arrival
    return Reading(
        model.slot(name),
        layout=model.spec.layout,
        step=model.step,
        is_intact=lambda: is_torn_allowed or arena.slots_version == version,
        hold=turns.reading,
        name=f"slot {name!r}",
    )


def begin_rows(model: ShardModel, turns: Turns, request: RowsRequest) -> RowReading:
    """Begins to read rows of a table, or of a slot of it while no step is under way. Raises what `ShardModel.step_of_rows` raises."""
    step, arena, version = model.step_of_rows(request), model.arena, model.arena.slots_version
    is_torn_allowed = model.settings.current.applies_on_arrival
    return RowReading(
        model.tables.table(request.table),
        slot=model.tables.slot(request.table, request.slot) if request.slot else None,
        step=step,
        is_torn_allowed=is_torn_allowed,
        is_intact=lambda: is_torn_allowed or arena.slots_version == version,
        hold=turns.reading(step),
    )
