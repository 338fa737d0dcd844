"""All workers of a test behind one Shard, each of which shares the server's memory on its own, as soon as it pushes. Asserts nothing."""

import threading

from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import ForwardingShard, PushHeader, PushReply, ShardSpec
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.shared_memory.worker import MemoryNotShared, SharedMemoryShard, share_memory


class SharingWorkers(ForwardingShard):
    """Implements Shard. A worker that cannot share goes by gRPC, as it would in a session; its connection is its own."""

    def __init__(self, shard: GrpcShard) -> None:
        super().__init__(shard)
        self.shard = shard
        self.of: dict[tuple[int, int], SharedMemoryShard] = {}
        self._layout: Layout | None = None
        self._lock = threading.Lock()

    def worker(self, index: int, *, incarnation: int, epoch: int) -> SharedMemoryShard | GrpcShard:
        """The shard as one incarnation of a worker has it."""
        with self._lock:
            return self._worker_locked(index, incarnation, epoch)

    def _worker_locked(self, index: int, incarnation: int, epoch: int) -> SharedMemoryShard | GrpcShard:
        key = index, incarnation
        if key not in self.of or not self.of[key].is_shared:
            if self._layout is None:
                return self.shard
            own = GrpcShard(self.shard.address)
            try:
                self.of[key] = share_memory(own, epoch=epoch, worker=index, incarnation=incarnation, layout=self._layout, num_slots=1)
            except MemoryNotShared:
                own.close()
                return self.shard
            except BaseException:
                own.close()
                raise
        return self.of[key]

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables."""
        is_created = self.shard.create_variables(spec, values, timeout_s=timeout_s)
        self._layout = spec.layout
        return is_created

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Pushes as the worker in the header."""
        if self._layout is None or header.layout_hash != self._layout.hash:
            return self.shard.push_gradients(header, gradients, timeout_s=timeout_s)
        shard = self.worker(header.push_id.worker, incarnation=header.push_id.incarnation, epoch=header.epoch)
        return shard.push_gradients(header, gradients, timeout_s=timeout_s)

    def read_variables(
        self,
        into: Segments,
        *,
        epoch: int,
        step: int | None,
        layout_hash: str,
        held_step: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Reads as the first worker that shares."""
        return self._reader.read_variables(into, epoch=epoch, step=step, layout_hash=layout_hash, held_step=held_step, timeout_s=timeout_s)

    def expect_variables(self, *, epoch: int, step: int, layout_hash: str) -> None:
        """As the first worker that shares."""
        self._reader.expect_variables(epoch=epoch, step=step, layout_hash=layout_hash)

    def variables_view(self, *, epoch: int, step: int, layout_hash: str) -> Array | None:
        """As the first worker that shares."""
        return self._reader.variables_view(epoch=epoch, step=step, layout_hash=layout_hash)

    def gradient_memory(self) -> Array | None:
        """As the first worker that shares."""
        return self._reader.gradient_memory()

    def close(self) -> None:
        """Ends all sharing."""
        for shard in self.of.values():
            shard.close()

    @property
    def _reader(self) -> SharedMemoryShard | GrpcShard:
        return next(iter(self.of.values()), self.shard)
