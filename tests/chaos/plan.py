"""The plan of a chaos test: the cluster that it starts. Knows no process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access

# Steps of a training that is ended by order.
ENDLESS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to start. `checkpoint_steps` and `durability` None: no checkpoints. `failpoints`: by process name, of its first life only."""

    num_ps: int = 2
    num_workers: int = 3
    num_steps: int = 40
    pace_s: float = 0.03
    lease_s: float = 3.0
    checkpoint_steps: int | None = 5
    durability: str | None = "interval"
    failpoints: Mapping[str, str] | None = None
    transport: str = "auto"
    history: bool = False
    has_proxies: bool = False
    has_standbys: bool = False  # "standby 0" beside "ps 0", and so on
    lonely: tuple[str, int] | None = None  # a worker's name and a server's index: the path between the two has conditions of its own
    chief_flags: Sequence[str] = ()
    worker_flags: Mapping[int, Sequence[str]] | None = None
    wrapper: Mapping[str, Sequence[str]] | None = None  # by process name: what `python -m` runs instead, before the module's name
    port: int | None = None  # the chief's on loopback, the servers' are the next ones; None: Unix sockets
    environment: Mapping[str, Mapping[str, str]] | None = None  # by role: "ps", "chief", "worker"
    access: Access = DEFAULT_ACCESS  # how the test itself calls the chief
