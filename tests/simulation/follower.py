"""A follower of the weights in a simulated cluster: what servers give it is right, bit by bit. Draws no number of the world's."""

import random
from collections.abc import Sequence

import numpy as np

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Layout
from ps_protocol.roles.fence import Era
from ps_protocol.roles.weights import FetchRequest
from ps_protocol.weights.copy import Transfer, WeightCopy
from ps_protocol.weights.words import Selection
from tests.simulation.oracle import BrokenPromise, Oracle
from tests.simulation.shard_node import ShardNode

# Of the looks at a cluster, so many are of a follower, so that it lags now and then by several steps.
_SHARE = 0.25


class SimulatedFollower:
    """Holds a copy of each server's variables, and brings it forward when it looks; its answers are lost now and then."""

    def __init__(self, seed: int, oracle: Oracle) -> None:
        self._chance, self._oracle = random.Random(f"follower {seed}"), oracle
        # By server: its copy, and the era and layout that it is of.
        self._copies: dict[str, tuple[tuple[object, str], WeightCopy]] = {}
        self.num_patches = 0

    def look(self, server: str, node: ShardNode, layouts: Sequence[Layout], *, index: int, era: Era) -> None:
        """Asks a living server for the newest weights, as one who is registered in an era. Raises BrokenPromise."""
        if self._chance.random() > _SHARE or index >= len(layouts):
            return
        try:
            layout = layouts[index]
            known = self._copies.get(server)
            is_same = known is not None and known[0] == (era, layout.hash)
            copy = known[1] if known is not None and is_same else WeightCopy(Selection(layout, FloatEncoding.AS_IS))
            transfer = Transfer(FetchRequest(era=era, layout_hash=layout.hash, held_step=copy.step))
            while not transfer.is_whole:
                transfer.take(node.shard.call(transfer.request))
        except PsError:
            return
        if self._chance.random() < 0.1:
            return  # the answer is lost
        update = copy.understood(transfer)
        if copy.put(update):
            raise BrokenPromise(f"2: a follower's copy of {server} is not what its digests say at step {update.step}")
        copy.keep(update)
        self._copies[server] = (era, layout.hash), copy
        self.num_patches += transfer.first.is_patch
        self._oracle.read((era.life, era.epoch), transfer.first.step, {index: copy.words.view(np.uint8)}, by="a follower")
