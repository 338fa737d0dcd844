"""The work of a worker with its shards and its memory, at one place: reads, stages, pushes. Knows shards by their seam; asks no chief.

Once the participant's epoch is over, every call raises the servers' error for that, and another training takes this one's place.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ps_protocol.errors import StepGone
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import ModelReply
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import Metric, PushResult
from worker_client.core.sides import Rows
from worker_client.core.state import WorkerState
from worker_client.model.gradient_memory import GradientMemory
from worker_client.model.gradients import FiniteGradients, Gradients, Metrics, ShardPart, ShardParts, Staging, Updates, as_metrics
from worker_client.model.memory import ModelMemory, arranged
from worker_client.session.membership import Membership
from worker_client.session.reading import ModelReader, VariableMemory, holders

_LOOK_AGAIN_S = 0.001


class Contribution(NamedTuple):
    """The user's contribution."""

    gradients: Gradients
    updates: Updates | None
    metrics: Metrics | None


@light_dataclass(frozen=True, slots=True, eq=False)
class ReadyToSend:
    """A contribution as it is sent."""

    parts: Sequence[ShardPart]
    metrics: Mapping[str, Metric]
    staging: Staging


@light_dataclass(frozen=True, slots=True, eq=False)
class Memories:
    """A worker's memory for a model's variables and gradients."""

    model: ModelSpec
    variables: ModelMemory
    gradients: ModelMemory


def memories_of(model: ModelSpec, reply: ModelReply, former: Memories | None, *, num_shards: int) -> Memories:
    """Returns memory for the variables as they are placed: the same as before where that can be."""
    arrangement = arranged(model, reply.placement, num_shards=num_shards)
    if former is not None and [layout.hash for layout in arrangement] == [layout.hash for layout in former.variables.layouts]:
        return former
    variables = ModelMemory(model, layouts=arrangement, is_writable=False)
    return Memories(model, variables, ModelMemory(model, layouts=arrangement, is_writable=True))


class Training:
    """A worker's variables and gradients at one place; implements ModelSide. For one thread. `state`: the worker's steps and contributions.

    `gives_several`: memory is shared, and workers give several contributions to a step (T < R).
    """

    def __init__(self, memories: Memories, *, member: Membership, state: WorkerState, who: str, gives_several: bool) -> None:
        self.memories = memories
        self._member, self._state, self._who, self._traffic = member, state, who, member.traffic
        self._shards = shards = member.shards()
        self._timeout_s = member.link.transport.timeout_s
        self._layouts = memories.variables.layouts
        self._variables = VariableMemory(memories.model, memories.variables, shards)
        self._shard_parts = ShardParts(self._layouts, wire=member.link.transport.wire, travels=shards.memories.travels)
        self._gradients = GradientMemory(memories.model, memories.gradients, give=shards.memories.gradients, give_kept=shards.memories.kept)
        self.gives_several = gives_several
        self._finite = FiniteGradients(memories.model)
        self.reader = ModelReader(
            memories.model,
            layouts=self._layouts,
            shards=shards,
            who=who,
            timeout_s=self._timeout_s,
            applies_on_arrival=member.applies_on_arrival,
        )
        # The last contribution sent from the shards' memory that the user has: its number and step, and whether shards have applied it.
        self._lent: tuple[PushId, int, bool] | None = None

    def release(self) -> None:
        """Notes that no contribution is under way: the user may write again into all memory that he has."""
        self._gradients.unlock(is_over=True)
        self._lent = None

    # -- reading

    @property
    def held_step(self) -> int | None:
        """The step of the held variables; None: they are not of one step."""
        return self._variables.step

    def placement(self) -> dict[str, int]:
        """The shard of each dense variable; of a split one, the first of them."""
        return {piece.variable.name: index for index, layout in reversed([*enumerate(self._layouts)]) for piece in layout.slices}

    @property
    def has_dense(self) -> bool:
        """Whether the model has dense variables."""
        return bool(self._variables.views)

    async def fetch(self, step: int, *, may_view: bool, names: Collection[str] | None = None) -> None:
        """Holds the variables of a step, or those named."""
        variables = self._variables
        if variables.step != step or (variables.is_lent and not may_view):
            began = time.perf_counter()
            if names is None:
                variables.fetch(step, may_view=may_view)
            else:
                variables.fetch_named(step, names)
            self._traffic.num_reads += 1
            self._traffic.reading_s += time.perf_counter() - began

    async def fetch_newest(self, *, is_aligned: bool) -> int | None:
        """Holds the newest variables; returns their step."""
        began = time.perf_counter()
        step = self._variables.fetch_latest(is_aligned=is_aligned)
        self._traffic.num_reads += 1
        self._traffic.reading_s += time.perf_counter() - began
        return step

    async def give(self, *, is_copied: bool, names: Collection[str] | None = None) -> dict[str, Array]:
        """Returns the held variables, or those named."""
        if not is_copied:
            return dict(self._variables.views)
        try:
            return self._variables.copied(names)
        except StepGone:
            self._variables.step = None
            raise

    async def read_rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool) -> Rows:
        """Reads rows of a table."""
        rows = self.reader.rows(name, indices, step=step, is_aligned=is_aligned)
        self._traffic.received_bytes += rows.values.nbytes
        return rows

    # -- giving

    def gradient_buffers(self) -> dict[str, Array]:
        """Returns arrays to write the next contribution into."""
        self._unlock_lent()
        return dict(self._gradients.ask(may_overlap=self._may_overlap).views)

    async def stage(self, content: Contribution | None, step: int, *, is_waited_for: bool) -> ReadyToSend:
        """If the user gets no word before there is a token, in strict sync what he has of the shards' memory is not copied."""
        self._unlock_lent()
        state, may_lend = self._state, is_waited_for and not self._may_overlap
        if content is None:
            metrics: Mapping[str, Metric] = {}
            staging = self._gradients.staging_for({}, may_lend=may_lend)
            staged = staging.nothing()
        else:
            gradients, updates, given = content
            metrics = as_metrics(given) if given else {}
            staging = self._gradients.staging_for(gradients, may_lend=may_lend)
            staged = staging.stage(gradients, step=step, updates=updates)
            if self._member.registration.rejects_nonfinite:
                self._finite.check(staged, who=f"{self._who}, step {step}")
        parts = self._shard_parts.parts(staged, is_last_counted=state.num_pushes not in state.refused)
        return ReadyToSend(parts, metrics, staging)

    async def push(self, staged: ReadyToSend, push_id: PushId, step: int, *, refused: tuple[int, ...]) -> list[PushResult]:
        """Sends all shards their parts."""
        results = self._shards.push(
            staged.parts, layout_hashes=self._shard_parts.layout_hashes, push_id=push_id, step=step, metrics=staged.metrics, refused=refused
        )
        if self._gradients.note_push(staged.staging):
            self._lent = push_id, step, PushResult.APPLIED in results
        return results

    def expect(self, step: int, names: Collection[str] | None = None) -> None:
        """Has shards send the variables of this step as soon as they have them; with names, the shards that hold some of these."""
        among = None if names is None else holders(self._layouts, names)
        self._shards.expect(self.memories.variables, step=step, among=among, held=self._variables.held)

    # -- memory of shards that the user writes into

    @property
    def _may_overlap(self) -> bool:
        """Whether a contribution may be under way when the worker computes the next one: any but strict sync with at most one a step."""
        return self._state.reads_latest or self.gives_several

    def _unlock_lent(self) -> bool:
        """Lets the user write again into the shards' memory that he has, if the contribution from there is over; returns whether it is."""
        if self._lent is None:
            return True
        state, (push_id, step, is_applied) = self._state, self._lent
        is_next_step = not state.reads_latest and state.local_step > step
        is_refused = push_id.sequence in state.refused
        if self._gradients.unlock(is_over=is_next_step or is_applied or state.is_finished or is_refused):
            self._lent = None
        return self._lent is None

    def protect_gradients(self) -> None:
        """Keeps the user from writing where a contribution is being sent from."""
        self._unlock_lent()
        self._gradients.protect()

    async def free_gradients(self, timeout_s: float | None) -> None:
        """Lets the user write again where nothing is being sent from, and waits for that."""
        failpoint("worker.token.after")
        if self._unlock_lent():
            return
        # There is a token, and a contribution from the user's arrays is still under way: he must not write there before it is over.
        if not self._state.reads_latest:
            # The step's token once more: this worker gives several contributions to a step, and from now on each is copied.
            self.gives_several = True
        # Another policy came meanwhile; what had been counted is applied soon, unless that takes more from this worker.
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        wait = Wait(f"{self._who} waits for the end of its last contribution", timeout_s=limit_s)
        while not self.gives_several and not self._unlock_lent() and wait.left_s() and not self._member.is_finished:
            wait.pause(_LOOK_AGAIN_S)
        self._gradients.protect()
