"""A worker of a simulated cluster: the SDK's own core in a simulated world. It checks what it reads.

Knows the calls of chief and shards; decides nothing that a session decides. It never stops by itself.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import PsError, StepGone, WorkerIndexTaken
from ps_protocol.model.data import DataSpec
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import PHASE, RATE, StepHyperparameter
from ps_protocol.model.spec import ModelSpec, layouts
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import CommitResult, InnerSteps, ModelReply, Participant, PushCommit, Registration
from ps_protocol.roles.contribution import Attachments, PushId
from ps_protocol.roles.history import Answered, History, contributed
from ps_protocol.roles.shard import PushHeader, PushReply, PushResult, ShardSpec, SparsePart
from tests.simulation.arenas import FIRST_VALUE, arena_of, push_of
from tests.simulation.epochs import era_of
from tests.simulation.oracle import BrokenPromise, Oracle, gradient_of, index_of, lie_of, phase_of, rate_of
from tests.simulation.rules import broken_by_speed, pace_s_of, weight_of
from tests.simulation.tasks import Answer, Life, Sleep
from tests.simulation.worker_calls import WorkerCalls
from tests.simulation.world import World
from worker_client.core.data import WorkerData
from worker_client.core.outcomes import Push
from worker_client.core.place import Place
from worker_client.core.sides import Rows
from worker_client.core.worker import Worker

_NO_LIMIT_S = 1e9
# More than any server stages for one worker.
_MANY = 12
_NOTHING = np.empty(0, np.uint8)


class WorkerNode:
    """One worker process; implements WorkerSide and ModelSide. `on_end` is told why it ends, if it does."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        index: int,
        pid: int,
        model: ModelSpec,
        servers: tuple[str, ...],
        num_shards: int,
        chief: str,
        lease_s: float,
        oracle: Oracle,
        compute_s: float,
        data: DataSpec | None,
        takes_over: bool,
        history: History | None,
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._oracle = world, life, oracle
        self._index, self._pid, self._model, self._num_shards = index, pid, model, num_shards
        self._calls = WorkerCalls(world, index=index, pid=pid, servers=servers, chief=chief, takes_over=takes_over)
        self._lease_s, self._compute_s, self._on_end = lease_s, compute_s, on_end
        self._data, self._history = data, history
        self._worker: Worker[WorkerNode] | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._held_step: int | None = None
        self._is_over = False
        # What the next commit or token is asked with.
        self._commit: PushCommit | None = None
        self.num_steps = 0
        # The life of the cluster whose model it holds; 0: none yet.
        self.life_of_model = 0
        # The next contribution is committed and not given to all shards; and whether one has been.
        self.forges = self.forges_nowhere = self.has_forged = False
        # The servers that it gives other gradients with the next contribution than it gives their twins.
        self.lies_to: tuple[str, ...] = ()
        # After the next contribution it gives as many more as shards take, and commits none of them.
        self.hoards = False
        world.spawn(life, self._run(), self._ended)

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls a worker."""
        raise AssertionError(method)

    def _ended(self, value: object) -> None:
        self._is_over = True
        self._world.note(f"{self._life.name} ends: {value}")
        self._on_end(type(value).__name__ if isinstance(value, PsError) else str(value))

    @property
    def local_step(self) -> int:
        """The step of its variables."""
        return 0 if self._worker is None else self._worker.state.local_step

    @property
    def is_joined(self) -> bool:
        """Whether it has a place and knows the model."""
        return self._worker is not None and bool(self._layouts)

    @property
    def participant(self) -> Participant:
        """Whom the chief has made it."""
        assert self._worker is not None
        return self._worker.place.participant

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the shards."""
        return self._layouts

    # -- the program

    async def _run(self) -> str:
        calls = self._calls
        calls.place = place = Place(await self._enter(), calls)
        self._worker = worker = Worker[WorkerNode](place, chief=calls, own=self, timeout_s=_NO_LIMIT_S)
        self._world.spawn(self._life, self._beat(place))
        await worker.join(self._model, may_create=True, timeout_s=None)
        data = None
        if self._data is not None:
            data = WorkerData(self._data, worker)
        while not worker.state.is_finished:
            while data is not None:
                if await data.next(timeout_s=None) is None:
                    data = None
                elif not self._world.chance(0.1):
                    break
            await worker.read(is_copied=False)
            await Sleep(self._compute_s * self._world.between(0.5, 1.5))
            # As push() and then wait(); the others as step().
            is_step = self._index % 2 == 0
            attached = Attachments(hyperparameters=self._hyperparameters(worker))
            worker.user_state["made"] = [self._pid, worker.state.participant.incarnation, worker.state.num_pushes + 1]
            worker.state.inner = InnerSteps(num=2, duration_s=2 * pace_s_of(self._index))
            outcome = await worker.contribute((), is_waited_for=is_step, attached=attached, weight=weight_of(self._index))
            self._heard(outcome)
            if not is_step:
                await worker.wait(timeout_s=None)
            self.num_steps += 1
        return "finished"

    def _hyperparameters(self, worker: "Worker[WorkerNode]") -> tuple[StepHyperparameter, ...]:
        """What the contribution that is made now has its step use."""
        sequence = worker.state.num_pushes + 1
        rate, phase = rate_of(self._index, sequence), phase_of(sequence)
        if rate is None or worker.state.policy.applies_on_arrival:
            return ()
        phases = (StepHyperparameter(group="", name=PHASE, value=float(phase)),) if phase else ()
        return (StepHyperparameter(group="", name=RATE, value=rate), *phases)

    def _heard(self, outcome: Push) -> None:
        """What the program is told must hold where it is now."""
        self._world.seen[f"program told {outcome.outcome.name}"] += 1
        commit, worker = self._commit, self._worker
        assert worker is not None
        if words := broken_by_speed(self._index, worker.state.speed):
            raise BrokenPromise(words)
        if outcome.is_accepted and commit is not None:
            result = CommitResult(outcome=outcome.outcome, global_step=outcome.global_step, applied_step=outcome.applied_step)
            self._oracle.told_commit(era_of(worker.state.participant), commit.push_id, result)

    async def _enter(self) -> Registration:
        while True:
            try:
                return await self._calls.enter()
            except WorkerIndexTaken:
                await Sleep(0.3)

    async def _beat(self, place: Place) -> None:
        while not self._is_over:
            await Sleep(self._lease_s / 3)
            try:
                await place.beat()
            except PsError:
                self._world.seen["heartbeat failed"] += 1

    # -- the worker's own side

    def heard_of_shards(self) -> None:
        """Does nothing: its calls go by the registration."""

    async def came_back(self, former: Participant, cause: PsError) -> None:
        """Logs nothing."""

    def warn(self, message: str) -> None:
        """Logs nothing."""

    def counts(self, commit: PushCommit) -> None:
        """Has the oracle know."""
        self._commit = commit
        self._oracle.contributed(self.participant.era.life, commit.push_id, commit.step, commit.ranges, commit.attached.user_state)

    def counted(self, commit: PushCommit, result: CommitResult) -> None:
        """Writes the outcome into the history, as a session does."""
        assert self._worker is not None
        if self._history is not None:
            epoch, outcome = self._worker.state.participant.era.epoch, result.original_outcome.name
            self._history.write(Answered(push_id=commit.push_id, epoch=epoch, outcome=outcome, applied_step=result.applied_step))

    async def create(self, reply: ModelReply) -> None:
        """Creates the variables."""
        participant = self.participant
        self._layouts = layouts(reply.placement, num_shards=self._num_shards)
        specs = [
            ShardSpec(
                epoch=participant.era.epoch,
                shard=index,
                layout=layout,
                optimizer=self._model.optimizer,
                initial_step=reply.global_step,
                attempt=reply.attempt,
                max_staged_per_worker=reply.max_staged_per_worker,
                clip=self._model.clip,
            )
            for index, layout in enumerate(self._layouts)
        ]
        contents = [arena_of(layout, lambda size: np.full(size, FIRST_VALUE, np.float32)) for layout in self._layouts]
        await self._at_all("create", list(zip(specs, contents, strict=True)))

    async def open(self, model: ModelSpec, reply: ModelReply, *, has_created: bool) -> "WorkerNode":
        """Learns how the variables are placed."""
        self._layouts = layouts(reply.placement, num_shards=self._num_shards)
        self._held_step, self.life_of_model = None, self.participant.era.life
        return self

    # -- its shards and its memory

    async def stage(self, content: Any, step: int, *, is_waited_for: bool) -> Any:
        """Makes the gradients only when they are sent."""
        return content

    async def push(self, staged: Any, push_id: PushId, step: int, *, refused: tuple[int, ...]) -> list[PushResult]:
        """Gives all shards their parts, or does what no worker should."""
        me, has_gradient = self.participant, staged is not None
        if not has_gradient:
            self._world.seen["contribution without a gradient"] += 1
            self._oracle.contributed_nothing(me.era.life, push_id)
        calls = []
        for index, layout in enumerate(self._layouts):
            content, num_rows = self._gradient(push_id, index) if has_gradient else (_NOTHING, 0)
            header = PushHeader(
                era=me.era,
                push_id=push_id,
                step=step,
                layout_hash=layout.hash,
                sparse=(SparsePart(table=0, num_rows=num_rows),) if has_gradient else (),
                absent=() if has_gradient else tuple(range(len(layout.slices))),
                refused=refused,
                secret=me.secret,
            )
            if self._history is not None:
                self._history.write(contributed(header, shard=index), [content])
            calls.append((header, content))
        num_given = len(calls)
        if self.forges:
            self.forges, self.has_forged = False, True
            num_given = int(self._world.between(0 if self._data is None or self.forges_nowhere else 1, len(calls)))
            if num_given < len(calls):
                self._oracle.forged(push_id)
        if self.lies_to and has_gradient:
            self._lie(push_id)
        replies: list[PushReply] = await self._at_all("push", calls[:num_given]) if num_given else []
        if self.hoards:
            self.hoards = False
            await self._hoard(calls)
        return [reply.result for reply in replies] + [PushResult.STAGED] * (len(calls) - num_given)

    def _lie(self, push_id: PushId) -> None:
        """Has some servers get, however often it is sent, something else as this contribution."""
        lies_to, self.lies_to = self.lies_to, ()
        self._world.seen["worker gave two servers different gradients"] += 1
        self._oracle.has_heard_lies = True
        for name in lies_to:
            layout, shard = self._layouts[index_of(name)], index_of(name)
            lie, _ = push_of(layout, push_id, lambda size, shard=shard: lie_of(push_id, shard=shard, size=size))  # type: ignore[misc]
            self._calls.lies[name, push_id] = lie

    async def _hoard(self, calls: list[tuple[PushHeader, Array]]) -> None:
        """Gives more contributions than any server may take, commits none and says nothing of them."""
        worker = self._worker
        assert worker is not None
        for _ in range(_MANY):
            push_id = worker.state.number_push()
            for index, (header, content) in enumerate(calls):
                for error in await self._calls.once_at(index, "push", (replace(header, push_id=push_id, refused=()), content)):
                    self._world.seen[f"hoarder told {type(error).__name__}"] += 1

    def expect(self, step: int, names: Collection[str] | None = None) -> None:
        """Tells nobody."""

    async def fetch(self, step: int, *, may_view: bool, names: Collection[str] | None = None) -> None:
        """Reads the variables of a step."""
        if self._held_step == step:
            return
        me = self.participant
        try:
            read = await self._at_all("read", [(me.era.epoch, step, one.hash, one.nbytes) for one in self._layouts])
        except StepGone:
            self._world.seen["step gone before it was read"] += 1
            raise
        self._oracle.read(era_of(me), step, {index: arena for index, (_, arena) in enumerate(read)}, by=self._life.name)
        self._held_step = step

    async def fetch_newest(self, *, is_aligned: bool) -> int | None:
        """Reads the newest variables; those of shards that have gone ahead once more, at the step of the others, if they keep that."""
        me = self.participant
        read = await self._at_all("read", [(me.era.epoch, None, one.hash, one.nbytes) for one in self._layouts])
        least = min(step for step, _ in read)
        if is_aligned and any(step > least for step, _ in read):
            self._world.seen["shards were read at two steps"] += 1
            try:
                read = await self._at_all("read", [(me.era.epoch, least, one.hash, one.nbytes) for one in self._layouts])
            except StepGone:
                self._world.seen["the newest were not of one step"] += 1
        for index, (step, arena) in enumerate(read):
            self._oracle.read(era_of(me), step, {index: arena}, by=self._life.name)
        self._held_step = None
        steps: list[int] = [step for step, _ in read]
        return min(steps)

    async def give(self, *, is_copied: bool, names: Collection[str] | None = None) -> dict[str, Array]:
        """Gives nothing: it has been checked."""
        return {}

    @property
    def held_step(self) -> int | None:
        """The step of what it has read."""
        return self._held_step

    @property
    def has_dense(self) -> bool:
        """Returns True."""
        return True

    async def read_rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool) -> Rows:
        """Its program reads none."""
        raise AssertionError(name)

    async def free_gradients(self, timeout_s: float | None) -> None:
        """Its gradients lie nowhere."""

    def protect_gradients(self) -> None:
        """Its gradients lie nowhere."""

    def release(self) -> None:
        """Its gradients lie nowhere."""

    async def _at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        me = self.participant
        # As connections are given up when the heartbeat has heard that the epoch is over.
        return await self._calls.at_all(method, arguments, is_over=lambda: self.participant is not me)

    def _gradient(self, push_id: PushId, index: int) -> tuple[Array, int]:
        return push_of(self._layouts[index], push_id, lambda size: gradient_of(push_id, shard=index, size=size))
