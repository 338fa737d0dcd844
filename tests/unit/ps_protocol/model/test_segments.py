"""Arenas in pieces."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import FrameOutOfOrder, TruncatedStream
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from tests.support.examples import examples


def pieces(*sizes: int, fill: int | None = None) -> list[Array]:
    counter = itertools.count(1)
    return [np.array([(next(counter) if fill is None else fill) % 251 for _ in range(size)], np.uint8) for size in sizes]


sizes = st.lists(st.integers(0, 40), max_size=6)


@settings(max_examples=examples(20))
@given(sizes, sizes, st.integers(1, 50))
def test_bytes_arrive_unchanged_for_any_split_into_pieces_and_chunks(source_sizes: list[int], more: list[int], max_bytes: int) -> None:
    source = pieces(*source_sizes)
    total = sum(source_sizes)
    target_sizes = [size for size in more if size <= total]
    while sum(target_sizes) > total:
        target_sizes.pop()
    target = pieces(*target_sizes, total - sum(target_sizes), fill=0)
    writer = Segments(target).writer()
    for offset, data in Segments(source).chunks(max_bytes):
        assert 0 < len(data) <= max_bytes
        writer.write(offset, data)
    writer.finish()
    assert np.array_equal(np.concatenate([*source, *pieces(0)]), np.concatenate(target))


def test_chunks_share_the_owners_memory() -> None:
    (memory,) = pieces(10)
    chunks = list(Segments([memory]).chunks(4))
    memory[:] = 7
    assert [offset for offset, _ in chunks] == [0, 4, 8]
    assert all(bytes(data) == b"\x07" * len(data) for _, data in chunks)


def test_copy_from_copies_everything() -> None:
    source, target = pieces(3, 5, 2), pieces(10, fill=0)
    Segments(target).copy_from(Segments(source))
    assert target[0].tolist() == list(range(1, 11))


@pytest.mark.parametrize("offset", [0, 3, 5])
def test_gap_and_overlap_are_refused_and_copy_nothing(offset: int) -> None:
    memory = pieces(10, fill=0)
    writer = Segments(memory).writer()
    writer.write(0, b"\x01" * 4)
    with pytest.raises(FrameOutOfOrder, match=f"frame at offset {offset}, expected 4"):
        writer.write(offset, b"\x02" * 2)
    writer.write(4, b"\x03" * 6)
    writer.finish()
    assert memory[0].tolist() == [1] * 4 + [3] * 6


def test_frame_beyond_the_end_is_refused_and_copies_nothing() -> None:
    memory = pieces(4, fill=0)
    writer = Segments(memory).writer()
    with pytest.raises(FrameOutOfOrder, match="5 bytes and ends beyond the arena's 4"):
        writer.write(0, b"\x01" * 5)
    assert writer.num_written == 0
    assert memory[0].tolist() == [0] * 4


def test_missing_bytes_are_reported_with_both_numbers() -> None:
    writer = Segments(pieces(6, fill=0)).writer()
    writer.write(0, b"\x01" * 5)
    with pytest.raises(TruncatedStream, match="5 of 6 bytes received"):
        writer.finish()


def test_empty_arena_is_whole_at_once() -> None:
    assert list(Segments([]).chunks(10)) == []
    writer = Segments(pieces(0, 0)).writer()
    writer.write(0, b"")
    writer.finish()


def test_only_flat_bytes_make_a_segment() -> None:
    with pytest.raises(ValueError, match="one-dimensional uint8"):
        Segments([np.zeros((2, 2), np.uint8)])
    with pytest.raises(ValueError, match="one-dimensional uint8"):
        Segments([np.zeros(4, np.float32)])
