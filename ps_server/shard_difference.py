"""In which words one specification of a shard differs from another."""

from ps_protocol.layout import VariableSlice
from ps_protocol.shard import ShardSpec


def difference(mine: ShardSpec, theirs: ShardSpec) -> str:
    """Says in words where `theirs` differs from what stands; empty if it is the same again."""
    my_slices, their_slices = ((*spec.layout.slices, *spec.layout.tables) for spec in (mine, theirs))
    for old, new in zip(my_slices, their_slices, strict=False):
        if old != new:
            return f"{_described(old)} exists, asked for is {_described(new)}"
    if len(my_slices) != len(their_slices):
        return f"{len(my_slices)} slices exist, asked for are {len(their_slices)}"
    if mine.optimizer != theirs.optimizer:
        return f"the optimizer is {mine.optimizer}, asked for is {theirs.optimizer}"
    if mine.initial_step != theirs.initial_step:
        return f"the variables began at step {mine.initial_step}, asked for is {theirs.initial_step}"
    if mine.averages != theirs.averages:
        return f"the moving averages are {mine.averages or 'none'}, asked for are {theirs.averages or 'none'}"
    if mine.clip != theirs.clip:
        return f"the limits on the gradient are {mine.clip}, asked for are {theirs.clip}"
    return ""


def _described(piece: VariableSlice) -> str:
    variable = piece.variable
    rows = "" if piece.is_whole else f" rows {piece.start} to {piece.stop}"
    options = {
        "sparse": variable.is_sparse,
        f"optimizer {variable.optimizer}": variable.optimizer,
        f"initializer {variable.initializer}": variable.initializer,
        f"constraint {variable.constraint}": variable.constraint,
        f"mean {variable.sparse_mean.name}": variable.is_sparse,
        f"axis {piece.axis}": piece.axis,
    }
    words = "".join(f", {word}" for word, is_given in options.items() if is_given)
    return f"variable {variable.name!r} with shape {variable.shape} {variable.data_type.value}{rows}{words}"
