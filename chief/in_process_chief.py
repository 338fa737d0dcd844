"""A chief in this process: the `Chief` Protocol over the same coordinator, with shards that are objects. Owns the lock; knows no network.

The thread whose call completes a step has it applied before its call returns, outside the lock.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from chief import events as ev
from chief.adoption import next_chief_incarnation
from chief.coordination import CoordinationConfig
from chief.coordinator import Coordinator
from ps_protocol.chief import (
    AgreedModel,
    ClusterStatus,
    CommitResult,
    ModelReply,
    Participant,
    PushCommit,
    RegisterRequest,
    Registration,
    TokenReply,
)
from ps_protocol.errors import PsError
from ps_protocol.model import ModelSpec
from ps_protocol.shard import ApplyRequest, Shard

_EPOCH = 1

Kind = TypeVar("Kind")


class InProcessChief:
    """Implements Chief over shards in this process, all of which it adopts at once. Thread-safe. Its time is `clock`, in seconds."""

    def __init__(self, shards: Sequence[Shard], *, config: CoordinationConfig, clock: Callable[[], float]) -> None:
        self._shards = tuple(shards)
        self._clock = clock
        names = [f"in-process:{index}" for index in range(len(self._shards))]
        self._coordinator = Coordinator(config=config, shard_addresses=names, epoch=_EPOCH, now=clock())
        self._changed = threading.Condition()
        self._calls = itertools.count(1)
        self._answers: dict[int, ev.Reply | ev.Refuse | None] = {}  # None: not answered yet
        statuses = [shard.status() for shard in self._shards]
        self._incarnation = next_chief_incarnation(statuses, names=names)
        for index, (shard, status) in enumerate(zip(self._shards, statuses, strict=True)):
            shard.adopt(epoch=_EPOCH, chief_incarnation=self._incarnation)
            self._report(ev.ShardAdopted(shard=index, process_incarnation=status.process_incarnation))

    def register_worker(self, request: RegisterRequest) -> Registration:
        """Takes a participant in."""
        return self._call(Registration, lambda call: ev.RegisterWorker(call=call, request=request))

    def heartbeat(self, participant: Participant) -> bool:
        """Renews the lease; True once training is finished."""
        return self._call(bool, lambda call: ev.Heartbeat(call=call, participant=participant))

    def deregister_worker(self, participant: Participant, *, failure: str = "") -> None:
        """Ends the lease."""
        self._call(type(None), lambda call: ev.DeregisterWorker(call=call, participant=participant, failure=failure))

    def register_model(self, participant: Participant, model: ModelSpec, *, max_wait_s: float) -> ModelReply:
        """Agrees on the model; blocks at most `max_wait_s` (and 20 s)."""
        return self._call(ModelReply, lambda call: ev.RegisterModel(call=call, participant=participant, model=model, max_wait_s=max_wait_s))

    def complete_initialization(self, participant: Participant, *, attempt: int) -> None:
        """Tells that the shards hold their initial values."""
        self._call(type(None), lambda call: ev.CompleteInitialization(call=call, participant=participant, attempt=attempt))

    def get_model(self, *, max_wait_s: float) -> AgreedModel:
        """Returns the agreed model; blocks at most `max_wait_s` (and 20 s) for it to be initialised."""
        return self._call(AgreedModel, lambda call: ev.GetModel(call=call, max_wait_s=max_wait_s))

    def commit_push(self, participant: Participant, commit: PushCommit) -> CommitResult:
        """Counts a contribution, and has the step applied that it completes."""
        return self._call(CommitResult, lambda call: ev.CommitPush(call=call, participant=participant, commit=commit))

    def dequeue_token(
        self, participant: Participant, *, local_step: int, request_id: int, max_wait_s: float, commit: PushCommit | None = None
    ) -> TokenReply:
        """Waits for a token, at most `max_wait_s` (and 20 s); counts `commit` first."""
        return self._call(
            TokenReply,
            lambda call: ev.DequeueToken(
                call=call, participant=participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
        )

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        with self._changed:
            steps = self._tick_locked()
            status = self._coordinator.status(self._clock(), max_ledger_entries=max_ledger_entries)
        self._apply(steps)
        return status

    def finish(self, *, reason: str) -> int:
        """Ends training; returns the last step."""
        return self._call(int, lambda call: ev.FinishTraining(call=call, reason=reason))

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _call(self, kind: type[Kind], make_event: Callable[[int], ev.Event]) -> Kind:
        with self._changed:
            call = next(self._calls)
            self._answers[call] = None
        try:
            self._report(make_event(call))
            answer = self._wait_for_answer(call)
        finally:
            with self._changed:
                del self._answers[call]
        if isinstance(answer, ev.Refuse):
            raise answer.error
        assert isinstance(answer.value, kind)
        return answer.value

    def _wait_for_answer(self, call: int) -> ev.Reply | ev.Refuse:
        try:
            while True:
                with self._changed:
                    steps = self._tick_locked()
                    answer = self._answers[call]
                    if answer is None and not steps:
                        due = self._coordinator.next_deadline()
                        self._changed.wait(None if due is None else max(0.001, min(due - self._clock(), threading.TIMEOUT_MAX)))
                self._apply(steps)
                if answer is not None:
                    return answer
        except BaseException:
            # Ctrl-C in a wait: the coordinator must not keep a place for somebody who is gone.
            self._report(ev.CallCancelled(call=call))
            raise

    def _report(self, event: ev.Event) -> None:
        with self._changed:
            steps = self._tick_locked()
        self._apply(steps)
        with self._changed:
            steps = self._handle_locked(event)
        self._apply(steps)

    def _tick_locked(self) -> list[ev.ApplyStep]:
        now, due = self._clock(), self._coordinator.next_deadline()
        return self._handle_locked(ev.TimerFired()) if due is not None and due <= now else []

    def _handle_locked(self, event: ev.Event) -> list[ev.ApplyStep]:
        """Tells the coordinator and hands out its answers; returns what must be done without the lock.

        There is nothing to end when all have left: the shards are memory, and live as long as somebody holds them.
        """
        steps = []
        for instruction in self._coordinator.handle(event, self._clock()):
            if isinstance(instruction, ev.ApplyStep):
                steps.append(instruction)
            elif isinstance(instruction, (ev.Reply, ev.Refuse)) and instruction.call in self._answers:
                self._answers[instruction.call] = instruction
        self._changed.notify_all()
        return steps

    def _apply(self, steps: Sequence[ev.ApplyStep]) -> None:
        for step in steps:
            request = ApplyRequest(epoch=step.epoch, chief_incarnation=self._incarnation, step=step.step, contributors=step.contributors)
            num_applied, interrupt = 0, None
            try:
                for shard in self._shards:
                    interrupt = _apply_whole(shard, request) or interrupt
                    num_applied += 1
            except PsError as error:
                self._report(ev.ShardFailed(shard=num_applied, why=error.message))
            except Exception as error:
                # A defect: the other threads must not wait for a step that nobody will finish.
                self._report(ev.ShardFailed(shard=num_applied, why=f"step {step.step} broke off: {error!r}"))
                raise
            else:
                self._report(ev.StepApplied(step=step.step))
            if interrupt is not None:
                raise interrupt


def _apply_whole(shard: Shard, request: ApplyRequest) -> KeyboardInterrupt | None:
    """Applies a step; a Ctrl-C meanwhile is returned, for after the step: half a step would be the end of training for all threads."""
    try:
        shard.apply_step(request)
    except KeyboardInterrupt as interrupt:
        shard.apply_step(request)
        return interrupt
    return None
