"""What a server keeps for its chief, and knows of it: a record for the successor, its address, when it was heard."""

from ps_protocol.errors import LimitExceeded
from ps_server.memory import MemoryBudget

# As much as one message can carry, with room for what stands beside it.
MAX_RECORD_BYTES = 12 << 20


class ChiefNotes:
    """Notes of one server. The caller serialises the calls, and has checked that they are the chief's; `now` is monotonic, in seconds."""

    def __init__(self, *, budget: MemoryBudget) -> None:
        self.address = ""
        # Of several replicas of the shard, the chief counts on this one alone.
        self.is_alone = False
        self.record = b""
        self.record_version = 0
        self._budget = budget
        self._heard_at: float | None = None

    def heard(self, now: float) -> None:
        """The chief has called."""
        self._heard_at = now

    def heard_ago_s(self, now: float) -> float | None:
        """Returns how long ago the chief was heard; None: never."""
        return None if self._heard_at is None else max(0.0, now - self._heard_at)

    def keep(self, record: bytes, *, version: int) -> None:
        """Keeps a record, unless there is one of this version or a later one. Raises LimitExceeded."""
        if version <= self.record_version:
            return
        if len(record) > MAX_RECORD_BYTES:
            raise LimitExceeded(f"record: {len(record)} bytes, {MAX_RECORD_BYTES} at most; use fewer variables, or shorter names")
        self._budget.reserve(len(record), purpose="the chief's record")
        self._budget.release(len(self.record))
        self.record, self.record_version = record, version
