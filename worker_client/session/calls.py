"""The worker's own side of its core: memory and connections of its model, place after place, and what its log says. Decides nothing."""

import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from ps_protocol.errors import Cancelled, PsError
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.chief import ClusterStatusRequest, CommitResult, ModelReply, Participant, PushCommit, PushOutcome
from ps_protocol.roles.history import Answered
from worker_client.core.sides import ChiefSide, run
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


class WorkerCalls:
    """A worker and its own side: `run(worker.…)`. Implements WorkerSide. For one thread."""

    def __init__(self, member: Membership, spans: StepSpans | None = None) -> None:
        self._member, self._spans = member, spans
        chief: ChiefSide = member if spans is None else spans.around(member)
        self.worker = Worker[Training](member.place, chief=chief, own=self, timeout_s=member.link.transport.timeout_s)
        if spans is not None:
            spans.local_step = lambda: self.worker.state.local_step
        self._declared: Declared | None = None
        self._memories: Memories | None = None
        self._num_dropped, self._dropped_since_s = 0, 0.0  # contributions, since the last one that counted

    def join(self, declared: Declared, *, create: bool, timeout_s: float | None) -> bool:
        """Creates or joins the model; returns whether it created it."""
        self._declared = declared
        try:
            return run(self.worker.join(declared.model, may_create=create, timeout_s=timeout_s))
        finally:
            self._declared = None

    def close(self) -> None:
        """Ends the span of the open step. Idempotent."""
        if self._spans is not None:
            self._spans.end()

    # -- the model

    async def create(self, reply: ModelReply) -> None:
        """Creates the variables with the program's first values."""
        declared, shards = self._declared, self._member.shards()
        assert declared is not None
        self._memories = memories_of(declared.model, reply, self._memories, num_shards=len(shards))
        values = _filled(self._memories.variables, declared.values)
        shards.create(values, tables=declared.values, model=declared.model, reply=reply)

    async def open(self, model: ModelSpec, reply: ModelReply, *, has_created: bool) -> Training:
        """Opens connections, and memory for the model."""
        member, former = self._member, self.worker.model_side
        if has_created:
            log.info("model created worker=%d attempt=%d", member.participant.index, reply.attempt)
        # Only now: a server that is away is the chief's affair, which has the words for it.
        shards = member.shards()
        memories = memories_of(model, reply, self._memories, num_shards=len(shards))
        shards.share(memories.variables.layouts)
        is_shared = "shared_memory" in shards.transports
        if has_created and is_shared:
            # The first values need not stay where nothing will be read into.
            memories = memories_of(model, reply, None, num_shards=len(shards))
        self._memories = memories
        gives_several = former.gives_several if former is not None else is_shared and self._gives_several()
        opened = Training(memories, member=member, state=self.worker.state, who=self.worker.who, gives_several=gives_several)
        return opened if self._spans is None else self._spans.around(opened)

    def heard_of_shards(self) -> None:
        """Has the connections follow."""
        self._member.heard_of_shards()

    def _gives_several(self) -> bool:
        status = self._member.link.ask(ClusterStatusRequest(), what="how many workers there are")
        return 0 < status.total_num_replicas < status.replicas_to_aggregate

    async def came_back(self, former: Participant, cause: PsError) -> None:
        """Logs where the worker continues, and why there."""
        self.warn(self._words(former, cause))

    def warn(self, message: str) -> None:
        """Logs a warning."""
        log.warning("%s: %s", self.worker.who, message)

    def _words(self, former: Participant, cause: PsError) -> str:
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

    # -- counting

    def counts(self, commit: PushCommit) -> None:
        """May fail here, in a test."""
        failpoint("worker.commit.before")

    def counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Writes the outcome into the history, and warns of many contributions that were dropped."""
        participant = self.worker.state.participant
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


def _filled(variables: ModelMemory, values: Mapping[str, Array]) -> ModelMemory:
    for name, array in variables.arrays.items():
        np.copyto(array, values[name])
    variables.pack()
    return variables


def _without_advice(cause: PsError) -> str:
    """Returns an error's message without the advice at its end, which has been followed."""
    return cause.message.removesuffix(" Connect again").removesuffix(" Register again").rstrip(".")
