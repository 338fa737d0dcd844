"""What a participant has exchanged with the parameter servers. Knows numbers; no shard and no call."""

from ps_protocol.roles.chief import WorkerTraffic


class TrafficCount:
    """Counts while the session lasts. For one thread that adds; any thread may ask for the report."""

    __slots__ = ("num_reads", "reading_s", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.num_reads = 0
        self.reading_s = 0.0

    def report(self) -> WorkerTraffic:
        """Returns the counts of now."""
        return WorkerTraffic(
            sent_bytes=self.sent_bytes, received_bytes=self.received_bytes, num_reads=self.num_reads, reading_s=self.reading_s
        )
