"""Which shard holds which rows, decided once from the model alone: the same model and number of shards give the same answer everywhere."""

import itertools
import math
from collections.abc import Iterator

from ps_protocol.errors import InvalidSpec
from ps_protocol.layout import Layout, VariableSlice
from ps_protocol.model import ModelSpec, PlacedSlice, Placement, PlacementPolicy
from ps_protocol.tensors import VariableSpec
from ps_protocol.variable_options import Partition


def place(model: ModelSpec, *, num_shards: int) -> Placement:
    """Places every variable, cut as its partition says, or by rows where it is larger than the policy's threshold.

    "round_robin" deals the slices out in order. "greedy_bytes" gives each to the shard with the least load so far (ties: the lowest
    index), as the original's GreedyLoadBalancingStrategy does; a slice's load is its bytes, or its share of the load that the policy has
    for its variable. What is pinned lies where it is pinned, and counts as load from the beginning.
    """
    if num_shards < 1:
        raise InvalidSpec("there are no parameter servers to place variables on; give at least one")
    pins, loads = dict(model.placement.pins), dict(model.placement.loads)
    pieces = [piece for variable in model.variables for piece in _slices(variable, model.placement, num_shards)]
    totals = [0.0] * num_shards
    for piece in pieces:
        if (shard := pins.get(piece.variable.name)) is not None:
            _check_pin(piece.variable.name, shard, num_shards)
            totals[shard] += _load(piece, loads)
    placed, turn = [], itertools.cycle(range(num_shards))
    for piece in pieces:
        shard = pins.get(piece.variable.name)
        if shard is None:
            shard = next(turn) if model.placement.strategy == "round_robin" else totals.index(min(totals))
            totals[shard] += _load(piece, loads)
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


def _slices(variable: VariableSpec, policy: PlacementPolicy, num_shards: int) -> Iterator[VariableSlice]:
    partition = variable.partition or Partition(axis=0, num_slices=_num_pieces(variable, policy, num_shards))
    extent = variable.shape[partition.axis] if variable.shape else 1
    for start, stop in split_rows(extent, partition.num_slices):
        yield VariableSlice(variable=variable, start=start, stop=stop, axis=partition.axis)


def _num_pieces(variable: VariableSpec, policy: PlacementPolicy, num_shards: int) -> int:
    is_whole = variable.constraint is not None and variable.constraint.needs_whole_variable
    if not variable.shape or not policy.split_bytes or variable.nbytes <= policy.split_bytes or is_whole:
        return 1
    if any(name == variable.name for name, _ in policy.pins):  # asked last: with many variables there may be as many pins
        return 1
    # More pieces than shards would only lie side by side again.
    return max(1, min(math.ceil(variable.nbytes / policy.split_bytes), variable.num_rows, num_shards))


def _load(piece: VariableSlice, loads: dict[str, float]) -> float:
    load = loads.get(piece.variable.name)
    if load is None:
        return piece.nbytes
    return load * (piece.stop - piece.start) / piece.extent if piece.extent else load


def _check_pin(name: str, shard: int, num_shards: int) -> None:
    if shard >= num_shards:
        raise InvalidSpec(f"variable {name!r} is pinned to ps {shard}; there are {num_shards}, ps 0 to {num_shards - 1}")
