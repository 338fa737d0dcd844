"""Where variables shall lie, as a program says it. Knows strategies, pins and loads; the decision is `ps_protocol.placement`'s."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model import DEFAULT_SPLIT_BYTES, PlacementPolicy
from ps_protocol.tensors import VariableSpec
from worker_client.schedules import plain_number


@dataclass(frozen=True, slots=True)
class Placement:
    """How variables are spread over parameter servers.

    `strategy`: "greedy_bytes" (each to the shard with the least load so far) or "round_robin" (dealt out in order). `pins`: name to the
    shard where that variable lies, whatever the strategy. `load`: what "greedy_bytes" balances, as a function of a variable's
    `VariableSpec` (name, shape, data_type, nbytes …); None: its bytes. A variable of more than `split_bytes` bytes and without a
    partitioner of its own is split along axis 0 (0: never). Raises InvalidSpec where it is used.
    """

    strategy: str = "greedy_bytes"
    _: KW_ONLY
    pins: Mapping[str, int] = field(default_factory=dict)
    load: Callable[[VariableSpec], float] | None = None
    split_bytes: int = DEFAULT_SPLIT_BYTES

    def policy_for(self, variables: Iterable[VariableSpec]) -> PlacementPolicy:
        """Returns the policy that all participants agree on: the loads are numbers by then."""
        if self.load is not None and not callable(self.load):
            raise InvalidSpec(f"placement: load = {self.load!r}, want a function of a variable's specification, or None for its bytes")
        if not isinstance(self.pins, Mapping):
            raise InvalidSpec(f"placement: pins = {self.pins!r}, want a dict from variable name to the index of a ps")
        loads = () if self.load is None else tuple((spec.name, _load(self.load(spec))) for spec in variables)
        pins = tuple((name, shard.item() if isinstance(shard, np.integer) else shard) for name, shard in self.pins.items())
        return PlacementPolicy(strategy=self.strategy, split_bytes=self.split_bytes, loads=loads, pins=pins)


def _load(load: float) -> float:
    load = plain_number(load)
    return float(load) if type(load) is int else load  # anything else is checked with its variable's name


def placement_of(placement: "str | Placement", *, split_bytes: int | None) -> Placement:
    """Returns the placement that the arguments of `create_or_join` mean. Raises InvalidSpec."""
    if isinstance(placement, Placement):
        if split_bytes is not None:
            raise InvalidSpec("split_bytes: the placement has it already; write Placement(…, split_bytes=…)")
        return placement
    return Placement(placement, split_bytes=DEFAULT_SPLIT_BYTES if split_bytes is None else split_bytes)
