"""What workers have reported as metrics, read from where it is kept. Knows a parameter server's address; nothing of a page."""

import contextlib
from collections.abc import Sequence

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterStatus
from ps_protocol.roles.shard import MetricCell
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.shard import GrpcShard


class MetricsReader:
    """Reads what workers have reported, where it is kept: at the first parameter server. For one thread."""

    def __init__(self, access: Access, *, cluster: str) -> None:
        self._access, self._cluster = access, cluster
        self._shard: GrpcShard | None = None

    def read(self, status: ClusterStatus) -> Sequence[MetricCell]:
        """Returns the metrics. Raises PsError."""
        first = status.shards[0]
        if self._shard is None or self._shard.address != first.address:
            self.close()
            self._shard = GrpcShard(first.address, index=0, cluster=self._cluster, access=self._access)
        try:
            return self._shard.read_metrics(epoch=status.epoch)
        except PsError:
            # Another process may be there next time.
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        shard, self._shard = self._shard, None
        if shard is not None:
            with contextlib.suppress(PsError):
                shard.close()
