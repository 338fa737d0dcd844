"""Contributions in memory that workers may write at any time: which are found, when a slot is free, what remains of a worker that left."""

import numpy as np
import pytest

from ps_protocol.errors import ContributionMissing, InvalidSpec
from ps_protocol.roles.shard import PushHeader, PushResult
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.buffers import GradientBuffers
from ps_protocol.shared_memory.words import PushMode, private_words
from ps_server.contributions.shared_buffers import SharedBuffer
from tests.support.chief.eras import era
from tests.support.parameter_servers.staging import LAYOUT, NBYTES, STEP, StagingShard, push_id

EPOCH = 4


class _Sharing:
    """One worker's slots, as both sides have them, at a shard that collects for STEP."""

    def __init__(self, shard: StagingShard, *, num_buffers: int = 1, incarnation: int = 1) -> None:
        self.shard = shard
        self.board = private_words()
        self.board[at.MODE], self.board[at.OPEN_STEP] = PushMode.OPEN_STEP_ONLY, STEP
        self.worker = GradientBuffers(self.board, worker=0, incarnation=incarnation)
        self.slots = []
        for _ in range(num_buffers):
            memory, words = np.zeros(NBYTES, np.uint8), private_words()
            self.slots.append(SharedBuffer(memory, words, worker=0, incarnation=incarnation, epoch=EPOCH))
            self.worker.add(memory, words)
        shard.shared.advance(STEP, accepts_any_step=False)
        shard.inbox.claim(worker=0, incarnation=incarnation)
        shard.inbox.share(self.slots)

    def header(self, sequence: int, *, step: int = STEP, epoch: int = EPOCH) -> PushHeader:
        return PushHeader(era=era(epoch), push_id=push_id(0, sequence=sequence), step=step, layout_hash=LAYOUT.hash)

    def push(self, sequence: int, *, value: int = 1, epoch: int = EPOCH) -> PushResult | None:
        """What the worker does without a call; None if it needs one."""
        header = self.header(sequence, epoch=epoch)
        slot = self.worker.free()
        if slot is None or not self.worker.can_commit(header):
            return None
        slot.memory[:] = value
        return self.worker.commit(slot, header).result

    def apply(self, *sequences: int) -> None:
        inbox, step = self.shard.inbox, self.shard.step
        inbox.end(inbox.select([push_id(0, sequence=sequence) for sequence in sequences], step=step), step=step)
        self.shard.advance()
        self.board[at.OPEN_STEP] = self.shard.step


@pytest.fixture
def shard() -> StagingShard:
    return StagingShard()


def test_a_contribution_completed_without_a_call_is_found(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    assert sharing.push(1, value=7) is PushResult.STAGED
    assert shard.inbox.num_staged == 1
    assert shard.values(push_id(0, sequence=1)) == [7]


def test_slot_that_is_being_written_holds_nothing(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    sharing.apply(1)
    sharing.worker.free()
    assert sharing.slots[0].whole() is None


@pytest.mark.parametrize(
    ("position", "value"),
    [(at.SEQUENCE, 2), (at.SEQUENCE, at.NO_STEP), (at.OF_STEP, STEP - 1), (at.OF_STEP, at.NO_STEP), (at.OF_EPOCH, EPOCH + 1), (at.DONE, 1)],
)
def test_header_with_a_wrong_number_is_no_contribution(shard: StagingShard, position: int, value: int) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    sharing.slots[0].words[position] = value
    with pytest.raises(ContributionMissing):
        shard.values(push_id(0, sequence=1))


def test_a_slot_header_full_of_ones_is_ignored(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    for position in range(at.HEADER_BYTES // 8):
        sharing.slots[0].words[position] = at.NO_STEP
    assert shard.push(1) is PushResult.STAGED
    assert shard.values(push_id(1)) == [1]
    assert shard.inbox.num_pushes == 1


def test_slot_is_free_again_once_it_is_applied(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    assert sharing.worker.free() is None
    sharing.apply(1)
    sharing.board[at.OPEN_STEP] = STEP  # as long as the shard has not said so, it is the header's last word that counts
    assert sharing.worker.free() is not None


def test_a_slot_is_free_again_once_its_step_is_over(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    sharing.board[at.OPEN_STEP] = STEP + 1
    assert sharing.worker.free() is not None


def test_slot_stays_taken_where_any_step_is_accepted(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    sharing.board[at.MODE], sharing.board[at.OPEN_STEP] = PushMode.ANY_STEP, STEP + 1
    assert sharing.worker.free() is None
    shard.inbox.discard([push_id(0, sequence=1)], current_step=STEP)
    assert sharing.worker.free() is not None


def test_slot_of_a_refused_contribution_is_free(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    assert sharing.worker.release([1]) == ()
    assert shard.inbox.num_staged == 0
    assert sharing.push(2) is PushResult.STAGED


def test_an_unneeded_contribution_is_told_to_the_shard_only_if_it_holds_it(shard: StagingShard) -> None:
    sharing = _Sharing(shard, num_buffers=2)
    sharing.push(1)
    buffer = sharing.worker.free()
    assert buffer is not None
    sharing.worker.begin_call(buffer, (), sharing.header(2))
    sharing.worker.end_call(buffer, sharing.header(2), PushResult.STAGED, is_repeated=False)
    assert sharing.worker.release([1, 2, 3]) == (2, 3)
    sharing.board[at.OPEN_STEP] = STEP + 1
    assert sharing.worker.num_busy == 0
    assert sharing.worker.release([1, 2]) == ()


def test_a_repeated_contribution_is_not_written_again(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1, value=7)
    buffer = sharing.worker.of(push_id(0, sequence=1))
    assert buffer is not None
    assert sharing.worker.begin_call(buffer, (np.full(NBYTES, 9, np.uint8),), sharing.header(1))
    assert shard.values(push_id(0, sequence=1)) == [7]


def test_a_push_in_shared_memory_that_is_repeated_by_a_call_is_recognised(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    assert sharing.push(1) is None
    assert shard.open(0, sequence=1).outcome is not None
    sharing.apply(1)
    assert shard.open(0, sequence=1, step=STEP).outcome is not None
    assert (shard.inbox.num_pushes, shard.inbox.num_duplicates) == (1, 2)


def test_pushes_in_memory_and_by_call_share_one_limit(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    assert shard.push(sequence=2) is PushResult.STAGED
    assert shard.inbox.num_staged == 2
    with pytest.raises(Exception, match="worker 0: 2 pushes in flight, limit 2"):
        shard.open(sequence=3)


def test_a_complete_contribution_of_a_lost_worker_is_applied(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1, value=9)
    shard.shared.remove(sharing.slots)
    assert not shard.released
    assert shard.values(push_id(0, sequence=1)) == [9]
    sharing.apply(1)
    assert shard.released == sharing.slots


def test_the_slots_of_a_lost_worker_are_released_when_their_step_is_over(shard: StagingShard) -> None:
    sharing = _Sharing(shard, num_buffers=2)
    sharing.push(1)
    shard.shared.remove(sharing.slots)
    assert shard.released == [sharing.slots[1]]
    shard.advance()
    assert len(shard.released) == 2


def test_worker_that_was_lost_may_contribute_once_more(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    shard.shared.remove(sharing.slots, is_lost=True)
    sharing.push(1, value=3)
    assert shard.values(push_id(0, sequence=1)) == [3]
    sharing.apply(1)
    assert not shard.released
    shard.advance()
    assert shard.released == sharing.slots


def test_a_slot_that_the_shard_gave_up_is_marked_closed_for_its_worker(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    assert not sharing.slots[0].words[at.CLOSED]
    shard.shared.remove(sharing.slots, is_lost=True)
    assert sharing.slots[0].words[at.CLOSED]


def test_an_announced_contribution_keeps_its_slot(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    contribution = shard.open(0, gradient_buffer=0)
    assert contribution.memory is not None and contribution.memory.dense is sharing.slots[0].memory
    shard.shared.remove(sharing.slots)
    assert not shard.released
    shard.inbox.abandon(contribution)
    assert shard.released == sharing.slots


def test_a_gradient_buffer_that_the_worker_does_not_have_is_refused(shard: StagingShard) -> None:
    _Sharing(shard)
    with pytest.raises(InvalidSpec, match="it has 1 gradient buffers in shared memory, not one of number 1"):
        shard.open(0, gradient_buffer=1)
    with pytest.raises(InvalidSpec, match="it has 0 gradient buffers"):
        shard.open(1, gradient_buffer=0)


def test_a_new_epoch_discards_contributions_in_slots(shard: StagingShard) -> None:
    sharing = _Sharing(shard)
    sharing.push(1)
    shard.inbox.clear(InvalidSpec("a new epoch"))
    assert shard.released == sharing.slots
    with pytest.raises(ContributionMissing):
        shard.values(push_id(0, sequence=1))
