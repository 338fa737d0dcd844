"""The model's shards, spoken to all at once: push, read, create, shared memory. Knows shards and memory; no chief and no tokens."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from ps_protocol.errors import EpochMismatch, PsError, ShuttingDown, StepGone, StepNotReady, Unavailable
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.process import waiting
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.chief import FollowerReport, ModelReply, Registration, WorkerTraffic
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.history import contributed
from ps_protocol.roles.shard import (
    Metric,
    MetricCell,
    PushHeader,
    PushResult,
    ReadMetricsRequest,
    ReadRequest,
    RowsRequest,
    Shard,
    ShardSpec,
    ShardStatusRequest,
    creation_words,
    held_bytes,
)
from ps_protocol.rpc.memory import SharedMemory
from worker_client.cluster.threads import FanOut, run_bounded
from worker_client.cluster.transport import Transport
from worker_client.model.gradients import ShardPart
from worker_client.model.memory import ModelMemory, with_tables
from worker_client.shards.standbys import ReplicatedShard, ShardPlaces

log = logging.getLogger("lockstep.worker")

Result = TypeVar("Result")

# A transfer gets this much longer than a call without a payload, so that a large model needs no larger timeout.
SLOWEST_BYTES_PER_S = 10e6
CLOSE_WAIT_S = 0.25
# How often shards that have moved on are read again, to get one step from all of them.
MAX_ALIGNMENTS = 8
# Reads of the newest variables before an error says that steps pass faster than they can be read.
MAX_NEWEST_ATTEMPTS = 20
# The most bytes that the caller's own thread copies from shared memory.
MAX_NEAR_BYTES = 1 << 20
# How long a shard may take to share its memory again, while its worker waits.
_SHARE_AGAIN_S = 1.0
# How often a worker looks how far the creation of a large model is, and says so: before a shard that is at work would be called silent.
CREATION_LOOK_S, CREATION_NOTICE_S = 0.5, 2.0
# A shard that does not want to share is not asked with every step.
_LOOK_AGAIN_S = 5.0


class SharedMemories:
    """The memories that shards share, by index (`of`); `shards` are all of them. For one thread."""

    def __init__(self, of: Mapping[int, SharedMemory], shards: Sequence[Shard], *, epoch: int) -> None:
        self.of = dict(of)
        self._shards = shards
        self._epoch = epoch

    @property
    def lost(self) -> list[int]:
        """The shards that have shared memory, and do so no more."""
        return [index for index, memory in self.of.items() if not memory.is_open]

    def travels(self, index: int) -> bool:
        """Whether data for a shard is sent to it; not if memory is shared."""
        memory = self.of.get(index)
        return memory is None or not memory.is_open

    def variables(self, layouts: Sequence[Layout], *, step: int) -> Sequence[Array | None]:
        """Returns each shard's arena of a step where the shard has it, None from one that copies; nothing if all do.

        Raises StepGone, StepNotReady.
        """
        if not self.of:
            return ()
        arenas: list[Array | None] = [None] * len(self._shards)
        has_some = False
        for index, memory in self.of.items():
            if layouts[index].nbytes:
                request = ReadRequest(epoch=self._epoch, step=step, layout_hash=layouts[index].hash)
                try:
                    arenas[index] = arena = memory.view(request, ask=self._shards[index].read)
                except (Unavailable, ShuttingDown):
                    continue  # the reader then repeats its attempt
                has_some = has_some or arena is not None
        return arenas if has_some else ()

    def gradients(self) -> Sequence[Array | None]:
        """Returns an arena of each shard to write gradients into, None from one that copies; nothing if all do. Raises TooManyPushes."""
        return self._of_each(SharedMemory.gradients)

    def kept(self) -> Sequence[Array | None]:
        """Returns as `gradients` does arenas that are the same each time. Raises TooManyPushes while one of them is under way."""
        return self._of_each(SharedMemory.kept)

    def _of_each(self, give: Callable[[SharedMemory], Array | None]) -> Sequence[Array | None]:
        return [give(self.of[index]) if index in self.of else None for index in range(len(self._shards))] if self.of else ()


class TrafficCount:
    """Counts what a session exchanges with its parameter servers. One thread adds; any thread may ask for the report.

    The report has the processor time of the process, too.
    """

    __slots__ = ("follower", "num_reads", "reading_s", "received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.num_reads = 0
        self.reading_s = 0.0
        self.follower: FollowerReport | None = None

    def report(self) -> WorkerTraffic:
        """Returns the counts of now."""
        return WorkerTraffic(
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            num_reads=self.num_reads,
            reading_s=self.reading_s,
            cpu_s=time.process_time(),
            follower=self.follower,
        )


class Shards:
    """All shards, by index, to which it opens connections when it is made. Every call goes to all of them at once and repeats what ends as
    Unavailable, within the transport's `timeout_s`.

    The errors of several shards end as the error of the first of them, after all calls have ended. `traffic` counts the bytes that travel.
    `ask_again` returns the addresses of shards that have standbys. For one thread.
    """

    def __init__(
        self,
        transport: Transport,
        registration: Registration,
        *,
        traffic: TrafficCount,
        ask_again: Callable[[int], Registration] | None = None,
    ) -> None:
        self.participant = registration.participant
        self.epoch = registration.participant.era.epoch
        self._transport, self._traffic = transport, traffic
        # A server that was asked to end has a successor soon; in one process there is none.
        self._retried = (Unavailable,) if transport.is_in_process else (Unavailable, ShuttingDown)
        # The addresses of the shards if they have standbys: these change, and `ask_again` returns the new ones.
        self._places = ShardPlaces(registration, ask_again=ask_again) if registration.shards_version and ask_again is not None else None
        self._addresses = registration.shard_addresses
        name = f"lockstep-{registration.participant.index}-ps"
        self._fan_out = FanOut(len(self._addresses), name=name, is_parallel=not transport.is_in_process)
        self._closed = threading.Event()
        self._shards: list[Shard] = []
        self._transports_at_end: tuple[str, ...] = ()
        try:
            opened = self._fan_out.run([partial(self._open, index, address) for index, address in enumerate(self._addresses)])
        except BaseException:
            self._fan_out.close()
            raise
        self._shards = [shard for shard in opened if shard is not None]
        self.memories = SharedMemories({}, self._shards, epoch=self.epoch)
        self._next_look_s = 0.0

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def transports(self) -> tuple[str, ...]:
        """How the dense variables and gradients of each shard travel, as `Shard.transport` says it."""
        return self._transports_at_end or tuple(shard.transport for shard in self._shards)

    def know_layouts(self, layouts: Sequence[Layout]) -> None:
        """Notes how the variables lie; only then they can travel encoded."""
        for shard, layout in zip(self._shards, layouts, strict=True):
            shard.know_layout(layout)

    def hear(self) -> None:
        """Asks the chief where the shards are now, if they have standbys."""
        if self._places is not None:
            self._places.hear(self._places.version, is_urgent=True)

    def share(self, layouts: Sequence[Layout]) -> None:
        """Shares memory with the shards that allow it, once the variables exist. See `Transport.share` for errors."""
        self.know_layouts(layouts)
        if self._transport.is_in_process:
            return

        def share(index: int, shard: Shard, timeout_s: float) -> SharedMemory | None:
            return self._share(index, layouts[index], where=f"ps {index} at {self._addresses[index]}", timeout_s=timeout_s)

        found = self._call("share memory", share, [index for index, layout in enumerate(layouts) if layout.nbytes or not layout.tables])
        shared = {index: memory for index, memory in found.items() if memory is not None}
        self.memories = SharedMemories(shared, self._shards, epoch=self.epoch)

    def expect(self, memory: ModelMemory, *, step: int, among: Collection[int] | None, held: Sequence[int | None]) -> None:
        """Tells those of these shards (None: all) that variables travel from that this step will be read into the memory."""
        layouts = memory.layouts
        for index, layout in enumerate(layouts):
            if (among is None or index in among) and layout.nbytes and self.memories.travels(index):
                self._share_again(layouts)
                held_step = _held(memory, index, held)
                self._shards[index].expect(ReadRequest(epoch=self.epoch, step=step, layout_hash=layout.hash, held_step=held_step))

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

        with self._telling_how_far(values.layouts):
            self.each("create the variables", create, num_bytes=[held_bytes(layout) for layout in values.layouts])

    @contextmanager
    def _telling_how_far(self, layouts: Sequence[Layout]) -> Iterator[None]:
        """Logs now and then, from another thread, what each shard does with its first values, and how far it is."""
        is_over = threading.Event()

        def tell() -> None:
            next_notice_s = time.monotonic() + CREATION_NOTICE_S
            while not is_over.wait(CREATION_LOOK_S):
                with suppress(PsError):  # the creation itself ends with the error
                    created = []
                    for index, shard in enumerate(self._shards):
                        created.append(shard.call(ShardStatusRequest()).report.created_bytes)
                        # Who answers is neither gone nor stopped, however slowly its values come.
                        self._transport.moved(index)
                    if any(created) and time.monotonic() >= next_notice_s and not is_over.is_set():
                        next_notice_s += CREATION_NOTICE_S
                        said = [creation_words(layout, now) for layout, now in zip(layouts, created, strict=True)]
                        parts = [f"ps {index} {words}: {100 * part:.0f} %" for index, (words, part) in enumerate(said) if created[index]]
                        log.warning("creating the model: %s", ", ".join(parts))

        if not self._transport.is_in_process:
            threading.Thread(target=tell, name="lockstep-creating", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def read(self, into: ModelMemory, *, step: int, among: Collection[int] | None = None, held: Sequence[int | None] = ()) -> None:
        """Fills the memory with the variables of one step, but for what lies where shards have it. Raises StepGone, StepNotReady.

        The content of the memory is then undefined. `among`: of these shards only. `held`: the step of each shard's part of the memory.
        """
        arenas = into.arenas
        missing = [
            index
            for index, segments in enumerate(into.segments)
            if segments.nbytes and arenas[index] is None and (among is None or index in among)
        ]
        if missing:
            self._read(into, step, missing, held=held)
        into.unpack()

    def read_latest(self, into: ModelMemory, *, is_aligned: bool, held: Sequence[int | None] = ()) -> dict[int, int]:
        """Fills the memory with the newest variables, of one step on all shards if `is_aligned` and that can be had by a few tries.

        `held`: the step of each shard's part of the memory, which is not moved again if it is the newest still. Returns the steps by shard.
        """
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
        """Gives every shard its part of a contribution, and returns the outcome of each. Idempotent per id."""
        # Asked again with the same header, a shard goes on where the contribution broke off.
        headers = [
            PushHeader(
                era=self.participant.era,
                push_id=push_id,
                step=step,
                layout_hash=layout_hashes[index],
                sparse=part.sparse,
                absent=part.absent,
                metrics={} if index else metrics,
                refused=refused,
                encoding=part.encoding,
                encoded_bytes=part.encoded_bytes,
                formulas=part.formulas,
                secret=self.participant.secret,
            )
            for index, part in enumerate(parts)
        ]

        if (history := self._transport.history) is not None:
            for index, part in enumerate(parts):
                history.write(contributed(headers[index], shard=index), part.segments.pieces)

        def push(index: int, shard: Shard, timeout_s: float) -> PushResult:
            if index:
                failpoint("worker.push.mid")
            return shard.push_gradients(headers[index], parts[index].segments, timeout_s=timeout_s).result

        results: dict[int, PushResult] = {}
        for index, memory in self.memories.of.items():
            # Shared memory needs no call, so a separate thread would cost more than the work.
            if index:
                failpoint("worker.push.mid")
            reply = memory.push(headers[index], parts[index].segments)
            if reply is not None:
                results[index] = reply.result
        if len(results) < len(parts):
            missing = [index for index in range(len(parts)) if index not in results] if results else range(len(parts))
            what, num_bytes = f"push to step {step}", [part.segments.nbytes for part in parts]
            for index in missing:
                in_place = 0 if self.memories.travels(index) else self.memories.of[index].arena_bytes
                self._traffic.sent_bytes += max(0, num_bytes[index] - in_place)
            if len(parts) == 1:
                # As `_one` does it, by a frame less: it is the way of every step.
                subject, transfer_s = self._subject(0, what), num_bytes[0] / SLOWEST_BYTES_PER_S
                with self._transport.watching(subject, expected_s=transfer_s, shard=0):
                    limit_s, stood_still = self._transport.timeout_s + transfer_s, self._transport.stood_still
                    attempt = partial(push, 0, self._shards[0])
                    retried, closed = self._retried, self._closed
                    return [waiting.call(attempt, what=subject, timeout_s=limit_s, stop=closed, stood_still=stood_still, retried=retried)]
            results |= self._call(what, push, missing, num_bytes=num_bytes)
        return [results[index] for index in range(len(parts))]

    def read_slot(self, slot: str, into: ModelMemory, *, names: frozenset[str]) -> set[int]:
        """Fills the memory with one slot, as far as shards hold slices of the named variables, and returns their steps."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            layout = into.layouts[index]
            if all(piece.variable.name not in names for piece in layout.slices):
                return None
            request = ReadRequest(epoch=self.epoch, layout_hash=layout.hash, slot=slot)
            return shard.read(request, into.segments[index], timeout_s=timeout_s)

        steps = self.each(f"read slot {slot!r}", read, num_bytes=[segments.nbytes for segments in into.segments])
        into.unpack()
        return {step for step in steps if step is not None}

    def while_holding(self, index: int, request: RowsRequest, row: Array, into: Segments, do: Callable[[int], None]) -> None:
        """Reads one row from a shard and calls `do(its step)` meanwhile: where steps wait for readers, that step is kept so long."""
        self._one(index, "read a row", lambda left_s: self._shards[index].read_rows(request, row, into, timeout_s=left_s, meanwhile=do))

    def slot_names(self) -> list[str]:
        """Returns the names of the slots of all optimizers, sorted."""

        def names(index: int, shard: Shard, timeout_s: float) -> tuple[str, ...]:
            status = shard.call(ShardStatusRequest())
            if status.fence.epoch != self.epoch:
                raise EpochMismatch(f"ps {index}: cluster epoch is {status.fence.epoch}, you have epoch {self.epoch}")
            return status.slots

        return sorted({name for shard_names in self.each("list the slots", names) for name in shard_names})

    def metrics(self) -> Sequence[MetricCell]:
        """Returns the metrics that workers have reported."""
        return self._one(0, "read the metrics", lambda _: self._shards[0].call(ReadMetricsRequest(epoch=self.epoch)))

    def each(self, what: str, call: Callable[[int, Shard, float], Result], *, num_bytes: Sequence[int] | None = None) -> list[Result]:
        """Returns the results of `call(index, shard, timeout_s)` for all shards at once; `num_bytes` is what each transfers."""
        results = self._call(what, call, range(len(self)), num_bytes=num_bytes)
        return [results[index] for index in range(len(self))]

    def give_up(self) -> None:
        """Ends all calls as Cancelled, also one that hangs at a lost server. For any thread."""
        self._closed.set()
        run_bounded([shard.close for shard in self._shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._transports_at_end = self.transports
        self._closed.set()
        self._fan_out.close()
        if self._places is not None:
            self._places.close()
        # A channel closes only when its last write has left, and a server that is stopped does not take it.
        run_bounded([shard.close for shard in self._shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    # -- one call, to one or several

    def _open(self, index: int, address: str) -> Shard:
        if self._places is None:
            return self._transport.open_shard(index, address)
        return ReplicatedShard(index, self._places, open_replica=self._transport.open_replica)

    def _call(
        self, what: str, call: Callable[[int, Shard, float], Result], indices: Collection[int], *, num_bytes: Sequence[int] | None = None
    ) -> dict[int, Result]:
        """Returns the results of `call(index, shard, timeout_s)` for some shards at once, by index."""
        sizes = num_bytes or (0,) * len(self._addresses)
        calls = [
            partial(self._one, index, what, partial(call, index, shard), num_bytes=sizes[index]) if index in indices else None
            for index, shard in enumerate(self._shards)
        ]
        results = self._fan_out.run(calls)
        return {index: results[index] for index in indices}  # type: ignore[misc]  # those have a call

    def _one(self, index: int, what: str, call: Callable[[float], Result], *, num_bytes: int = 0) -> Result:
        """Returns `call(timeout_s)`, a call of one shard, which may take longer the more it transfers."""
        subject, transfer_s = self._subject(index, what), num_bytes / SLOWEST_BYTES_PER_S
        limit_s, stood_still = self._transport.timeout_s + transfer_s, self._transport.stood_still

        def attempt(left_s: float) -> Result:
            # Each is watched by itself: one that fails is spoken of between two of them.
            with self._transport.watching(subject, expected_s=transfer_s, shard=index if num_bytes else None):
                return call(left_s)

        retried, closed = self._retried, self._closed
        return waiting.call(attempt, what=subject, timeout_s=limit_s, stop=closed, stood_still=stood_still, retried=retried)

    def _subject(self, index: int, what: str) -> str:
        address = self._addresses[index] if self._places is None else self._places.addresses(index)[0]
        return f"ps {index} at {address}: {what}"

    def _share(self, index: int, layout: Layout, *, where: str, timeout_s: float) -> SharedMemory | None:
        return self._transport.share(
            self._shards[index],
            where=where,
            participant=self.participant,
            layout=layout,
            has_standby=self._places is not None,
            timeout_s=timeout_s,
        )

    def _share_again(self, layouts: Sequence[Layout]) -> None:
        """Asks shards that share no memory any more, such as stopped ones, to do so again, from time to time."""
        lost = self.memories.lost
        if lost and (now := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now + _LOOK_AGAIN_S
            for index in lost:
                with suppress(PsError):
                    memory = self._share(index, layouts[index], where=f"ps {index}", timeout_s=_SHARE_AGAIN_S)
                    if memory is not None:
                        self.memories.of[index] = memory
                        log.info("ps %d: memory is shared again", index)

    def _read(self, into: ModelMemory, step: int | None, indices: Collection[int], *, held: Sequence[int | None] = ()) -> dict[int, int]:
        asked: dict[int, ReadRequest] = {}
        if not indices:
            return {}

        def read_once(index: int, shard: Shard, timeout_s: float) -> int:
            # An answer that broke off has left anything in the memory. The same request goes on where it did.
            request = asked.get(index)
            if request is None or request.held_step is not None:
                held_step = _held(into, index, held) if request is None else None
                request = ReadRequest(epoch=self.epoch, step=step, layout_hash=into.layouts[index].hash, held_step=held_step)
                asked[index] = request
            return shard.read(request, into.segments[index], timeout_s=timeout_s)

        read = _until_it_stands(read_once) if step is None else read_once

        # Copied in this thread where that is quicker than handing it to another.
        found: dict[int, int] = {}
        for index in self.memories.of:
            if index in indices and into.segments[index].nbytes <= MAX_NEAR_BYTES and not self.memories.travels(index):
                with suppress(*self._retried):  # then tried again and again below
                    found[index] = read(index, self._shards[index], self._transport.timeout_s)
        far = [index for index in indices if index not in found] if found else indices
        if not far:
            return found
        what, num_bytes = "read the newest variables" if step is None else f"read step {step}", [one.nbytes for one in into.segments]
        before = self._transport.num_read_bytes
        found |= self._call(what, read, far, num_bytes=num_bytes)
        self._traffic.received_bytes += self._transport.num_read_bytes - before
        return found


def _held(memory: ModelMemory, index: int, held: Sequence[int | None]) -> int | None:
    """Returns the step of a shard's part of the memory; None: it has none, or cannot be moved to another one in place."""
    return held[index] if held and len(memory.segments[index].pieces) == 1 else None


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
