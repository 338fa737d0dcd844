"""torchrun: its ranks share a store that it serves at MASTER_PORT, and it may start them again, also in another number."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lockstep.launcher.engines import ranks
from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.engines.ranks import Ranks
from ps_protocol.errors import InvalidSpec

KIND = EngineKind(program="torchrun", module="torch", starts_workers=True)
_ANSWER_S = 60.0


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the run that this process is a rank of. Raises InvalidSpec if there is none."""
    return _ranks(environment).as_engine()


def _ranks(environment: Mapping[str, str]) -> Ranks:
    if "TORCHELASTIC_RUN_ID" not in environment:
        raise InvalidSpec("--engine torchrun: this is no worker of torchrun, whose programs call lockstep.connect() alone")
    return Ranks(
        engine="torchrun",
        rank=int(environment["RANK"]),
        num_workers=int(environment["WORLD_SIZE"]),
        num_here=int(environment["LOCAL_WORLD_SIZE"]),
        near=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
        owner=os.getppid(),  # which may start rank 0 again
    )


def join(environment: Mapping[str, str]) -> dict[str, str]:
    """Does what `ranks.join` says."""
    found = _ranks(environment)
    return ranks.join(found, _store(found, environment), environment)


def _store(found: Ranks, environment: Mapping[str, str]) -> Any:
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise InvalidSpec("torchrun keeps its store to itself here; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or set LOCKSTEP_CHIEF")
    from torch.distributed import PrefixStore, TCPStore

    address, port = found.near
    return PrefixStore("lockstep", TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S)))
