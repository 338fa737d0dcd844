"""The cluster at a moment, with what follows from the moments before. Pure: a value."""

from collections.abc import Mapping

from chief.page.cost import Cost
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterState, ClusterStatus


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The cluster at one moment, and what follows from the looks before it.

    `steps_per_s` None: not known yet. By worker: `contributions_per_s`, `read_s` (how long it takes to read the variables, in the mean),
    `num_last` (how many of the latest steps it completed).
    """

    number: int
    at: float
    wall: float
    status: ClusterStatus
    cost: Cost
    steps_per_s: float | None
    contributions_per_s: Mapping[int, float]
    read_s: Mapping[int, float]
    num_last: Mapping[int, int]


def eta_s(look: Look) -> float | None:
    """Returns how long training takes at the present speed; None: that is not known, for example while training waits."""
    status, speed = look.status, look.steps_per_s
    if status.state is not ClusterState.TRAINING or status.waiting_for or status.max_steps is None or not speed or speed <= 0.0:
        return None
    return max(0, status.max_steps - status.global_step) / speed
