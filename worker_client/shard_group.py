"""The model's shards, spoken to all at once. Knows shards and the memory that is sent and filled; no chief and no tokens."""

import threading
from collections.abc import Callable
from typing import TypeVar

from ps_protocol import retry
from ps_protocol.chief import ModelReply, Registration
from ps_protocol.errors import StepGone
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.shard import PushHeader, PushId, PushResult, Shard, ShardSpec
from worker_client.bounded import run_bounded
from worker_client.cluster_link import ClusterLink
from worker_client.fan_out import FanOut
from worker_client.model_memory import ModelMemory

Result = TypeVar("Result")

# A transfer gets this much longer than a call without a payload, so that a large model needs no larger timeout.
SLOWEST_BYTES_PER_S = 10e6
CLOSE_WAIT_S = 0.25


class ShardGroup:
    """All shards, by index. Every call goes to all of them in parallel and repeats what ends as Unavailable, within the link's timeout.

    The errors of several shards end as the error of the first of them, after all calls have ended. For one thread.
    """

    def __init__(self, link: ClusterLink, registration: Registration) -> None:
        self._link = link
        self._timeout_s = link.timeout_s
        self._epoch = registration.participant.epoch
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

    def create(self, values: ModelMemory, *, optimizer: OptimizerSpec, reply: ModelReply) -> None:
        """Creates the variables with their initial values, also on shards that hold none of them: all must step along."""

        def create(index: int, shard: Shard, timeout_s: float) -> bool:
            spec = ShardSpec(
                epoch=self._epoch,
                shard=index,
                layout=values.layouts[index],
                optimizer=optimizer,
                initial_step=reply.global_step,
                attempt=reply.attempt,
                max_staged_per_worker=reply.max_staged_per_worker,
            )
            return shard.create_variables(spec, values.segments[index], timeout_s=timeout_s)

        self._on_all("create the variables", create, memory=values)

    def read(self, into: ModelMemory, *, step: int) -> None:
        """Fills the memory with the variables of one step. Raises StepGone, StepNotReady; what the memory holds is then undefined."""

        def read(index: int, shard: Shard, timeout_s: float) -> None:
            segments = into.segments[index]
            if segments.nbytes:
                shard.read_variables(segments, epoch=self._epoch, step=step, layout_hash=into.layouts[index].hash, timeout_s=timeout_s)

        self._on_all(f"read step {step}", read, memory=into)

    def push(self, gradients: ModelMemory, *, push_id: PushId, step: int) -> bool:
        """Stages a contribution on every shard; False if one has dropped it as stale. Idempotent per id."""

        def push(index: int, shard: Shard, timeout_s: float) -> PushResult:
            header = PushHeader(epoch=self._epoch, push_id=push_id, step=step, layout_hash=gradients.layouts[index].hash)
            return shard.push_gradients(header, gradients.segments[index], timeout_s=timeout_s).result

        return PushResult.STALE not in self._on_all(f"push to step {step}", push, memory=gradients)

    def read_slot(self, slot: str, into: ModelMemory, *, variable: str) -> int:
        """Fills the memory with one slot, as far as shards hold rows of `variable`, and returns its step. Raises SlotNotFound, StepGone."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            layout = into.layouts[index]
            if all(piece.variable.name != variable for piece in layout.slices):
                return None
            return shard.read_slot(slot, into.segments[index], epoch=self._epoch, layout_hash=layout.hash, timeout_s=timeout_s)

        steps = {step for step in self._on_all(f"read slot {slot!r}", read, memory=into) if step is not None}
        if len(steps) > 1:
            raise StepGone(f"slot {slot!r} was read at steps {sorted(steps)} of several shards; read it again")
        return steps.pop()

    def slot_names(self) -> list[str]:
        """Returns the names of the optimizer's slots, sorted."""
        names = self._call(0, "list the slots", lambda _: self._shards[0].list_slots(epoch=self._epoch))
        return list(names)

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._closed.set()
        self._fan_out.close()
        # A channel closes only when its last write has left, and a server that is stopped does not take it.
        run_bounded([shard.close for shard in self._shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def _on_all(self, what: str, call: Callable[[int, Shard, float], Result], *, memory: ModelMemory) -> list[Result]:
        def calling(index: int, shard: Shard) -> Callable[[], Result]:
            transfer_s = memory.segments[index].nbytes / SLOWEST_BYTES_PER_S
            return lambda: self._call(index, what, lambda left_s: call(index, shard, left_s), transfer_s=transfer_s)

        return self._fan_out.run([calling(index, shard) for index, shard in enumerate(self._shards)])

    def _call(self, index: int, what: str, call: Callable[[float], Result], *, transfer_s: float = 0.0) -> Result:
        subject = f"ps {index} at {self._addresses[index]}: {what}"
        with self._link.watching(subject, expected_s=transfer_s):
            return retry.call(call, what=subject, timeout_s=self._timeout_s + transfer_s, stop=self._closed)
