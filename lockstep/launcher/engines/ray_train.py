"""Ray Train: its workers are ranks, of whose places their trainer tells each one."""

import os
from collections.abc import Mapping

from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.engines.ranks import Ranks
from ps_protocol.errors import InvalidSpec

KIND = EngineKind(module="ray", starts_workers=True)
# The number of a rank, and the address of each rank's node.
WORKERS_VARIABLE = "LOCKSTEP_RAY_TRAIN"


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the run that this process is a rank of. Raises InvalidSpec if there is none."""
    return ranks_of(environment).as_engine()


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """Returns the ranks of a run, as the one of these variables sees them. Raises InvalidSpec if it is none."""
    if WORKERS_VARIABLE not in environment:
        raise InvalidSpec("--engine ray_train: this is no worker of Ray Train, whose trainers have lockstep.ray_train.LockstepConfig")
    rank, *places = environment[WORKERS_VARIABLE].split()
    here = places[int(rank)]
    return Ranks(
        engine="ray_train",
        rank=int(rank),
        num_workers=len(places),
        num_here=places.count(here),
        near=(here, 1),
        owner=os.getpid(),
    )
