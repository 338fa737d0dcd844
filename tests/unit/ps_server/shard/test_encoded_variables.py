"""Variables are encoded once for all readers of a step: the same bytes, no mixture of steps, and no memory where it is short."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.encodings.moves import encode_moves
from ps_protocol.errors import StepGone
from ps_protocol.model.layout import Layout
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, ReadRequest, ReplicaState, ShardSettings, ShardStatusRequest
from ps_server.serving.local import InProcessShard
from ps_server.shard import encoded_variables
from ps_server.shard.handles import Reading
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of, telling, variable

LARGE = layout_of(variable("w", (700_001,)), variable("d", (9,), DataType.FLOAT64), variable("b", (90_000,)))
FRAME_BYTES = 1 << 18
NUM_FRAMES = len([*encoded_frames(LARGE, np.zeros(LARGE.nbytes, np.uint8), FloatEncoding.BFLOAT16, FRAME_BYTES)])
ENCODED_BYTES = encoded_nbytes(LARGE, FloatEncoding.BFLOAT16)


class _Training:
    """A shard whose variables are other random numbers with each step."""

    def __init__(self, *, memory_limit_bytes: int | None = None) -> None:
        self.shard = ServedShard(index=0, process_incarnation=1, memory_limit_bytes=memory_limit_bytes)
        self.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF)))
        self._words = Trainer(InProcessShard(index=0), LARGE)
        self._step = 0
        self.values = self._words.random(0)
        with self.shard.open_creation(self._words.spec()) as creation:
            creation.write(0, self.values.tobytes())
            creation.finish()

    def take_step(self) -> None:
        """Has the gradients of one worker applied."""
        gradients = self._words.random(1 + self._step)
        header = self._words.header(step=self._step)
        with self.shard.open_push(header) as push:
            push.write(0, gradients.tobytes())
            push.finish()
        self.shard.apply_step(ApplyRequest(fence=fence(EPOCH, CHIEF), step=self._step, contributors=(header.push_id,)))
        self._step += 1
        self.values = content(self.read(), FloatEncoding.AS_IS)

    def read(self) -> Reading:
        """Begins to read the latest variables."""
        return self.shard.open_variables(ReadRequest(epoch=EPOCH, step=None, layout_hash=LARGE.hash))

    def encoded(self, encoding: FloatEncoding = FloatEncoding.BFLOAT16) -> bytes:
        """The latest variables as a reader that encodes for itself gets them."""
        return joined(encoded_frames(LARGE, self.values, encoding, FRAME_BYTES))

    @property
    def allocated_bytes(self) -> int:
        return self.shard.call(ShardStatusRequest()).report.allocated_bytes


def frames(reading: Reading, encoding: FloatEncoding = FloatEncoding.BFLOAT16) -> Iterator[tuple[int, memoryview]]:
    """The frames of a reading."""
    return reading.chunks(FRAME_BYTES, encoding)


def joined(chunks: Iterator[tuple[int, memoryview]]) -> bytes:
    """The bytes of frames that follow one another without a gap."""
    found = b""
    for offset, data in chunks:
        assert offset == len(found)
        found += bytes(data)
    return found


def content(reading: Reading, encoding: FloatEncoding = FloatEncoding.BFLOAT16) -> Array:
    """All that a reader copies."""
    copied = np.frombuffer(joined(frames(reading, encoding)), np.uint8)
    reading.check()
    return copied


def read_by_turns(training: _Training, *, num_readers: int = 2) -> list[bytes]:
    """What readers copy that take one frame each, by turns."""
    readings = [training.read() for _ in range(num_readers)]
    copies = [b""] * num_readers
    for turn in zip_longest(*map(frames, readings)):
        for reader, frame in enumerate(turn):
            assert frame is not None and frame[0] == len(copies[reader])
            copies[reader] += bytes(frame[1])
    for reading in readings:
        reading.check()
    return copies


def with_encoded_variables_and_little_room() -> _Training:
    """A shard with memory for encoded variables, whose limit leaves no room for another contribution beside that."""
    roomy = _Training()
    roomy.take_step()
    training = _Training(memory_limit_bytes=roomy.allocated_bytes + LARGE.nbytes)
    for _ in range(3):
        training.take_step()
        read_by_turns(training)
    assert training.allocated_bytes == roomy.allocated_bytes + ENCODED_BYTES
    return training


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the frames that are encoded, in its only element."""
    counted = [0]

    def counting(
        layout: Layout, memory: Array, encoding: FloatEncoding, max_bytes: int, *, into: Array | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        for frame in encoded_frames(layout, memory, encoding, max_bytes, into=into):
            counted[0] += 1
            yield frame

    monkeypatch.setattr(encoded_variables, "encoded_frames", counting)
    return counted


@pytest.mark.parametrize("encoding", [FloatEncoding.BFLOAT16, FloatEncoding.FLOAT16])
def test_each_reader_of_a_step_gets_the_bytes_that_it_would_encode_for_itself(encoding: FloatEncoding) -> None:
    training = _Training()
    for _ in range(4):
        training.take_step()
        for _ in range(3):
            assert content(training.read(), encoding).tobytes() == training.encoded(encoding)


def test_readers_at_different_places_get_the_same_bytes() -> None:
    training = _Training()
    for _ in range(3):
        training.take_step()
        assert read_by_turns(training) == [training.encoded()] * 2


def test_readers_in_threads_get_the_same_bytes() -> None:
    training = _Training()
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            training.take_step()
            readings = [training.read() for _ in range(4)]
            assert [copy.tobytes() for copy in threads.map(content, readings)] == [training.encoded()] * 4


def test_variables_are_encoded_once_a_step_after_a_step_with_several_readers(num_encoded: list[int]) -> None:
    training = _Training()
    costs = []
    for _ in range(3):
        training.take_step()
        num_encoded[0] = 0
        read_by_turns(training, num_readers=3)
        costs.append(num_encoded[0])
    assert costs == [3 * NUM_FRAMES, NUM_FRAMES, NUM_FRAMES]


def test_a_single_reader_costs_no_memory() -> None:
    training = _Training()
    training.take_step()
    before = training.allocated_bytes
    for _ in range(3):
        training.take_step()
        content(training.read())
    assert training.allocated_bytes == before


def test_a_reader_that_leaves_half_way_keeps_nobody_from_the_rest() -> None:
    training = _Training()
    for _ in range(3):
        training.take_step()
        begun = training.read().chunks(FRAME_BYTES, FloatEncoding.BFLOAT16)
        next(begun)
        begun.close()
        assert read_by_turns(training) == [training.encoded()] * 2


def test_a_late_reader_gets_no_mixture_and_the_readers_of_the_next_steps_get_theirs() -> None:
    training = _Training()
    for _ in range(2):
        training.take_step()
        read_by_turns(training)
    late = training.read()
    before, begun = training.encoded(), frames(late)
    copied = bytes(next(begun)[1])
    training.take_step()
    assert read_by_turns(training) == [training.encoded()] * 2
    copied += b"".join(bytes(data) for _, data in begun)
    late.check()
    assert copied == before
    late, begun = training.read(), frames(late)
    training.take_step()
    training.take_step()
    assert read_by_turns(training) == [training.encoded()] * 2
    with pytest.raises(StepGone):
        late.check()
        joined(begun)


def test_readers_encode_for_themselves_where_the_memory_limit_leaves_no_room(num_encoded: list[int]) -> None:
    roomy = _Training()
    roomy.take_step()
    training = _Training(memory_limit_bytes=roomy.allocated_bytes + ENCODED_BYTES - 1)
    for _ in range(3):
        training.take_step()
        num_encoded[0] = 0
        assert read_by_turns(training) == [training.encoded()] * 2
        assert num_encoded[0] == 2 * NUM_FRAMES


def test_the_memory_of_encoded_variables_makes_room_for_a_contribution() -> None:
    training = with_encoded_variables_and_little_room()
    with training.shard.open_push(training._words.header(1, step=3)) as first, training.shard.open_push(training._words.header(2, step=3)):
        first.write(0, bytes(LARGE.nbytes))
    assert read_by_turns(training) == [training.encoded()] * 2


def test_a_contribution_gets_the_memory_of_encoded_variables_though_a_slow_reader_reads_them() -> None:
    training = with_encoded_variables_and_little_room()
    before = training.allocated_bytes
    slow = frames(training.read())
    copied = bytes(next(slow)[1])
    with training.shard.open_push(training._words.header(1, step=3)) as first, training.shard.open_push(training._words.header(2, step=3)):
        first.write(0, bytes(LARGE.nbytes))
        assert training.allocated_bytes == before - ENCODED_BYTES + LARGE.nbytes
        assert copied + b"".join(bytes(data) for _, data in slow) == training.encoded()


def test_readers_of_variables_whose_encoding_fails_for_one_of_them_get_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _Training()
    for _ in range(2):
        training.take_step()
        read_by_turns(training)
    failures = iter([MemoryError()])

    def failing(
        layout: Layout, memory: Array, encoding: FloatEncoding, max_bytes: int, *, into: Array | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        for number, frame in enumerate(encoded_frames(layout, memory, encoding, max_bytes, into=into)):
            if number == 2:
                for failure in failures:
                    raise failure
            yield frame

    monkeypatch.setattr(encoded_variables, "encoded_frames", failing)
    training.take_step()
    begun = frames(training.read())
    copied = bytes(next(begun)[1])
    with pytest.raises(MemoryError):
        content(training.read())
    assert copied + b"".join(bytes(data) for _, data in begun) == training.encoded()
    assert content(training.read()).tobytes() == training.encoded()


def test_the_memory_of_encoded_variables_goes_with_the_model() -> None:
    training = _Training()
    for _ in range(3):
        training.take_step()
        read_by_turns(training)
    slow = frames(training.read())
    next(slow)
    training.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF), replica=ReplicaState(version=1, forgets=True)))
    assert training.allocated_bytes == 0


def test_readers_of_values_that_change_in_place_see_each_change() -> None:
    training = _Training()
    training.shard.call(telling(ShardSettings(fence=fence(EPOCH, CHIEF), version=1, applies_on_arrival=True)))
    for sequence in range(3):
        header = training._words.header(step=sequence)
        with training.shard.open_push(header) as push:
            push.write(0, training._words.random(7 + sequence).tobytes())
            push.finish()
        training.values = content(training.read(), FloatEncoding.AS_IS)
        assert read_by_turns(training) == [training.encoded()] * 2


def test_moves_are_encoded_once_for_readers_of_a_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, num_encoded = layout_of(variable("w", (2000,))), list[int]()
    before, after = (np.zeros(layout.nbytes, np.uint8) for _ in range(2))
    layout.view(after, 0)[...] = 0.5

    def encode(*arguments: Any) -> Array | None:
        num_encoded.append(1)
        return encode_moves(*arguments)

    monkeypatch.setattr(encoded_variables, "encode_moves", encode)
    moves = encoded_variables.EncodedMoves()

    def found(version: int = 1, *, is_intact: bool = True) -> Array | None:
        return moves.of(layout, before, after, version=version, is_intact=lambda: is_intact)

    one = found()
    assert one is not None and found() is one and len(num_encoded) == 1
    del one
    assert found() is not None and len(num_encoded) == 2
    layout.view(after, 0)[0] = np.nan
    assert found(2) is None and found(2) is None and len(num_encoded) == 3
    layout.view(after, 0)[0] = 0.5
    assert found(3, is_intact=False) is None
