"""A worker's buffers for gradients: the free ones, and the contribution in each. Knows memory and numbers; no lock, no RPC."""

from collections.abc import Sequence

from ps_protocol.model.layout import Segments
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushHeader, PushReply, PushResult
from ps_protocol.shared_memory import words as at
from ps_protocol.shared_memory.words import PushMode, Words


@light_dataclass(slots=True, eq=False)
class GradientBuffer:
    """One buffer. `sequence`: of the contribution that it was last used for; `is_busy`: that may still be applied, for all we know here."""

    index: int
    memory: Array
    words: Words
    sequence: int = 0
    step: int = 0
    is_busy: bool = False

    def fill(self, pieces: Sequence[Array]) -> None:
        """Copies pieces that together are an arena into the buffer, unless they are the buffer itself."""
        if pieces and pieces[0] is not self.memory:
            Segments([self.memory]).copy_from(Segments(pieces))


class GradientBuffers:
    """The buffers that one incarnation of a worker has at one shard. `board`: what the shard publishes. For one thread at a time."""

    def __init__(self, board: Words, *, worker: int, incarnation: int) -> None:
        self._board = board
        self.worker = worker
        self._incarnation = incarnation
        self._buffers: list[GradientBuffer] = []
        self._current: GradientBuffer | None = None
        self._kept: GradientBuffer | None = None
        self._last_sequence = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def are_of(self, push_id: PushId) -> bool:
        """Whether these buffers belong to the worker of a contribution."""
        return push_id.worker == self.worker and push_id.incarnation == self._incarnation

    @property
    def is_closed(self) -> bool:
        """Whether the shard has given these buffers up, even if no call has said so yet."""
        return bool(self._buffers) and self._buffers[0].words[at.CLOSED] != 0

    @property
    def num_busy(self) -> int:
        """Buffers whose contributions may still be applied."""
        return sum(self._is_busy(buffer) for buffer in self._buffers)

    def add(self, memory: Array, words: Words) -> None:
        """Adds a buffer."""
        words[at.WORKER], words[at.INCARNATION] = self.worker, self._incarnation
        self._buffers.append(GradientBuffer(len(self._buffers), memory, words))

    def free(self) -> GradientBuffer | None:
        """Returns the buffer for the next contribution, the same one until it has been used; None if none is free.

        From now on there is no whole contribution in it. The one used last comes first, so that its arrays can be kept.
        """
        if self._current is None:
            found = [buffer for buffer in self._buffers if buffer is not self._kept and not self._is_busy(buffer)]
            if not found:
                return None
            self._current = max(found, key=lambda buffer: buffer.sequence)
            self._current.words[at.SEQUENCE] = 0
            self._current.is_busy = False
        return self._current

    def kept(self) -> GradientBuffer | None:
        """Returns the buffer that is set apart as `kept_memory`; None while what was last in it may be applied, or if none is set apart."""
        buffer = self._kept
        if buffer is None or self._is_busy(buffer):
            return None
        buffer.words[at.SEQUENCE] = 0
        return buffer

    def keep(self, buffer: GradientBuffer) -> None:
        """Sets a free buffer apart for good: `free` gives it no more."""
        self._kept, self._current = buffer, None

    @property
    def has_kept(self) -> bool:
        """Whether a buffer is set apart."""
        return self._kept is not None

    def for_pieces(self, pieces: Sequence[Array]) -> GradientBuffer | None:
        """Returns the buffer for a contribution: the one set apart if the contribution lies in it already, else what `free` returns."""
        if self._kept is not None and pieces and pieces[0] is self._kept.memory:
            return self.kept() or self.free()
        return self.free()

    def of(self, push_id: PushId) -> GradientBuffer | None:
        """Returns the buffer that a contribution has been in, and no later one; None if there is none."""
        return next((buffer for buffer in self._buffers if buffer.sequence == push_id.sequence), None)

    def can_commit(self, header: PushHeader) -> bool:
        """Whether the shard takes this contribution from a buffer without being called, and it is a new one."""
        mode = self._board[at.MODE]
        is_wanted = mode == PushMode.ANY_STEP or (mode == PushMode.OPEN_STEP_ONLY and header.step == self._board[at.OPEN_STEP])
        return is_wanted and header.push_id.sequence > self._last_sequence

    def commit(self, buffer: GradientBuffer, header: PushHeader) -> PushReply:
        """Makes what lies in the buffer a whole contribution."""
        words, sequence = buffer.words, header.push_id.sequence
        words[at.OF_STEP], words[at.OF_EPOCH] = header.step, header.era.epoch
        words[at.NUM_PUSHES] += 1
        words[at.SEQUENCE] = sequence
        self._use(buffer, header)
        return PushReply(result=PushResult.STAGED, step=self._board[at.OPEN_STEP])

    def begin_call(self, buffer: GradientBuffer, arena: Sequence[Array], header: PushHeader) -> bool:
        """Fills the buffer for a call about its contribution; returns whether an earlier call may have reached the shard.

        A contribution that the shard may be using already is not written again.
        """
        is_repeated = buffer.sequence == header.push_id.sequence
        if not (is_repeated and self._is_busy(buffer)):
            buffer.fill(arena)
        buffer.sequence, buffer.step = header.push_id.sequence, header.step
        self.pass_over(header)
        return is_repeated

    def pass_over(self, header: PushHeader) -> None:
        """Notes that this contribution goes to the shard by a call, as every repetition of it does: only the shard knows its outcome."""
        self._last_sequence = max(self._last_sequence, header.push_id.sequence)

    def end_call(self, buffer: GradientBuffer, header: PushHeader, result: PushResult, *, is_repeated: bool) -> None:
        """Notes the shard's answer: whether it holds the buffer now."""
        if result is PushResult.STAGED or (result is PushResult.DUPLICATE and is_repeated):
            self._use(buffer, header)

    def release(self, sequences: Sequence[int]) -> tuple[int, ...]:
        """Frees the buffers of contributions that will never be applied; returns those of `sequences` that the shard has to free itself.

        It holds the contributions that reached it by a call.
        """
        mine = {buffer.sequence: buffer for buffer in self._buffers}
        told = []
        for sequence in sequences:
            buffer = mine.get(sequence)
            if buffer is not None and buffer.is_busy and buffer.words[at.SEQUENCE] == sequence:
                buffer.words[at.SEQUENCE] = 0
                buffer.is_busy = False
            elif buffer is None or buffer.is_busy:
                told.append(sequence)
        return tuple(told)

    def _is_busy(self, buffer: GradientBuffer) -> bool:
        if buffer.is_busy:
            board = self._board
            is_over = buffer.words[at.DONE] == buffer.sequence
            buffer.is_busy = not (is_over or (board[at.MODE] == PushMode.OPEN_STEP_ONLY and board[at.OPEN_STEP] > buffer.step))
        return buffer.is_busy

    def _use(self, buffer: GradientBuffer, header: PushHeader) -> None:
        buffer.sequence, buffer.step, buffer.is_busy = header.push_id.sequence, header.step, True
        if self._current is buffer:
            self._current = None
        self.pass_over(header)


def cut(pieces: Sequence[Array], nbytes: int) -> tuple[list[Array], list[Array]]:
    """Returns the first `nbytes` bytes and the rest, sharing the memory of the pieces."""
    first: list[Array] = []
    rest: list[Array] = []
    for piece in pieces:
        count = min(nbytes, piece.nbytes)
        nbytes -= count
        if count:
            # The piece itself if it is whole: its maker may recognise it by identity.
            first.append(piece if count == piece.nbytes else piece[:count])
        if count < piece.nbytes:
            rest.append(piece[count:] if count else piece)
    return first, rest
