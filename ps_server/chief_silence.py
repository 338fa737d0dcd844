"""Since when no chief has been heard, and when that is to be said."""

import math

FIRST_WARNING_S = 10.0
WARNING_INTERVAL_S = 60.0
# A chief looks at its shards about every second; more often there is nothing to be learnt.
LOOK_INTERVAL_S = 1.0
# A look this late means that the process itself stood still; what the chief sent meanwhile is heard first.
_LATE_S = 5.0


class ChiefSilence:
    """Counts from `now`. Any thread may call `heard`; `look` belongs to one, which calls it every LOOK_INTERVAL_S."""

    def __init__(self, *, now: float) -> None:
        self._started_at = self._heard_at = self._looked_at = now
        self._warned_at = -math.inf

    def heard(self, now: float) -> None:
        """A chief has called."""
        self._heard_at = now

    def look(self, now: float, *, is_adopted: bool, address: str) -> str:
        """Returns the warning that is due, in words; empty if there is none."""
        if now - self._looked_at > _LATE_S:
            self._heard_at = now
        self._looked_at = now
        # Who calls without adopting (a chief that waits for another shard, an operator) does not make this shard anybody's.
        since = self._heard_at if is_adopted else self._started_at
        due = since + FIRST_WARNING_S if since > self._warned_at else self._warned_at + WARNING_INTERVAL_S
        if now < due:
            return ""
        self._warned_at = now
        silence = f"{now - since:.0f} s"
        if is_adopted:
            consequence = "if it is gone, start it again, here or elsewhere: training then goes on at its step"
            return f"the chief has been silent for {silence}; {consequence}"
        return f"no chief has adopted this parameter server for {silence}; is the chief started with --ps naming {address}?"
