"""A chief of a simulated cluster: the real coordinator, and a shell that does at simulated shards what the real one does."""

import itertools
from collections.abc import Callable
from typing import Any

from chief import events as ev
from chief import recovery_events as rec
from chief.checkpoint_store import CheckpointStore
from chief.coordination import CoordinationConfig
from chief.coordinator import Coordinator
from chief.found_record import record_found
from chief.shard_requests import apply_requests, finding, prepare_request, restore_failure, restore_requests, save_failure, settings_of
from ps_protocol.chief import ClusterState, CommitResult, Registration, TokenReply, TokenResult
from ps_protocol.codec_record import pack_record
from ps_protocol.errors import EpochMismatch, InternalError, PsError, ShuttingDown, Superseded, Unavailable
from ps_protocol.shard import Adoption, RestoreProgress, RestoreRequest, SaveProgress, SaveRequest, SaveState, ShardStatus
from tests.simulation.disk import Crash
from tests.simulation.oracle import Oracle
from tests.simulation.world import All, Answer, Call, Life, Running, Sleep, Task, World

_WATCH_S = 1.0
_HEARD_S, _GIVE_UP_S = 2.5, 10.0
_A_MOMENT_S = 1e-9


class ChiefNode:
    """One chief. `takes_over`: whoever started it knows the chief before it dead."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        config: CoordinationConfig,
        shards: tuple[str, ...],
        store: CheckpointStore | None,
        oracle: Oracle,
        takes_over: bool,
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._shards, self._store, self._oracle = world, life, shards, store, oracle
        self._takes_over, self._on_end = takes_over, on_end
        self.coordinator = Coordinator(config=config, shard_addresses=shards, now=world.now)
        self._epoch = self._incarnation = 0
        self._calls = itertools.count(1)
        self._blocked: dict[int, tuple[str, tuple[Any, ...], Answer, float]] = {}
        self._tasks: list[Running] = []
        self._timer = 0
        self._is_ended = False
        world.spawn(life, self._begin())

    # -- callers

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Takes up a call: `arguments` make its event."""
        number = next(self._calls)
        self._blocked[number] = method, arguments, answer, self._world.now
        try:
            self._report(_EVENTS[method](number, *arguments))
        except PsError as error:
            self._answer(ev.Refuse(call=number, error=error))

    def overdue(self, limit_s: float) -> list[str]:
        """Returns the calls that have been blocked for longer than any may."""
        return [f"{method}{arguments}" for method, arguments, _, since in self._blocked.values() if self._world.now - since > limit_s]

    def _answer(self, instruction: ev.Reply | ev.Refuse) -> None:
        blocked = self._blocked.pop(instruction.call, None)
        if blocked is None:
            return
        method, arguments, answer, _ = blocked
        if isinstance(instruction, ev.Refuse):
            answer(instruction.error)
            return
        self._tell_oracle(method, arguments, instruction.value)
        answer(instruction.value)

    def _tell_oracle(self, method: str, arguments: tuple[Any, ...], value: object) -> None:
        who = f"{method} of {arguments[0]}"
        if isinstance(value, TokenReply):
            epoch = arguments[0].epoch
            if value.result is TokenResult.TOKEN:
                self._oracle.told_step(epoch, value.step, to=who)
            self._oracle.told_step(epoch, value.global_step, to=who)
            if value.commit is not None:
                self._oracle.told_commit(epoch, arguments[-1].push_id, value.commit)
        elif isinstance(value, CommitResult):
            self._oracle.told_commit(arguments[0].epoch, arguments[1].push_id, value)
            self._oracle.told_step(arguments[0].epoch, value.global_step, to=who)
        elif isinstance(value, Registration) and self.coordinator.state is ClusterState.TRAINING:
            self._oracle.told_step(value.participant.epoch, value.global_step, to=who)

    # -- the coordinator

    def _report(self, event: ev.Event) -> None:
        if self._is_ended:
            raise ShuttingDown("the chief is shutting down")
        for instruction in self.coordinator.handle(event, self._world.now):
            self._carry_out(instruction)
        self._set_timer()

    def _set_timer(self) -> None:
        due = self.coordinator.next_deadline()
        if due is None:
            return
        self._timer += 1
        number = self._timer

        def fire() -> None:
            if number == self._timer and not self._is_ended:
                self._report(ev.TimerFired())

        self._world.later(self._life, max(0.0, due - self._world.now), fire)

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Reply() | ev.Refuse():
                self._answer(instruction)
            case ev.Note():
                self._world.note(f"{self._life.name}: {instruction.text}")
            case ev.EndProcesses():
                self._end(instruction.reason)
            case rec.AdoptShards():
                self._obey(instruction.epoch, instruction.chief_incarnation)
                self._spawn(self._adopt_all())
            case ev.AdoptShard():
                self._spawn(self._adopt_again(instruction.shard))
            case rec.RestoreShards():
                self._obey(instruction.epoch, instruction.chief_incarnation)
                self._spawn(self._restore(instruction))
            case rec.FindCheckpoint():
                self._world.spawn(self._life, self._find(instruction))
            case rec.SaveStep():
                self._spawn(self._save(instruction))
            case rec.CommitCheckpoint():
                self._world.spawn(self._life, self._commit(instruction))
            case rec.KeepRecord():
                for index in range(len(self._shards)):
                    self._spawn(self._keep(index, instruction))
            case _:
                self._spawn(self._work(instruction))

    def _obey(self, epoch: int, incarnation: int) -> None:
        """What is under way for an older epoch is given up without a report."""
        if (epoch, incarnation) != (self._epoch, self._incarnation):
            for task in self._tasks:
                task.cancel()
            self._tasks.clear()
        self._epoch, self._incarnation = epoch, incarnation

    def _spawn(self, task: Task) -> None:
        self._tasks = [one for one in self._tasks if not one.is_over]
        self._tasks.append(self._world.spawn(self._life, task))

    def _end(self, reason: str) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._world.note(f"{self._life.name} ends: {reason}")
            self._world.later(self._life, 0.5, lambda: self._on_end(reason))

    # -- shards

    def _begin(self) -> Task:
        start = self._world.now
        while True:
            statuses: list[ShardStatus] = yield All([self._insist(index, "status") for index in range(len(self._shards))])
            if any(isinstance(status, PsError) for status in statuses):
                continue
            heard = [one.chief_heard_ago_s for one in statuses if one.chief_heard_ago_s is not None]
            if self._takes_over or not heard or min(heard) >= _HEARD_S:
                break
            if self._world.now - start > _GIVE_UP_S:
                self._end("another chief is at work")
                return
            yield Sleep(0.3)
        self._report(rec.ShardsFound(findings=tuple(finding(status) for status in statuses)))
        for index in range(len(self._shards)):
            self._world.spawn(self._life, self._watch(index))

    def _insist(self, index: int, method: str, *arguments: Any) -> Task:
        pause_s = 0.02
        while True:
            try:
                answer = yield Call(self._shards[index], method, arguments)
            except (Unavailable, ShuttingDown) as error:
                self._report(ev.ShardUnreachable(shard=index, why=error.message))
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(1.0, pause_s * 2)
            else:
                return answer

    def _watch(self, index: int) -> Task:
        while not self._is_ended:
            yield Sleep(_WATCH_S)
            yield from self._look(index)

    def _look(self, index: int) -> Task:
        try:
            status: ShardStatus = yield Call(self._shards[index], "status")
        except PsError as error:
            self._report(ev.ShardUnreachable(shard=index, why=error.message))
            return
        if status.chief_incarnation > self._incarnation and self._incarnation:
            self._superseded()
        else:
            self._report(ev.ShardSeen(shard=index, process_incarnation=status.process_incarnation))

    def _superseded(self) -> None:
        self._world.seen["a chief found itself superseded"] += 1
        self._end("superseded")

    def _at(self, index: int, method: str, *arguments: Any) -> Task:
        """Insists; a refusal is looked into, since a process that was restarted says more than it."""
        try:
            answer = yield from self._insist(index, method, *arguments)
        except Superseded:
            self._superseded()
            raise
        except EpochMismatch as error:
            yield from self._look(index)
            raise error
        return answer

    def _at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> Task:
        """Calls all shards; returns their answers, or None after it has reported a refusal."""
        epoch = self._epoch
        answers = yield All([self._at(index, method, *arguments[index]) for index in range(len(self._shards))])
        refused = [(index, answer) for index, answer in enumerate(answers) if isinstance(answer, PsError)]
        for index, error in refused:
            if not self._is_ended:
                self._world.note(f"{self._life.name}: ps {index} refused {method}: {error}")
                self._report(ev.ShardFailed(shard=index, why=error.message, epoch=epoch))
        return None if refused or self._is_ended else answers

    def _work(self, work: ev.Instruction) -> Task:
        count, incarnation = len(self._shards), self._incarnation
        if isinstance(work, ev.ApplyStep):
            requests = apply_requests(work, chief_incarnation=incarnation, num_shards=count)
            if (yield from self._at_all("apply", [(request,) for request in requests])) is not None:
                self._report(ev.StepApplied(step=work.step, epoch=work.epoch))
        elif isinstance(work, ev.PrepareStep):
            sums = yield from self._at_all("prepare", [(prepare_request(work, chief_incarnation=incarnation),)] * count)
            if sums is not None:
                self._report(ev.StepPrepared(step=work.step, sums=tuple(tuple(one) for one in sums), epoch=work.epoch))
        elif isinstance(work, ev.ConfigureShards):
            settings = settings_of(work, chief_incarnation=incarnation)
            if (yield from self._at_all("configure", [(settings,)] * count)) is not None:
                self._report(ev.ShardsConfigured(version=work.version, epoch=work.epoch))

    def _adopt(self, index: int) -> Task:
        adoption = yield from self._insist(index, "adopt", self._epoch, self._incarnation, self._life.name)
        status = yield from self._insist(index, "status")
        return adoption, status.process_incarnation

    def _adopt_all(self) -> Task:
        epoch = self._epoch
        found = yield All([self._adopt(index) for index in range(len(self._shards))])
        for index, one in enumerate(found):
            if isinstance(one, Superseded):
                self._superseded()
                return
            if isinstance(one, PsError):
                self._report(ev.ShardFailed(shard=index, why=one.message, epoch=epoch))
                return
        adoptions: list[Adoption] = [adoption for adoption, _ in found]
        for event in record_found(adoptions):
            self._report(event)
        for index, (adoption, process_incarnation) in enumerate(found):
            self._report(ev.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption))

    def _adopt_again(self, index: int) -> Task:
        try:
            adoption, process_incarnation = yield from self._adopt(index)
        except Superseded:
            self._superseded()
        else:
            self._report(ev.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption))

    def _keep(self, index: int, work: rec.KeepRecord) -> Task:
        try:
            yield from self._insist(index, "keep_record", work.epoch, self._incarnation, work.version, pack_record(work.record))
        except PsError as error:
            self._world.note(f"{self._life.name}: ps {index} keeps no record: {error}")

    # -- checkpoints

    def _find(self, work: rec.FindCheckpoint) -> Task:
        yield Sleep(self._world.between(0.005, 0.05))
        self._report(rec.CheckpointFound(checkpoint=None) if self._store is None else self._store.find(work))

    def _restore(self, work: rec.RestoreShards) -> Task:
        requests = restore_requests(work)
        done = yield All([self._restore_one(index, requests[index]) for index in range(len(self._shards))])
        for index, one in enumerate(done):
            if isinstance(one, Superseded):
                self._superseded()
                return
            if isinstance(one, PsError):
                yield from self._look(index)  # perhaps it is another chief's
                if not self._is_ended:
                    self._report(restore_failure(work, one, where=f"ps {index}"))
                return
        self._report(rec.ShardsRestored(epoch=work.epoch, tag=work.tag, process_incarnations=tuple(done)))

    def _restore_one(self, index: int, request: RestoreRequest) -> Task:
        _, process_incarnation = yield from self._adopt(index)
        max_wait_s = 0.0
        while True:
            progress: RestoreProgress = yield from self._insist(index, "restore", request, max_wait_s)
            max_wait_s = _A_MOMENT_S  # without a wait, one that has failed would be begun anew
            if progress.is_done:
                return process_incarnation
            yield Sleep(0.03)

    def _save(self, work: rec.SaveStep) -> Task:
        assert self._store is not None
        request = SaveRequest(epoch=work.epoch, chief_incarnation=self._incarnation, step=work.step, tag=work.tag)
        copied = yield All([self._at(index, "save", request) for index in range(len(self._shards))])
        failure = self._failure_of(copied)
        if failure is None:
            self._report(rec.StepCopied(tag=work.tag))
            files = yield All([self._saved(index, request, copied[index]) for index in range(len(self._shards))])
            failure = self._failure_of(files)
        if failure is not None and not self._is_ended:
            self._store.abandon(work.tag)
            self._report(save_failure(work.tag, failure))
        elif not self._is_ended:
            self._report(rec.StepSaved(tag=work.tag, files=tuple(files)))

    def _saved(self, index: int, request: SaveRequest, progress: SaveProgress) -> Task:
        while progress.state is SaveState.WRITING:
            yield Sleep(0.03)
            progress = yield from self._at(index, "save", request)
        if progress.file is None:
            raise progress.failure or InternalError("a save ended without a file")
        return progress.file

    def _failure_of(self, results: list[Any]) -> PsError | None:
        return next((one for one in results if isinstance(one, PsError)), None)

    def _commit(self, work: rec.CommitCheckpoint) -> Task:
        assert self._store is not None
        yield Sleep(self._world.between(0.005, 0.05))
        try:
            event = self._store.commit(work)
        except Crash:
            self._world.seen["chief killed while it made a checkpoint whole"] += 1
            self._world.kill(self._life.name)
            self._on_end("killed")
            return
        yield Sleep(self._world.between(0.001, 0.02))
        if not self._is_ended:
            self._report(event)


_EVENTS: dict[str, Callable[..., ev.Event]] = {
    "register": lambda call, request: ev.RegisterWorker(call=call, request=request),
    "heartbeat": lambda call, participant: ev.Heartbeat(call=call, participant=participant),
    "deregister": lambda call, participant: ev.DeregisterWorker(call=call, participant=participant),
    "model": lambda call, participant, model: ev.RegisterModel(call=call, participant=participant, model=model, max_wait_s=5.0),
    "complete": lambda call, participant, attempt: ev.CompleteInitialization(call=call, participant=participant, attempt=attempt),
    "commit": lambda call, participant, commit: ev.CommitPush(call=call, participant=participant, commit=commit),
    "token": lambda call, participant, local_step, request_id, commit: ev.DequeueToken(
        call=call, participant=participant, local_step=local_step, request_id=request_id, max_wait_s=5.0, commit=commit
    ),
}
