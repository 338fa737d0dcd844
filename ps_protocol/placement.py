"""Which shard holds which rows, decided once from sizes alone: the same model and number of shards give the same answer everywhere."""

import itertools
import math
from collections.abc import Iterator

from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.model import ModelSpec, PlacedSlice, Placement
from ps_protocol.tensors import VariableSpec


def place(model: ModelSpec, *, num_shards: int) -> Placement:
    """Places every variable, split where it is larger than the policy's threshold.

    "round_robin" deals the slices out in order. "greedy_bytes" gives each to the shard with the fewest bytes so far (ties: the lowest
    index), as the original's GreedyLoadBalancingStrategy with byte_size_load_fn does.
    """
    if num_shards < 1:
        raise InvalidSpec("there are no parameter servers to place variables on; give at least one")
    loads = [0] * num_shards
    placed = []
    for index, piece in enumerate(_slices(model, num_shards)):
        shard = index % num_shards if model.placement.strategy == "round_robin" else loads.index(min(loads))
        loads[shard] += piece.nbytes
        placed.append(PlacedSlice(slice=piece, shard=shard))
    return tuple(placed)


def split_rows(num_rows: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cuts `num_rows` into `num_pieces` runs; the first `num_rows % num_pieces` have one row more."""
    size, rest = divmod(num_rows, num_pieces)
    bounds = [index * size + min(index, rest) for index in range(num_pieces + 1)]
    return list(itertools.pairwise(bounds))


def layouts(placement: Placement, *, num_shards: int) -> tuple[Layout, ...]:
    """Returns the layout of each shard; one without variables has an empty layout."""
    slices: list[list[VariableSlice]] = [[] for _ in range(num_shards)]
    for placed in placement:
        slices[placed.shard].append(placed.slice)
    return tuple(Layout(pieces) for pieces in slices)


def _slices(model: ModelSpec, num_shards: int) -> Iterator[VariableSlice]:
    for variable in model.variables:
        for start, stop in split_rows(variable.num_rows, _num_pieces(variable, model.placement.split_bytes, num_shards)):
            yield VariableSlice(variable=variable, start=start, stop=stop)


def _num_pieces(variable: VariableSpec, split_bytes: int, num_shards: int) -> int:
    if not variable.shape or not split_bytes or variable.nbytes <= split_bytes:
        return 1
    # More pieces than shards would only lie side by side again.
    return max(1, min(math.ceil(variable.nbytes / split_bytes), variable.num_rows, num_shards))
