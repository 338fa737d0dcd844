"""Carries out a worker's requests: calls of the chief, of its shards once there is a model, waits, messages in the log. Decides nothing."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ps_protocol.errors import Cancelled, NotInitializer, PsError
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import (
    ClusterStatusRequest,
    CommitPushRequest,
    CommitResult,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    LeaseRangesRequest,
    LeaseReply,
    ModelReply,
    Participant,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.history import Answered
from worker_client.cluster.threads import Job, Lane
from worker_client.core import requests as ask
from worker_client.core.data import NUM_AHEAD
from worker_client.core.worker import Worker
from worker_client.model.declarations import Declared
from worker_client.model.memory import ModelMemory
from worker_client.session.membership import Membership
from worker_client.session.spans import StepSpans
from worker_client.session.training import Memories, Training, memories_of

log = logging.getLogger("lockstep.worker")

# How long the chief may take to say why it has gone back.
_STATUS_S = 1.0
# Contributions in a row, and how long, that counted for nothing before the worker says so: backup workers take turns.
_MANY_DROPPED, _DROPPED_S = 20, 30.0
# How often a worker that waits for ranges looks whether others wait for it.
_LOOK_AGAIN_S = 0.1


class WorkerCalls:
    """A worker and the parts that carry out its requests: `run(worker.…, acts)`. For one thread."""

    def __init__(self, member: Membership, spans: StepSpans | None = None) -> None:
        self._member, self._spans = member, spans
        self.worker = Worker(member.place, begin_wait=Wait, timeout_s=member.link.transport.timeout_s)
        self._declared: Declared | None = None
        self._memories: Memories | None = None
        self._training: Training | None = None  # at the worker's place; None before there is a model
        self._next: Training | None = None  # at the place that it is coming to
        self._num_dropped, self._dropped_since_s = 0, 0.0  # contributions, since the last one that counted
        self._lane: Lane | None = None
        self._lease: tuple[ask.LeaseAhead, Job] | None = None  # that is asked for in the lane
        self.acts: dict[type, Callable[[Any], Any]] = {
            **member.acts,
            ask.Agree: self._agree,
            ask.Complete: self._complete,
            ask.Count: self._count,
            ask.AwaitToken: self._await_token,
            ask.Lease: self._lease_ranges,
            ask.LeaseAhead: self._lease_ahead,
            ask.Create: self._create,
            ask.Open: self._open,
            ask.Arrived: self._arrived,
            ask.HearShards: lambda request: member.hear_of_shards(request.version),
            ask.StateUnreadable: self._state_unreadable,
            ask.FreeGradients: lambda _: None,
            ask.ProtectGradients: lambda _: None,
            ask.Skipping: self._skipping,
        }
        if spans is not None:
            self.acts = spans.around(self.acts)

    @property
    def training(self) -> Training | None:
        """The shards and the memory at the worker's present place."""
        return self._training

    def join(self, declared: Declared, *, create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it."""
        self._declared = declared
        try:
            return ask.run(self.worker.join(declared.model, may_create=create, timeout_s=timeout_s), self.acts)
        finally:
            self._declared = None

    def close(self) -> None:
        """Ends requests for ranges; leased ranges go back when the worker leaves. Idempotent."""
        if self._lane is not None:
            self._lane.close()
        if self._spans is not None:
            self._spans.end()

    # -- the model

    def _agree(self, request: ask.Agree) -> ModelReply:
        participant, model, wait, may_create = request
        max_wait_s = 0.0 if wait is None else wait.slice_s()
        return self._member.link.ask(
            RegisterModelRequest(participant=participant, model=model, max_wait_s=max_wait_s, joins_only=not may_create),
            what="agree on the model",
            before=self._member.await_renewal,
        )

    def _create(self, request: ask.Create) -> None:
        declared, shards = self._declared, self._member.shards()
        assert declared is not None
        self._memories = memories_of(declared.model, request.reply, self._memories, num_shards=len(shards))
        values = _filled(self._memories.variables, declared.values)
        shards.create(values, tables=declared.values, model=declared.model, reply=request.reply)

    def _complete(self, request: ask.Complete) -> None:
        participant, attempt = request
        try:
            self._member.link.ask(
                CompleteInitializationRequest(participant=participant, attempt=attempt),
                what="complete the initialization",
                before=self._member.await_renewal,
            )
        except NotInitializer as error:
            log.warning("the first values came too late, another worker gives them: %s", error)
            raise
        log.info("model created worker=%d attempt=%d", participant.index, attempt)

    def _open(self, request: ask.Open) -> None:
        member, former = self._member, self._training
        model = request.model
        # Only now: a server that is away is the chief's affair, which has the words for it.
        shards = member.shards()
        memories = memories_of(model, request.reply, self._memories, num_shards=len(shards))
        shards.share(memories.variables.layouts)
        is_shared = "shared_memory" in shards.transports
        if request.has_created and is_shared:
            # The first values need not stay where nothing will be read into.
            memories = memories_of(model, request.reply, None, num_shards=len(shards))
        self._memories = memories
        gives_several = former.gives_several if former is not None else is_shared and self._gives_several()
        self._next = Training(memories, member=member, state=self.worker.state, who=self.worker.who, gives_several=gives_several)

    def _gives_several(self) -> bool:
        status = self._member.link.ask(ClusterStatusRequest(), what="how many workers there are")
        return 0 < status.total_num_replicas < status.replicas_to_aggregate

    def _arrived(self, request: ask.Arrived) -> None:
        former, self._training, self._next = self._training, self._next, None
        assert self._training is not None
        acts = self._training.acts()
        self.acts.update(acts if self._spans is None else self._spans.around(acts))
        if former is not None:
            former.release()
        if request.former is not None and request.cause is not None:
            log.warning("%s: %s", self.worker.who, self._words(request.former, request.cause))

    def _words(self, former: Participant, cause: PsError) -> str:
        """Says where the worker continues, and why there."""
        state = self.worker.state
        participant, step = state.participant, state.local_step
        if participant.shares_era(former):
            # If its calls were cancelled, the end of the lease was the reason.
            why = "its lease had ended" if isinstance(cause, Cancelled) else _without_advice(cause)
            return f"continues at step {step} as incarnation {participant.incarnation}: {why}"
        with suppress(PsError):
            found = self._member.status(max_ledger_entries=0, timeout_s=_STATUS_S)
            if found.epoch == participant.era.epoch and f"(epoch {found.epoch})" in found.last_rollback:
                is_there = found.last_rollback.startswith(f"rolled back to step {step} ")
                return found.last_rollback if is_there else f"{found.last_rollback}; continues at step {step}"
        return f"rolled back to step {step} (epoch {participant.era.epoch}): {_without_advice(cause)}"

    # -- counting and waiting

    def _count(self, request: ask.Count) -> CommitResult:
        participant, commit, is_question = request
        if not is_question:
            failpoint("worker.commit.before")
        result = self._member.link.ask(
            CommitPushRequest(participant=participant, commit=commit),
            what=f"count a push to step {commit.step}",
            before=self._member.await_renewal,
        )
        if not is_question:
            self._note_outcome(participant, commit, result)
        return result

    def _await_token(self, request: ask.AwaitToken) -> TokenReply:
        participant, local_step, request_id, commit, wait = request
        if commit is not None:
            failpoint("worker.commit.before")
        max_wait_s = wait.slice_s()
        reply = self._member.link.ask(
            DequeueTokenRequest(
                participant=participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
            what=f"a token after step {local_step}",
            timeout_s=wait.left_s(),
            before=self._member.await_renewal,
        )
        if commit is not None and reply.commit is not None:
            self._note_outcome(participant, commit, reply.commit)
        if reply.result is not TokenResult.WAIT:
            failpoint("worker.token.after")
        return reply

    def _state_unreadable(self, request: ask.StateUnreadable) -> None:
        log.warning("%s: %s; it continues with an empty user_state", self.worker.who, request.cause.message)

    def _note_outcome(self, participant: Participant, commit: PushCommit, result: CommitResult) -> None:
        if result.outcome is PushOutcome.ACCEPTED:
            self._num_dropped = 0
        elif result.outcome is not PushOutcome.DUPLICATE:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self._dropped_since_s = time.monotonic()
            if self._num_dropped >= _MANY_DROPPED and time.monotonic() - self._dropped_since_s >= _DROPPED_S:
                self._dropped_since_s = math.inf  # said once
                log.warning(
                    "none of the last %d contributions of worker %d counted, because steps were complete without it: its work is lost."
                    " `lockstep status` shows how many contributions a step takes; a chief takes those of all with --workers N",
                    self._num_dropped,
                    participant.index,
                )
        if (history := self._member.link.transport.history) is not None:
            outcome = result.original_outcome.name
            history.write(Answered(push_id=commit.push_id, epoch=participant.era.epoch, outcome=outcome, applied_step=result.applied_step))

    # -- the training data

    def _lease_ahead(self, request: ask.LeaseAhead) -> None:
        if self._lease is None and not self._member.link.transport.is_in_process:
            if self._lane is None:
                self._lane = Lane(f"lockstep-{request.participant.index}-data")
            self._lease = request, self._lane.submit(lambda: self._ranges(request, max_wait_s=0.0, timeout_s=None))

    def _lease_ranges(self, request: ask.Lease) -> LeaseReply:
        begun, self._lease = self._lease, None
        if begun is not None and begun[0][:3] == request[:3]:
            begun[1].wait()
            if begun[1].error is not None:
                raise begun[1].error
            reply: LeaseReply = begun[1].result
            return reply
        max_wait_s = min(request.wait.slice_s(), _LOOK_AGAIN_S) if request.is_brief else request.wait.slice_s()
        return self._ranges(request, max_wait_s=max_wait_s, timeout_s=request.wait.left_s())

    def _ranges(self, request: ask.Lease | ask.LeaseAhead, *, max_wait_s: float, timeout_s: float | None) -> LeaseReply:
        participant, spec, request_id, held = request[:4]
        return self._member.link.ask(
            LeaseRangesRequest(
                participant=participant, data=spec, max_ranges=NUM_AHEAD, request_id=request_id, max_wait_s=max_wait_s, held=held
            ),
            what=f"ranges of {spec.name!r}",
            timeout_s=timeout_s,
            before=self._member.await_renewal,
        )

    def _skipping(self, request: ask.Skipping) -> None:
        log.warning(
            "%s: %d ranges of %r were yielded here and no contribution was made from them: they count as done, without gradients",
            self.worker.who,
            request.num_ranges,
            request.spec.name,
        )


def _filled(variables: ModelMemory, values: Mapping[str, Array]) -> ModelMemory:
    for name, array in variables.arrays.items():
        np.copyto(array, values[name])
    variables.pack()
    return variables


def _without_advice(cause: PsError) -> str:
    """Returns an error's message without the advice at its end, which has been followed."""
    return cause.message.removesuffix(" Connect again").removesuffix(" Register again").rstrip(".")
