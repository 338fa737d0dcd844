"""Judges whether the workers that are left can make another step. Knows the chief's reports; no clock, process or wire."""

from collections.abc import Mapping

from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind

# Some may only be at their last lines, or about to join: as long as this nothing is made of it.
GRACE_S = 5.0


class Standstill:
    """Is shown one report after the other."""

    def __init__(self) -> None:
        self._step = -1
        self._since: float | None = None

    def see(self, status: ClusterStatus, *, now: float, gone_s: Mapping[int, float]) -> bool:
        """Whether no step can have been made for `GRACE_S`; `gone_s` says how long ago the processes of which workers ended."""
        if not cannot_step(status, gone_s=gone_s):
            self._since = None
            return False
        if self._since is None or status.global_step != self._step:
            self._step, self._since = status.global_step, now
        return now - self._since >= GRACE_S


def cannot_step(status: ClusterStatus, *, gone_s: Mapping[int, float]) -> bool:
    """Whether a worker waits for a step that those who might still contribute to it are too few for."""
    if status.state is not ClusterState.TRAINING:
        return False
    # One whose process has ended lives on for the chief until its lease ends, unless another process took its place since.
    live = [
        one
        for one in status.participants
        if one.kind is ParticipantKind.WORKER and one.state == "live" and one.seen_ago_s < gone_s.get(one.index, float("inf"))
    ]
    num_waiting = sum(one.is_waiting for one in live)
    return num_waiting > 0 and status.num_contributions + len(live) - num_waiting < status.replicas_to_aggregate
