"""The plan of a chaos test: the cluster that it starts. Knows no process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.cluster import processes

# Steps of a training that is ended by order.
ENDLESS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(processes.Plan):
    """What to start: three workers that contribute by the script, with a pause of `pace_s` before each step."""

    is_warm: bool = False  # what is measured, and the memory that is taken away, are those of processes as users start them
    program: Sequence[str] = ("-m", "tests.chaos.worker")
    num_ps: int = 2
    num_workers: int = 3
    max_steps: int = 40
    pace_s: float = 0.03
    lease_s: float = 3.0
    checkpoint_steps: int | None = 5
    durability: str | None = "interval"
    has_proxies: bool = False
    lonely: tuple[str, int] | None = None  # a worker's name and a server's index: the path between the two has conditions of its own
    worker_flags: Mapping[int, Sequence[str]] | None = None
