"""An inbox at a step, and functions that open, fill and stage contributions as workers do. Asserts nothing."""

from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushHeader, PushReply, PushResult
from ps_server.contributions.inbox import Contribution, Inbox
from ps_server.contributions.shared_buffers import SharedBuffer, SharedBuffers
from ps_server.contributions.staging import StagingMemory
from ps_server.numbers.memory import BufferPool, MemoryBudget
from tests.support.chief.eras import era

NBYTES = 64
LAYOUT = Layout([VariableSlice(variable=VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(16,)), start=0, stop=16)])
STEP = 5


class StagingShard:
    """An inbox and its pool, at a step."""

    def __init__(self, *, max_staged_per_worker: int = 2, limit_bytes: int | None = None) -> None:
        self.budget = MemoryBudget(limit_bytes, owner="ps 0")
        self.pool = BufferPool(NBYTES, budget=self.budget)
        staging = StagingMemory(LAYOUT, self.pool, budget=self.budget)
        self.released: list[SharedBuffer] = []
        self.shared = SharedBuffers(release=self.released.append)
        self.inbox = Inbox(staging, max_staged_per_worker=max_staged_per_worker, shared=self.shared)
        self.step = STEP

    def open(
        self,
        worker: int = 0,
        *,
        incarnation: int = 1,
        sequence: int = 1,
        step: int = STEP,
        gradient_buffer: int | None = None,
        refused: tuple[int, ...] = (),
        resumes: bool = False,
    ) -> Contribution:
        push_id = PushId(worker=worker, incarnation=incarnation, sequence=sequence)
        header = PushHeader(
            era=era(1), push_id=push_id, step=step, layout_hash=LAYOUT.hash, gradient_buffer=gradient_buffer, refused=refused
        )
        return self.inbox.open(header, current_step=self.step, resumes=resumes)

    def fill(self, contribution: Contribution, value: int = 1) -> bool:
        memory = self.inbox.begin_write(contribution)
        if memory is None:
            return False
        memory.writer.write(0, bytes([value]) * NBYTES)
        self.inbox.end_write(contribution)
        return True

    def stage(self, contribution: Contribution) -> PushReply:
        return self.inbox.stage(contribution, current_step=self.step)

    def push(
        self,
        worker: int = 0,
        *,
        incarnation: int = 1,
        sequence: int = 1,
        step: int = STEP,
        value: int = 1,
        refused: tuple[int, ...] = (),
    ) -> PushResult:
        contribution = self.open(worker, incarnation=incarnation, sequence=sequence, step=step, refused=refused)
        self.fill(contribution, value)
        return self.stage(contribution).result

    def values(self, *push_ids: PushId) -> list[int]:
        contributions = self.inbox.select(push_ids, step=self.step)
        return [int(contribution.memory.dense[0]) for contribution in contributions if contribution.memory is not None]

    def advance(self) -> None:
        self.step += 1
        self.inbox.advance(self.step)

    @property
    def num_lent(self) -> int:
        return self.pool._num_lent


def push_id(worker: int, *, incarnation: int = 1, sequence: int = 1) -> PushId:
    """The id of a push."""
    return PushId(worker=worker, incarnation=incarnation, sequence=sequence)
