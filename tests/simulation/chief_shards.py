"""What a simulated chief does at shards: looks at them, insists, and reports what came of it. Decides nothing."""

from typing import Any, Protocol

from chief.core import messages
from chief.shards.requests import (
    apply_requests,
    are_of_one_time,
    finding,
    prepare_request,
    record_found,
    restore_failure,
    restore_requests,
    settings_of,
)
from ps_protocol.errors import EpochMismatch, PsError, ShuttingDown, Superseded, Unavailable
from ps_protocol.roles.shard import Adoption, RestoreProgress, RestoreRequest, ShardStatus
from ps_protocol.wire.codec import pack_record
from tests.simulation.tasks import All, Call, Life, Sleep, Task
from tests.simulation.world import World

_WATCH_S = 1.0
_HEARD_S, _GIVE_UP_S = 2.5, 10.0
_A_MOMENT_S = 1e-9
_OF_PROCESS = frozenset({"apply", "prepare", "configure"})


class Host(Protocol):
    """A chief that is told what came of its instructions."""

    @property
    def is_ended(self) -> bool:
        """Whether it acts no more."""

    def report(self, event: messages.Event) -> None:
        """Takes note of what has happened."""

    def end(self, reason: str) -> None:
        """Acts no more."""


class ChiefAtShards:
    """One chief's calls to all shards, as this incarnation and in this epoch."""

    def __init__(self, world: World, life: Life, host: Host, *, shards: tuple[str, ...], takes_over: bool) -> None:
        self._world, self._life, self._host, self._shards, self._takes_over = world, life, host, shards, takes_over
        self.epoch = self.incarnation = self.cluster_life = 0
        self._processes: dict[int, int] = {}  # that have been adopted

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self._shards)

    def begin(self) -> Task:
        """Looks at all shards until all have answered, reports them, and watches them from then on."""
        start = self._world.now
        before: list[ShardStatus] = []
        while True:
            statuses: list[ShardStatus] = yield All([self.insist(index, "status") for index in range(len(self._shards))])
            if any(isinstance(status, PsError) for status in statuses):
                continue
            if not are_of_one_time(before, statuses):
                before = statuses
                continue
            heard = [one.chief_heard_ago_s for one in statuses if one.chief_heard_ago_s is not None]
            if self._takes_over or not heard or min(heard) >= _HEARD_S:
                break
            if self._world.now - start > _GIVE_UP_S:
                self._host.end("another chief is at work")
                return
            yield Sleep(0.3)
        self._host.report(messages.ShardsFound(findings=tuple(finding(status) for status in statuses)))
        for index in range(len(self._shards)):
            self._world.spawn(self._life, self._watch(index))

    def insist(self, index: int, method: str, *arguments: Any) -> Task:
        """Calls a shard until it answers; what only the process that was adopted may be asked again is not asked of another."""
        pause_s, is_again = 0.02, False
        while True:
            try:
                if is_again and method in _OF_PROCESS:
                    yield from self._check_process(index)
                is_again = True
                answer = yield self._call(index, method, arguments)
            except (Unavailable, ShuttingDown) as error:
                self._host.report(messages.ShardUnreachable(shard=index, why=error.message))
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(1.0, pause_s * 2)
            else:
                return answer

    def _call(self, index: int, method: str, arguments: tuple[Any, ...]) -> Call:
        """What is asked with each step goes over a stream, which ends with the process that it was opened to."""
        if method in _OF_PROCESS:
            return Call(self._shards[index], "of process", (self._processes.get(index, 0), method, *arguments))
        return Call(self._shards[index], method, arguments)

    def _check_process(self, index: int) -> Task:
        status: ShardStatus = yield Call(self._shards[index], "status")
        if status.process_incarnation != self._processes.get(index, status.process_incarnation):
            raise EpochMismatch(f"ps {index} is another process")

    def _watch(self, index: int) -> Task:
        while not self._host.is_ended:
            yield Sleep(_WATCH_S)
            yield from self.look(index)

    def look(self, index: int) -> Task:
        """Reports which process serves a shard now."""
        try:
            status: ShardStatus = yield Call(self._shards[index], "status")
        except PsError as error:
            self._host.report(messages.ShardUnreachable(shard=index, why=error.message))
        else:
            self._note(index, status)

    def _look_until_seen(self, index: int) -> Task:
        status: ShardStatus = yield from self.insist(index, "status")
        self._note(index, status)

    def _note(self, index: int, status: ShardStatus) -> None:
        if status.chief_incarnation > self.incarnation and self.incarnation:
            self.superseded()
        else:
            self._host.report(messages.ShardSeen(shard=index, process_incarnation=status.process_incarnation))

    def superseded(self) -> None:
        """Another chief is at work."""
        self._world.seen["a chief found itself superseded"] += 1
        self._host.end("superseded")

    def at(self, index: int, method: str, *arguments: Any) -> Task:
        """Insists; a refusal is looked into, since a process that was restarted says more than it."""
        try:
            answer = yield from self.insist(index, method, *arguments)
        except Superseded:
            self.superseded()
            raise
        except EpochMismatch as error:
            yield from self._look_until_seen(index)
            raise error
        return answer

    def _at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> Task:
        """Calls all shards; returns their answers, or None after it has reported a refusal."""
        epoch = self.epoch
        answers = yield All([self.at(index, method, *arguments[index]) for index in range(len(self._shards))])
        refused = [(index, answer) for index, answer in enumerate(answers) if isinstance(answer, PsError)]
        for index, error in refused:
            if not self._host.is_ended:
                self._world.note(f"{self._life.name}: ps {index} refused {method}: {error}")
                self._host.report(messages.ShardFailed(shard=index, why=error.message, epoch=epoch))
        return None if refused or self._host.is_ended else answers

    def work(self, work: messages.Instruction) -> Task:
        """Has all shards do one thing."""
        count, incarnation = len(self._shards), self.incarnation
        if isinstance(work, messages.ApplyStep):
            requests = apply_requests(work, chief_incarnation=incarnation, num_shards=count)
            if (yield from self._at_all("apply", [(request,) for request in requests])) is not None:
                self._host.report(messages.StepApplied(step=work.step, epoch=work.epoch))
        elif isinstance(work, messages.PrepareStep):
            sums = yield from self._at_all("prepare", [(prepare_request(work, chief_incarnation=incarnation),)] * count)
            if sums is not None:
                self._host.report(messages.StepPrepared(step=work.step, sums=tuple(tuple(one) for one in sums), epoch=work.epoch))
        elif isinstance(work, messages.ConfigureShards):
            settings = settings_of(work, chief_incarnation=incarnation)
            if (yield from self._at_all("configure", [(settings,)] * count)) is not None:
                self._host.report(messages.ShardsConfigured(version=work.version, epoch=work.epoch))

    def _adopt(self, index: int) -> Task:
        # In this order: of a process that is started in between, it is then seen that it is another one.
        status = yield from self.insist(index, "status")
        adoption = yield from self.insist(index, "adopt", self.epoch, self.incarnation, self._life.name, self.cluster_life)
        self._processes[index] = status.process_incarnation
        return adoption, status.process_incarnation

    def adopt_all(self) -> Task:
        """Becomes the chief of all shards, and reports what they hold."""
        epoch = self.epoch
        found = yield All([self._adopt(index) for index in range(len(self._shards))])
        for index, one in enumerate(found):
            if isinstance(one, Superseded):
                self.superseded()
                return
            if isinstance(one, PsError):
                self._host.report(messages.ShardFailed(shard=index, why=one.message, epoch=epoch))
                return
        adoptions: list[Adoption] = [adoption for adoption, _ in found]
        self._count(adoptions)
        for event in record_found(adoptions):
            self._host.report(event)
        for index, (adoption, process_incarnation) in enumerate(found):
            self._host.report(messages.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption))

    def fence(self) -> Task:
        """Becomes the chief of all shards, whatever they hold; says whether it has."""
        found = yield All([self._adopt(index) for index in range(len(self._shards))])
        if any(isinstance(one, Superseded) for one in found):
            self.superseded()
            return False
        return True

    def still_rules(self, epoch: int) -> Task:
        """Whether the process that has saved last still obeys this chief."""
        status: ShardStatus = yield from self.insist(0, "status")
        if status.chief_incarnation > self.incarnation:
            self.superseded()
            return False
        is_so = (status.epoch, status.chief_incarnation) == (epoch, self.incarnation)
        self._world.seen["a checkpoint became whole too late to be told"] += not is_so
        return is_so

    def _count(self, adoptions: list[Adoption]) -> None:
        steps = {adoption.step for adoption in adoptions}
        if steps != {None}:
            self._world.seen["a chief found what another had trained"] += 1
        if len(steps) > 1 and None not in steps:
            self._world.seen["a chief found an interrupted step"] += 1

    def adopt_again(self, index: int) -> Task:
        """Becomes the chief of a shard that is back."""
        try:
            adoption, process_incarnation = yield from self._adopt(index)
        except Superseded:
            self.superseded()
        else:
            self._host.report(messages.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption))

    def keep(self, work: messages.KeepRecord) -> Task:
        """Has shards keep what a successor must know."""
        record, num_shards = pack_record(work.record), len(self._shards) if work.is_for_all else 1
        kept = yield All(
            [self.insist(index, "keep_record", work.epoch, self.incarnation, work.version, record) for index in range(num_shards)]
        )
        failures = [str(one) for one in kept if isinstance(one, PsError)]
        if any(isinstance(one, Superseded) for one in kept):
            self.superseded()
        elif failures:
            self._world.note(f"{self._life.name}: a record is not kept: {failures}")
        if not self._host.is_ended:
            self._host.report(messages.RecordKept(epoch=work.epoch, version=work.version, failure="".join(failures[:1])))

    def restore(self, work: messages.RestoreShards) -> Task:
        """Has all shards brought back to a checkpoint."""
        requests = restore_requests(work)
        done = yield All([self._restore_one(index, requests[index]) for index in range(len(self._shards))])
        for index, one in enumerate(done):
            if isinstance(one, Superseded):
                self.superseded()
                return
            if isinstance(one, PsError):
                yield from self.look(index)  # perhaps it is another chief's
                if not self._host.is_ended:
                    self._host.report(restore_failure(work, one, where=f"ps {index}"))
                return
        self._host.report(messages.ShardsRestored(epoch=work.epoch, tag=work.tag, process_incarnations=tuple(done)))

    def _restore_one(self, index: int, request: RestoreRequest) -> Task:
        _, process_incarnation = yield from self._adopt(index)
        max_wait_s = 0.0
        while True:
            progress: RestoreProgress = yield from self.insist(index, "restore", request, max_wait_s)
            max_wait_s = _A_MOMENT_S  # without a wait, one that has failed would be begun anew
            if progress.is_done:
                return process_incarnation
            yield Sleep(0.03)
