"""The model's shards, spoken to all at once: push, read, create, shared memory. Knows shards and memory; no chief and no tokens."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ps_protocol.errors import PsError, StepGone, StepNotReady, Unavailable
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.process import waiting
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.chief import ModelReply, Participant, Registration
from ps_protocol.roles.shard import Metric, MetricCell, PushHeader, PushId, PushResult, RowsRequest, Shard, ShardSpec
from worker_client.cluster.chief import ClusterLink, MemorySharing, SharingShard
from worker_client.cluster.threads import FanOut, run_bounded
from worker_client.model.gradients import ShardPart
from worker_client.model.memory import ModelMemory, with_tables
from worker_client.shards.standbys import ReplicatedShard, ShardPlaces, know_layouts

# How calls reach a model's shards: all at once, repeated while a server does not answer. Knows connections; no memory and no model.


Result = TypeVar("Result")

# A transfer gets this much longer than a call without a payload, so that a large model needs no larger timeout.
SLOWEST_BYTES_PER_S = 10e6
CLOSE_WAIT_S = 0.25


class ShardCalls:
    """Connections to all shards, by index, opened when it is made. The errors of several shards end as that of the first of them.

    `shards`: what each is called by, its owner's to replace. `ask_again` tells where shards are that have standbys. For one thread.
    """

    def __init__(self, link: ClusterLink, registration: Registration, *, ask_again: Callable[[int], Registration] | None) -> None:
        self._link = link
        # Where the shards are, if they have standbys: then that changes, and `ask_again` tells where to.
        self._places = ShardPlaces(registration, ask_again=ask_again) if registration.shards_version and ask_again is not None else None
        self._timeout_s = link.timeout_s
        self.addresses = registration.shard_addresses
        name = f"lockstep-{registration.participant.index}-ps"
        self._fan_out = FanOut(len(self.addresses), name=name, is_parallel=not link.is_in_process)
        self._closed = threading.Event()
        self.shards: list[Shard] = []
        try:
            self._open(link)
        except BaseException:
            self._fan_out.close()
            raise

    def _open(self, link: ClusterLink) -> None:
        def opening(index: int, address: str) -> Callable[[], Shard]:
            if (places := self._places) is not None:
                return lambda: ReplicatedShard(index, places, open_replica=link.open_replica or link.open_shard)
            return lambda: link.open_shard(index, address)

        opened = self._fan_out.run([opening(index, address) for index, address in enumerate(self.addresses)])
        self.shards = [shard for shard in opened if shard is not None]

    def hear(self) -> None:
        """Asks the chief where the shards are now, if they have standbys."""
        if self._places is not None:
            self._places.hear(self._places.version, is_urgent=True)

    def each(self, what: str, call: Callable[[int, Shard, float], Result], *, num_bytes: Sequence[int] | None = None) -> list[Result]:
        """Returns the results of `call(index, shard, timeout_s)` for all shards at once; `num_bytes` is what each transfers."""
        results = self.some(what, call, range(len(self.addresses)), num_bytes=num_bytes)
        return [results[index] for index in range(len(self.addresses))]

    def some(
        self, what: str, call: Callable[[int, Shard, float], Result], indices: Collection[int], *, num_bytes: Sequence[int] | None = None
    ) -> dict[int, Result]:
        """Does the same for some of them; returns the results by index."""
        if len(self.addresses) == 1:
            return {0: self._at(0, what, call, num_bytes)} if indices else {}
        calls = [partial(self._at, index, what, call, num_bytes) if index in indices else None for index in range(len(self.addresses))]
        results = self._fan_out.run(calls)
        return {index: results[index] for index in indices}  # type: ignore[misc]  # those have a call

    def one(self, index: int, what: str, call: Callable[[float], Result], *, transfer_s: float = 0.0) -> Result:
        """Returns `call(timeout_s)`, a call of one shard; `transfer_s`: how much longer it may take for what it transfers."""
        address = self.addresses[index] if self._places is None else self._places.addresses(index)[0]
        subject = f"ps {index} at {address}: {what}"
        with self._link.watching(subject, expected_s=transfer_s):
            return waiting.call(call, what=subject, timeout_s=self._timeout_s + transfer_s, stop=self._closed)

    def _at(self, index: int, what: str, call: Callable[[int, Shard, float], Result], num_bytes: Sequence[int] | None) -> Result:
        transfer_s = num_bytes[index] / SLOWEST_BYTES_PER_S if num_bytes else 0.0
        return self.one(index, what, partial(call, index, self.shards[index]), transfer_s=transfer_s)

    def give_up(self) -> None:
        """Has all calls end as Cancelled, also one that hangs at a server that is gone. May come from any thread."""
        self._closed.set()
        run_bounded([shard.close for shard in self.shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._closed.set()
        self._fan_out.close()
        if self._places is not None:
            self._places.close()
        # A channel closes only when its last write has left, and a server that is stopped does not take it.
        run_bounded([shard.close for shard in self.shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)


# Those of a model's shards that share memory with the worker: their arenas, with no call to anybody. Knows shards and arenas; no steps.


log = logging.getLogger("lockstep.worker")

# How long a shard may take to share its memory again, while its worker waits.
_SHARE_AGAIN_S = 1.0
# A shard that does not want to share is not asked with every step.
_LOOK_AGAIN_S = 5.0


class SharedMemories:
    """The shards that share memory, by index, of so many in all. For one thread."""

    def __init__(self, shards: Mapping[int, SharingShard], *, epoch: int, num_shards: int) -> None:
        self.shards = dict(shards)
        self._epoch = epoch
        self._num_shards = num_shards
        self._next_look_s = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of them still share."""
        return all(shard.is_shared for shard in self.shards.values())

    def share_again(
        self, sharing: MemorySharing, layouts: Sequence[Layout], *, participant: Participant, now: float
    ) -> Mapping[int, SharingShard]:
        """Asks those that do not share any more, as when they have stood still, and returns those that do again; asks only now and then."""
        found: dict[int, SharingShard] = {}
        if now < self._next_look_s:
            return found
        self._next_look_s = now + _LOOK_AGAIN_S
        for index, lost in self.shards.items():
            if not lost.is_shared:
                with suppress(PsError):
                    shard = sharing(
                        lost.unshared, where=f"ps {index}", participant=participant, layout=layouts[index], timeout_s=_SHARE_AGAIN_S
                    )
                    if shard is not None:
                        found[index] = shard
                        log.info("ps %d: memory is shared again", index)
        self.shards |= found
        return found

    def travels(self, index: int) -> bool:
        """Whether what a shard is to have is sent to it; not where memory is shared."""
        return index not in self.shards or not self.shards[index].is_shared

    def variables(self, layouts: Sequence[Layout], *, step: int) -> Sequence[Array | None]:
        """Returns each shard's arena of a step where the shard has it, None from one that copies; nothing if all do.

        Raises StepGone, StepNotReady.
        """
        if not self.shards:
            return ()
        arenas: list[Array | None] = [None] * self._num_shards
        for index, shard in self.shards.items():
            if layouts[index].nbytes:
                try:
                    arenas[index] = shard.variables_view(epoch=self._epoch, step=step, layout_hash=layouts[index].hash)
                except Unavailable:
                    continue  # who reads it then tries again and again
        return arenas if any(arena is not None for arena in arenas) else ()

    def gradients(self) -> Sequence[Array | None]:
        """Returns an arena of each shard to write gradients into, None from one that copies; nothing if all do. Raises TooManyPushes."""
        return self._arenas({index: shard.gradient_memory() for index, shard in self.shards.items()})

    def kept(self) -> Sequence[Array | None]:
        """Returns as `gradients` does arenas that are the same each time. Raises TooManyPushes while one of them is under way."""
        return self._arenas({index: shard.kept_memory() for index, shard in self.shards.items()})

    def _arenas(self, found: Mapping[int, Array | None]) -> Sequence[Array | None]:
        return [found.get(index) for index in range(self._num_shards)] if found else ()


# The model's shards, spoken to all at once. Knows shards and the memory that is sent and filled; no chief and no tokens.


# How often shards that have moved on are read again, to get one step from all of them.
MAX_ALIGNMENTS = 8
# Readings of the newest variables before it is said that steps pass faster than they can be read.
MAX_NEWEST_ATTEMPTS = 20
# What is copied from shared memory in the caller's own thread.
MAX_NEAR_BYTES = 1 << 20


class ShardGroup:
    """All shards, by index. Every call goes to all of them in parallel and repeats what ends as Unavailable, within the link's timeout.

    The errors of several shards end as the error of the first of them, after all calls have ended. For one thread.
    """

    def __init__(self, link: ClusterLink, registration: Registration, *, ask_again: Callable[[int], Registration] | None = None) -> None:
        self._link = link
        self._calls = ShardCalls(link, registration, ask_again=ask_again)
        # What each is called by; one that shares memory takes the place of the one before.
        self._shards = self._calls.shards
        self._timeout_s = link.timeout_s
        self.epoch = registration.participant.epoch
        self.participant = registration.participant
        self._transports_at_end: tuple[str, ...] = ()
        self.memories = SharedMemories({}, epoch=self.epoch, num_shards=len(self))

    def __len__(self) -> int:
        return len(self._calls.addresses)

    @property
    def transports(self) -> tuple[str, ...]:
        """How the dense variables and gradients of each shard travel: "shared_memory" (not at all), "grpc", or "local"."""
        plain = "local" if self._link.is_in_process else "grpc"
        found = tuple(plain if self.memories.travels(index) else "shared_memory" for index in range(len(self)))
        return self._transports_at_end or found

    def know(self, layouts: Sequence[Layout]) -> None:
        """Tells the clients of the shards how the variables lie; only then these can travel encoded."""
        know_layouts(self._shards, layouts, self._link.know_layout)

    def hear(self) -> None:
        """Asks the chief where the shards are now, if they have standbys."""
        self._calls.hear()

    def share(self, layouts: Sequence[Layout]) -> None:
        """Shares memory with those shards that it can be shared with, once the variables stand. See `MemorySharing` for errors."""
        self.know(layouts)
        sharing = self._link.sharing
        if sharing is None:
            return

        def shared(index: int, shard: Shard, timeout_s: float) -> SharingShard | None:
            where = f"ps {index} at {self._calls.addresses[index]}"
            return sharing(shard, where=where, participant=self.participant, layout=layouts[index], timeout_s=timeout_s)

        wanted = [index for index, layout in enumerate(layouts) if layout.nbytes or not layout.tables]
        found = self._calls.some("share memory", shared, wanted)
        sharing_shards = {index: shard for index, shard in found.items() if shard is not None}
        for index, shard in sharing_shards.items():
            self._shards[index] = shard
        self.memories = SharedMemories(sharing_shards, epoch=self.epoch, num_shards=len(self))

    def _share_again(self, layouts: Sequence[Layout]) -> None:
        if not self.memories.is_whole and self._link.sharing is not None:
            found = self.memories.share_again(self._link.sharing, layouts, participant=self.participant, now=time.monotonic())
            for index, shard in found.items():
                self._shards[index] = shard

    def expect(self, layouts: Sequence[Layout], *, step: int) -> None:
        """Tells the shards that variables travel from that this step will be read."""
        for index, layout in enumerate(layouts):
            if layout.nbytes and self.memories.travels(index):
                self._share_again(layouts)
                self._shards[index].expect_variables(epoch=self.epoch, step=step, layout_hash=layout.hash)

    def create(self, values: ModelMemory, *, tables: Mapping[str, Array], model: ModelSpec, reply: ModelReply) -> None:
        """Creates the variables with their initial values, also on shards that hold none of them: all must step along.

        `tables`: the first values of those tables that have no initializer.
        """
        contents = [with_tables(values, index, tables) for index in range(len(self))]

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

        self._calls.each("create the variables", create, num_bytes=[content.nbytes for content in contents])

    def read(self, into: ModelMemory, *, step: int) -> None:
        """Fills the memory with the variables of one step, but for what lies where shards have it. Raises StepGone, StepNotReady.

        What the memory holds is then undefined.
        """
        self._read(into, step, [index for index, segments in enumerate(into.segments) if segments.nbytes and not into.is_lent(index)])
        into.unpack()

    def read_latest(self, into: ModelMemory, *, is_aligned: bool, held: Sequence[int | None] = ()) -> dict[int, int]:
        """Fills the memory with the newest variables, of one step on all shards if `is_aligned` and that can be had by a few tries.

        `held`: the step of each shard's part of the memory, which is not moved again if it is the newest still. Returns the steps by shard.
        """
        if self.memories.shards:
            self._share_again(into.layouts)
        holders = [index for index, segments in enumerate(into.segments) if segments.nbytes]
        found = self._read(into, None, holders, held=held)
        for _ in range(MAX_ALIGNMENTS if is_aligned else 0):
            if len(set(found.values())) <= 1:
                break
            # Shards keep the step before as well, so those that have gone ahead can be read again at the step of the others.
            step = min(found.values())
            ahead = [index for index, its_step in found.items() if its_step > step]
            try:
                found |= self._read(into, step, ahead)
            except (StepGone, StepNotReady):
                found = self._read(into, None, holders)
        into.unpack()
        return found

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

        def header(index: int) -> PushHeader:
            part = parts[index]
            return PushHeader(
                epoch=self.epoch,
                push_id=push_id,
                step=step,
                layout_hash=layout_hashes[index],
                life=self.participant.life,
                sparse=part.sparse,
                absent=part.absent,
                metrics={} if index else metrics,
                refused=refused,
                encoding=part.encoding,
                encoded_bytes=part.encoded_bytes,
            )

        if self._link.history is not None:
            for index, part in enumerate(parts):
                self._link.note_contribution(header(index), part.segments, shard=index)

        def push(index: int, shard: Shard, timeout_s: float) -> PushResult:
            if index:
                failpoint("worker.push.mid")
            return shard.push_gradients(header(index), parts[index].segments, timeout_s=timeout_s).result

        results: dict[int, PushResult] = {}
        for index, shard in self.memories.shards.items():
            # What lies in shared memory needs nobody else, so a thread of its own would cost more than it.
            if index:
                failpoint("worker.push.mid")
            reply = shard.push_locally(header(index), parts[index].segments)
            if reply is not None:
                results[index] = reply.result
        missing = [index for index in range(len(self)) if index not in results] if results else range(len(self))
        if missing:
            results |= self._calls.some(f"push to step {step}", push, missing, num_bytes=[part.segments.nbytes for part in parts])
        return [results[index] for index in range(len(self))]

    def read_slot(self, slot: str, into: ModelMemory, *, names: frozenset[str]) -> set[int]:
        """Fills the memory with one slot, as far as shards hold slices of the named variables, and returns their steps."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            layout = into.layouts[index]
            if all(piece.variable.name not in names for piece in layout.slices):
                return None
            return shard.read_slot(slot, into.segments[index], epoch=self.epoch, layout_hash=layout.hash, timeout_s=timeout_s)

        steps = self._calls.each(f"read slot {slot!r}", read, num_bytes=[segments.nbytes for segments in into.segments])
        into.unpack()
        return {step for step in steps if step is not None}

    def while_holding(self, index: int, request: RowsRequest, row: Array, into: Segments, do: Callable[[int], None]) -> None:
        """Reads one row from a shard and calls `do(its step)` meanwhile: where steps wait for readers, that step is kept so long."""
        self._calls.one(
            index, "read a row", lambda left_s: self._shards[index].read_rows(request, row, into, timeout_s=left_s, meanwhile=do)
        )

    def slot_names(self) -> list[str]:
        """Returns the names of the slots of all optimizers, sorted."""
        names = self._calls.each("list the slots", lambda _, shard, __: shard.list_slots(epoch=self.epoch))
        return sorted({name for shard_names in names for name in shard_names})

    def metrics(self) -> Sequence[MetricCell]:
        """Returns what workers have reported."""
        return self._calls.one(0, "read the metrics", lambda _: self._shards[0].read_metrics(epoch=self.epoch))

    def give_up(self) -> None:
        """Has all calls end as Cancelled, also one that hangs at a server that is gone. May come from any thread."""
        self._calls.give_up()

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._transports_at_end = self.transports
        self._calls.close()

    def each(self, what: str, call: Callable[[int, Shard, float], Result], *, num_bytes: Sequence[int] | None = None) -> list[Result]:
        """Returns the results of `call(index, shard, timeout_s)` for all shards at once; `num_bytes` is what each transfers."""
        return self._calls.each(what, call, num_bytes=num_bytes)

    def _read(self, into: ModelMemory, step: int | None, indices: Collection[int], *, held: Sequence[int | None] = ()) -> dict[int, int]:
        if not indices:
            return {}

        def read_once(index: int, shard: Shard, timeout_s: float) -> int:
            return shard.read_variables(
                into.segments[index],
                epoch=self.epoch,
                step=step,
                layout_hash=into.layouts[index].hash,
                held_step=held[index] if held else None,
                timeout_s=timeout_s,
            )

        read = _until_it_stands(read_once) if step is None else read_once

        # Copied in this thread where that is sooner done than said to another.
        found: dict[int, int] = {}
        for index in self.memories.shards:
            if index in indices and into.segments[index].nbytes <= MAX_NEAR_BYTES and not self.memories.travels(index):
                with suppress(Unavailable):  # then tried again and again below
                    found[index] = read(index, self._shards[index], self._timeout_s)
        far = [index for index in indices if index not in found] if found else indices
        what = "read the newest variables" if step is None else f"read step {step}"
        return found | self._calls.some(what, read, far, num_bytes=[segments.nbytes for segments in into.segments]) if far else found


def _until_it_stands(read: Callable[[int, Shard, float], int]) -> Callable[[int, Shard, float], int]:
    """Reads again where the newest variables were overwritten in the middle: there are newer ones then."""

    def again(index: int, shard: Shard, timeout_s: float) -> int:
        for _ in range(MAX_NEWEST_ATTEMPTS - 1):
            try:
                return read(index, shard, timeout_s)
            except StepGone:
                continue
        return read(index, shard, timeout_s)

    return again
