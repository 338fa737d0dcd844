"""A Driver whose shards save, restore, die and outlive their chief, as values in this process: the chief's core sees no difference."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from chief.core import messages
from chief.core.coordinator import Coordinator
from chief.options import CheckpointConfig
from ps_protocol.model.data import DataSpec
from ps_protocol.model.spec import ModelSpec, layouts, place
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.roles.chief import LeaseRangesRequest, Registration
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Fence, joined_keys
from ps_protocol.roles.shard import Adoption, AppliedPush, ApplyRequest, CheckpointFile, ShardReport, ShardStatus, WorkerPushes
from tests.support.chief.chief_driver import KEY, MODEL, Driver, Worker
from tests.support.chief.eras import fence


@dataclass(slots=True)
class FakeShard:
    """What one parameter server has: which process, whose, and at what step; `applied` are the contributions of each step."""

    process: int
    epoch: int = 0
    chief: int = 0
    step: int | None = None
    applied: dict[int, tuple[PushId, ...]] = field(default_factory=dict)
    last_apply: ApplyRequest | None = None
    record: ChiefRecord | None = None
    record_version: int = 0
    settings_version: int = 0
    life: int = 0
    session_keys: tuple[bytes, ...] = ()
    given_up: tuple[PushId, ...] = ()

    def status(self, index: int) -> ShardStatus:
        return ShardStatus(
            shard=index,
            report=ShardReport(),
            process_incarnation=self.process,
            fence=fence(self.epoch, self.chief, life=self.life),
            step=self.step,
            settings_version=self.settings_version,
        )

    def pushes(self) -> tuple[WorkerPushes, ...]:
        by_worker: dict[tuple[int, int], list[AppliedPush]] = {}
        for step, contributors in self.applied.items():
            for push in contributors:
                by_worker.setdefault((push.worker, push.incarnation), []).append(AppliedPush(sequence=push.sequence, step=step))
        newest = {worker: max(i for w, i in by_worker if w == worker) for worker, _ in by_worker}
        return tuple(WorkerPushes(worker=w, incarnation=i, applied=tuple(by_worker[w, i])) for w, i in newest.items())


class RecoveryDriver(Driver):
    """Does what the chief wants at once, unless `is_manual`; then it waits in `orders`. The storage outlives chief and shards."""

    has_successors = True
    lives = itertools.count(1)
    chiefs = itertools.count(2)

    def new_life(self) -> int:
        """No two drivers have one."""
        return next(self.lives)

    def __init__(self, *, num_shards: int = 2, storage: dict[str, Checkpoint] | None = None, begin: bool = True, **config: Any) -> None:
        self.orders: list[Any] = []
        self.notes: list[messages.Note] = []
        self.is_manual = False
        self.storage: dict[str, Checkpoint] = {} if storage is None else storage
        self.damaged: set[str] = set()
        self.full = False
        self.unreadable = ""  # why storage cannot be read
        self.session_key = KEY
        self.model: ModelSpec = MODEL
        self.shards = [FakeShard(process=7 + index) for index in range(num_shards)]
        config.setdefault("checkpoints", CheckpointConfig(restore="latest"))
        super().__init__(num_shards=num_shards, find=False, adopt=False, **config)
        if begin:
            self.begin()

    def begin(self) -> None:
        self.send(messages.ShardsFound(statuses=tuple(shard.status(index) for index, shard in enumerate(self.shards))))

    def new_chief(self, **config: Any) -> None:
        """Another chief process takes the place of the old one, which never says anything again."""
        addresses = [f"host-p:{5000 + index}" for index in range(len(self.shards))]
        self.config = replace(self.config, **config)
        self.session_key = b"chief %d" % next(self.chiefs)
        self.coordinator = Coordinator(
            config=self.config, shard_addresses=addresses, now=self.now, new_life=self.new_life, session_key=self.session_key
        )
        self.orders.clear()
        for waiting in (self.to_apply, self.to_prepare, self.to_configure):
            waiting.clear()
        self.begin()

    def kill(self, shard: int) -> None:
        """A shard's process is replaced by an empty one."""
        self.shards[shard] = FakeShard(process=self.shards[shard].process + 100)

    def restart(self, shard: int) -> None:
        """As `kill`, and the chief sees it."""
        self.kill(shard)
        self.send(messages.ShardSeen(shard=shard, process_incarnation=self.shards[shard].process))

    def send(self, event: messages.Event) -> None:
        before = self.coordinator.handle
        taken: list[Any] = []

        def handle(event: messages.Event, now: float) -> list[messages.Instruction]:
            instructions = before(event, now)
            taken.extend(instructions)
            return instructions

        self.coordinator.handle = handle  # type: ignore[method-assign]
        try:
            at_once, self.applies_at_once = self.applies_at_once, False
            super().send(event)
        finally:
            self.applies_at_once = at_once
            self.coordinator.handle = before  # type: ignore[method-assign]
        self.notes += [order for order in taken if isinstance(order, messages.Note)]
        for order in taken:
            if isinstance(order, messages.AdoptShards | messages.RestoreShards):
                # As the shell does: work for an earlier epoch is given up.
                self.to_apply = [work for work in self.to_apply if work.fence.epoch >= order.fence.epoch]
                self.to_prepare = [work for work in self.to_prepare if work.fence.epoch >= order.fence.epoch]
                self.to_configure = [work for work in self.to_configure if work.fence.epoch >= order.fence.epoch]
        kinds = messages.RecoveryInstruction.__args__
        self.orders += [order for order in taken if isinstance(order, kinds)]
        if not self.is_manual:
            self.work_off()
        if self.applies_at_once:
            self.work()

    def work_off(self) -> None:
        """Does what is ordered, and what follows from that."""
        while self.orders:
            self.do(self.orders.pop(0))

    def do(self, order: Any) -> None:
        match order:
            case messages.AdoptShards(fence=fence):
                self._adopt(fence)
            case messages.KeepRecord(version=version, record=record):
                for shard in self.shards if order.is_for_all else self.shards[:1]:
                    if version > shard.record_version:
                        shard.record, shard.record_version = record, version
                self.send(messages.RecordKept(epoch=order.fence.epoch, version=version))
            case messages.FindCheckpoint(excluded=excluded, only=only):
                self._find(excluded, only)
            case messages.RestoreShards():
                self._restore(order)
            case messages.SaveStep(tag=tag) if any(shard.epoch != order.fence.epoch for shard in self.shards):
                self.send(messages.SaveFailed(tag=tag, why="a process that has begun meanwhile refuses"))
            case messages.SaveStep(tag=tag, step=step):
                assert all(shard.step == step for shard in self.shards), "a step is saved that not all shards have"
                self.send(messages.StepCopied(tag=tag))
                if self.full:
                    self.send(messages.SaveFailed(tag=tag, why="no space left on device", is_full=True))
                else:
                    files = tuple(CheckpointFile(name=f"ps-{i}", shard=i, num_bytes=8, sha256="0" * 64) for i in range(len(self.shards)))
                    self.send(messages.StepSaved(tag=tag, files=files))
            case messages.CommitCheckpoint(checkpoint=checkpoint, keep=keep):
                self.storage[checkpoint.tag] = checkpoint
                for old in sorted(self.storage.values(), key=lambda c: c.age_order)[:-keep]:
                    del self.storage[old.tag]
                self.send(messages.CheckpointCommitted(tag=checkpoint.tag))

    def apply(self) -> None:
        self.apply_at(*range(len(self.shards)))
        step = self.to_apply.pop(0)
        self.applied.append(step)
        self.send(messages.StepApplied(step=step.step, epoch=step.fence.epoch))

    def apply_at(self, *shards: int) -> None:
        """Has only these shards apply the step that is to be applied; the chief does not hear of it."""
        order = self.to_apply[0]
        for index in shards:
            shard = self.shards[index]
            if shard.step != order.step:
                assert shard.last_apply is not None
                assert (shard.step, shard.last_apply.contributors) == (order.step + 1, order.contributors), "not what was applied before"
                continue
            shard.applied[order.step] = order.contributors
            shard.last_apply = ApplyRequest(
                fence=replace(order.fence, chief_incarnation=shard.chief),
                step=order.step,
                contributors=order.contributors,
                weights=order.weights,
                discards=order.discards,
                ranges=order.ranges,
                attached=order.attached,
            )
            shard.step = order.step + 1

    def train(self, *indices: int, model: ModelSpec = MODEL) -> list[Worker]:
        """Has workers join, and the first of them initialise the model, which the shards hold then."""
        self.model = model
        workers = [Worker(self, index) for index in indices]
        self.initialise(workers[0])
        return workers

    def initialise(self, worker: Worker) -> None:
        """Has a worker initialise the model, which the shards hold then."""
        reply = self.answers[self.ask_model(worker, self.model)]
        for shard in self.shards:
            shard.step = 0
        worker.complete(reply.attempt)

    def come_back(self, worker: Worker, **fields: Any) -> Registration:
        """A worker registers again, as whom it was, and continues with what it is given."""
        registration = self.register(worker.index, former=worker.participant, **fields)
        worker.registration, worker.participant = registration, registration.participant
        worker.local_step = registration.global_step
        return registration

    def lease(
        self,
        worker: Worker,
        data: DataSpec,
        *,
        max_ranges: int = 1,
        request_id: int = 1,
        max_wait_s: float = 0.0,
        held: Iterable[int] = range(100),  # whatever it was given
    ) -> int:
        request = LeaseRangesRequest(
            participant=worker.participant, data=data, max_ranges=max_ranges, request_id=request_id, max_wait_s=max_wait_s, held=tuple(held)
        )
        return self.ask(request)

    def _tell_keys(self) -> None:
        """All shards get the keys of their life that any of them knows, and so does the chief."""
        life = max(self.shards, key=lambda shard: shard.chief).life
        keys = joined_keys((self.session_key,), tuple(key for shard in self.shards if shard.life == life for key in shard.session_keys))
        for shard in self.shards:
            shard.session_keys = keys
        self.send(messages.SessionKeysFound(keys=keys))

    def _adopt(self, fence: Fence) -> None:
        hashes = [layout.hash for layout in layouts(place(self.model, num_shards=len(self.shards)), num_shards=len(self.shards))]
        for shard in self.shards:
            if fence.epoch > shard.epoch:
                shard.last_apply = None
            earlier = shard.session_keys if shard.life == fence.life else ()
            shard.session_keys = joined_keys((self.session_key,), earlier)
            shard.epoch, shard.chief, shard.life = fence.epoch, fence.chief_incarnation, fence.life
        self._tell_keys()
        kept = max(self.shards, key=lambda shard: shard.record_version)
        for index, shard in enumerate(self.shards):
            if index == len(self.shards) - 1 and kept.record is not None:
                self.send(messages.RecordFound(record=kept.record))
            adoption = Adoption(
                step=shard.step,
                layout_hash=hashes[index] if shard.step is not None else "",
                record_version=shard.record_version,
                last_apply=shard.last_apply,
                pushes=shard.pushes(),
                session_keys=shard.session_keys,
                given_up=shard.given_up,
            )
            self.send(messages.ShardAdopted(shard=index, process_incarnation=shard.process, adoption=adoption))

    def _find(self, excluded: tuple[str, ...], only: str) -> None:
        if self.unreadable:
            self.send(messages.CheckpointFound(checkpoint=None, failure=self.unreadable))
            return
        there = sorted(self.storage.values(), key=lambda checkpoint: checkpoint.age_order)
        found = [c for c in there if c.tag not in excluded and (not only or c.tag == only)]
        self.send(
            messages.CheckpointFound(
                checkpoint=found[-1] if found else None,
                manifest_sha256="ab" * 32,
                highest_epoch=max((c.fence.epoch for c in there), default=0),
            )
        )

    def _restore(self, order: messages.RestoreShards) -> None:
        if self.unreadable:
            self.send(
                messages.RestoreFailed(epoch=order.fence.epoch, tag=order.tag, why=self.unreadable, is_damaged=False, is_passing=True)
            )
            return
        if order.tag in self.damaged:
            why = "ps-0 is not what was written"
            self.send(messages.RestoreFailed(epoch=order.fence.epoch, tag=order.tag, why=why, is_damaged=True))
            return
        step = self.storage[order.tag].step
        for shard in self.shards:
            assert order.fence.epoch > shard.epoch, "restored under an epoch that the shard has had"
            shard.epoch, shard.chief, shard.step, shard.last_apply = order.fence.epoch, order.fence.chief_incarnation, step, None
            if shard.life != order.fence.life:
                shard.session_keys = ()
            shard.life = order.fence.life
            shard.applied = {number: made_of for number, made_of in shard.applied.items() if number < step}
        self._tell_keys()
        self.send(
            messages.ShardsRestored(epoch=order.fence.epoch, tag=order.tag, process_incarnations=tuple(s.process for s in self.shards))
        )
