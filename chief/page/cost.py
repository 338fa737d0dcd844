"""The cost of training: processor time and bytes of all roles, since they began and in the last hour. Pure: no clock, no thread."""

from collections import deque
from collections.abc import Iterator, Mapping

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterStatus, ParticipantKind

HOUR_S = 3600.0
# The last hour is known to so many seconds.
_GRAIN_S = 60.0
# Counters of so many more processes are remembered than there are.
_MAX_GONE = 1_000
_ROLES = ("workers", "servers", "chief", "observers")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Processor time, and bytes of gradients and variables. `is_of_last_hour`: or else since the processes began.

    `cpu_s`: seconds by role, as people read them: of "workers", "servers" and the "chief", and of "observers" where there are any.
    `is_shared`: a participant reaches servers by shared memory, where nothing is sent and no byte is counted.
    """

    cpu_s: Mapping[str, float]
    is_of_last_hour: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    is_shared: bool = False


class CostCount:
    """Adds up what processes report, each of which counts from its own beginning. For one thread."""

    def __init__(self) -> None:
        self._heard: dict[tuple[object, ...], float] = {}
        self._totals: dict[str, float] = {}
        self._past: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, status: ClusterStatus, *, at: float) -> Cost:
        """Takes in a status, and returns the cost up to then."""
        now = dict(_counters(status))
        for key, number in now.items():
            before, what = self._heard.pop(key, 0.0), str(key[0])
            # One that has fallen is that of another process.
            self._totals[what] = self._totals.get(what, 0.0) + (number - before if number >= before else number)
            self._heard[key] = number
        # A worker that joins again has said nothing until its next heartbeat, and then continues where it was.
        while len(self._heard) > 2 * len(now) + _MAX_GONE:
            del self._heard[next(iter(self._heard))]
        if not self._past or at - self._past[-1][0] >= _GRAIN_S:
            self._past.append((at, dict(self._totals)))
        while len(self._past) > 1 and at - self._past[1][0] >= HOUR_S:
            self._past.popleft()
        since, base = self._past[0]
        is_of_last_hour = at - since >= HOUR_S
        spent = {what: total - base.get(what, 0.0) if is_of_last_hour else total for what, total in self._totals.items()}
        return Cost(
            cpu_s={role: spent.get(role, 0.0) for role in _ROLES if role in spent or role != "observers"},
            is_of_last_hour=is_of_last_hour,
            sent_bytes=int(spent.get("sent", 0.0)),
            received_bytes=int(spent.get("received", 0.0)),
            is_shared=any("shared_memory" in one.transport for one in status.participants),
        )


def _counters(status: ClusterStatus) -> Iterator[tuple[tuple[object, ...], float]]:
    """Yields what is counted: what it adds to, by whom, and how much. Participants in one process report the same processor time."""
    yield ("chief",), status.chief_cpu_s
    for shard in status.shards:
        if shard.report is not None:
            yield ("servers", shard.index), shard.report.cpu_s
    working = {(one.host, one.pid) for one in status.participants if one.kind is ParticipantKind.WORKER}
    for one in status.participants:
        if one.traffic is None:
            continue
        # A worker's process is a worker's, whatever else looks on from there.
        role = "workers" if (one.host, one.pid) in working else "observers"
        yield (role, one.host, one.pid), one.traffic.cpu_s
        yield ("sent", one.host, one.pid, one.kind, one.index), one.traffic.sent_bytes
        yield ("received", one.host, one.pid, one.kind, one.index), one.traffic.received_bytes
