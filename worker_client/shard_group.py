"""The model's shards, spoken to all at once. Knows shards and the memory that is sent and filled; no chief and no tokens."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ps_protocol import retry
from ps_protocol.chief import ModelReply, Registration
from ps_protocol.errors import StepGone, StepNotReady
from ps_protocol.model import ModelSpec
from ps_protocol.segments import Segments
from ps_protocol.shard import Metric, MetricCell, PushHeader, PushId, PushResult, RowsRequest, Shard, ShardSpec
from ps_protocol.tensors import Array
from worker_client.bounded import run_bounded
from worker_client.cluster_link import ClusterLink
from worker_client.fan_out import FanOut
from worker_client.model_memory import ModelMemory
from worker_client.outgoing import ShardPart

Result = TypeVar("Result")

# A transfer gets this much longer than a call without a payload, so that a large model needs no larger timeout.
SLOWEST_BYTES_PER_S = 10e6
CLOSE_WAIT_S = 0.25
# How often shards that have moved on are read again, to get one step from all of them.
MAX_ALIGNMENTS = 8


class ShardGroup:
    """All shards, by index. Every call goes to all of them in parallel and repeats what ends as Unavailable, within the link's timeout.

    The errors of several shards end as the error of the first of them, after all calls have ended. For one thread.
    """

    def __init__(self, link: ClusterLink, registration: Registration) -> None:
        self._link = link
        self._timeout_s = link.timeout_s
        self.epoch = registration.participant.epoch
        self._addresses = registration.shard_addresses
        name = f"lockstep-{registration.participant.index}-ps"
        self._fan_out = FanOut(len(self._addresses), name=name, is_parallel=not link.is_in_process)
        self._closed = threading.Event()
        self._shards: list[Shard] = []
        try:
            self._open(link)
        except BaseException:
            self._fan_out.close()
            raise

    def _open(self, link: ClusterLink) -> None:
        def opening(index: int, address: str) -> Callable[[], Shard]:
            return lambda: link.open_shard(index, address)

        self._shards = self._fan_out.run([opening(index, address) for index, address in enumerate(self._addresses)])

    def __len__(self) -> int:
        return len(self._addresses)

    def create(self, values: ModelMemory, *, tables: Mapping[str, Array], model: ModelSpec, reply: ModelReply) -> None:
        """Creates the variables with their initial values, also on shards that hold none of them: all must step along.

        `tables`: the first values of those tables that have no initializer.
        """
        contents = [_with_tables(values, index, tables) for index in range(len(self))]

        def create(index: int, shard: Shard, timeout_s: float) -> bool:
            spec = ShardSpec(
                epoch=self.epoch,
                shard=index,
                layout=values.layouts[index],
                optimizer=model.optimizer,
                initial_step=reply.global_step,
                attempt=reply.attempt,
                max_staged_per_worker=reply.max_staged_per_worker,
                averages=model.averages,
                clip=model.clip,
            )
            return shard.create_variables(spec, contents[index], timeout_s=timeout_s)

        self.each("create the variables", create, num_bytes=[content.nbytes for content in contents])

    def read(self, into: ModelMemory, *, step: int) -> None:
        """Fills the memory with the variables of one step. Raises StepGone, StepNotReady; what the memory holds is then undefined."""
        self._read(into, [step] * len(self), range(len(self)))
        into.unpack()

    def read_latest(self, into: ModelMemory, *, is_aligned: bool) -> int | None:
        """Fills the memory with the newest variables, of one step on all shards if `is_aligned` and that can be had by a few tries.

        Returns their step, the least of all shards'; None if nothing lies on any shard.
        """
        found: dict[int, int] = self._read(into, [None] * len(self), range(len(self)))
        for _ in range(MAX_ALIGNMENTS if is_aligned else 0):
            if len(set(found.values())) <= 1:
                break
            # Shards keep the step before as well, so those that have gone ahead can be read again at the step of the others.
            step = min(found.values())
            ahead = [index for index, its_step in found.items() if its_step > step]
            try:
                found |= self._read(into, [step] * len(self), ahead)
            except (StepGone, StepNotReady):
                found = self._read(into, [None] * len(self), range(len(self)))
        into.unpack()
        return min(found.values(), default=None)

    def push(
        self,
        parts: Sequence[ShardPart],
        *,
        layout_hashes: Sequence[str],
        push_id: PushId,
        step: int,
        metrics: Mapping[str, Metric],
        refused: tuple[int, ...],
    ) -> list[PushResult]:
        """Gives every shard its part of a contribution, and returns what became of each. Idempotent per id."""

        def push(index: int, shard: Shard, timeout_s: float) -> PushResult:
            part = parts[index]
            header = PushHeader(
                epoch=self.epoch,
                push_id=push_id,
                step=step,
                layout_hash=layout_hashes[index],
                sparse=part.sparse,
                absent=part.absent,
                metrics={} if index else metrics,
                refused=refused,
            )
            return shard.push_gradients(header, part.segments, timeout_s=timeout_s).result

        return self.each(f"push to step {step}", push, num_bytes=[part.segments.nbytes for part in parts])

    def read_slot(self, slot: str, into: ModelMemory, *, names: frozenset[str]) -> set[int]:
        """Fills the memory with one slot, as far as shards hold slices of the named variables, and returns their steps."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            layout = into.layouts[index]
            if all(piece.variable.name not in names for piece in layout.slices):
                return None
            return shard.read_slot(slot, into.segments[index], epoch=self.epoch, layout_hash=layout.hash, timeout_s=timeout_s)

        steps = self.each(f"read slot {slot!r}", read, num_bytes=[segments.nbytes for segments in into.segments])
        into.unpack()
        return {step for step in steps if step is not None}

    def while_holding(self, index: int, request: RowsRequest, row: Array, into: Segments, do: Callable[[int], None]) -> None:
        """Reads one row from a shard and calls `do(its step)` meanwhile: where steps wait for readers, that step is kept so long."""
        self._call(index, "read a row", lambda left_s: self._shards[index].read_rows(request, row, into, timeout_s=left_s, meanwhile=do))

    def slot_names(self) -> list[str]:
        """Returns the names of the slots of all optimizers, sorted."""
        names = self.each("list the slots", lambda _, shard, __: shard.list_slots(epoch=self.epoch))
        return sorted({name for shard_names in names for name in shard_names})

    def metrics(self) -> Sequence[MetricCell]:
        """Returns what workers have reported."""
        return self._call(0, "read the metrics", lambda _: self._shards[0].read_metrics(epoch=self.epoch))

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._closed.set()
        self._fan_out.close()
        # A channel closes only when its last write has left, and a server that is stopped does not take it.
        run_bounded([shard.close for shard in self._shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def each(self, what: str, call: Callable[[int, Shard, float], Result], *, num_bytes: Sequence[int] | None = None) -> list[Result]:
        """Returns the results of `call(index, shard, timeout_s)` for all shards at once; `num_bytes` is what each transfers."""

        def calling(index: int, shard: Shard) -> Callable[[], Result]:
            transfer_s = num_bytes[index] / SLOWEST_BYTES_PER_S if num_bytes else 0.0
            return lambda: self._call(index, what, lambda left_s: call(index, shard, left_s), transfer_s=transfer_s)

        return self._fan_out.run([calling(index, shard) for index, shard in enumerate(self._shards)])

    def _read(self, into: ModelMemory, steps: Sequence[int | None], indices: Sequence[int]) -> dict[int, int]:
        wanted = frozenset(index for index in indices if into.segments[index].nbytes)

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            if index not in wanted:
                return None
            layout_hash = into.layouts[index].hash
            return shard.read_variables(
                into.segments[index], epoch=self.epoch, step=steps[index], layout_hash=layout_hash, timeout_s=timeout_s
            )

        what = "read the newest variables" if steps[0] is None else f"read step {steps[0]}"
        found = self.each(what, read, num_bytes=[segments.nbytes for segments in into.segments])
        return {index: step for index, step in enumerate(found) if step is not None}

    def _call(self, index: int, what: str, call: Callable[[float], Result], *, transfer_s: float = 0.0) -> Result:
        subject = f"ps {index} at {self._addresses[index]}: {what}"
        with self._link.watching(subject, expected_s=transfer_s):
            return retry.call(call, what=subject, timeout_s=self._timeout_s + transfer_s, stop=self._closed)


def _with_tables(values: ModelMemory, index: int, tables: Mapping[str, Array]) -> Segments:
    sent = [piece for piece in values.layouts[index].tables if piece.variable.initializer is None]
    rows = [tables[piece.variable.name][piece.start : piece.stop].reshape(-1).view(np.uint8) for piece in sent]
    return values.segments[index].followed_by([piece for piece in rows if piece.nbytes])
