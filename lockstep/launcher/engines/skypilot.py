"""SkyPilot: a task runs its command on each node; that of the first one launches the cluster, and reaches the others by ssh."""

from collections.abc import Mapping
from dataclasses import replace

from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.hosts import parse_hosts
from ps_protocol.errors import InvalidSpec

KIND = EngineKind(program="ssh")


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the task that this process is part of, with a worker for each node. Raises InvalidSpec if there is none."""
    rank, addresses = environment.get("SKYPILOT_NODE_RANK"), environment.get("SKYPILOT_NODE_IPS", "").split()
    if rank is None or not addresses:
        raise InvalidSpec("--engine skypilot: this is no task of SkyPilot, in whose `run:` this command belongs")
    here, *others = parse_hosts(",".join(addresses))
    return Engine(hosts=(replace(here, reach=("sh", "-c")), *others), num_workers=len(addresses), is_launcher=rank == "0")
