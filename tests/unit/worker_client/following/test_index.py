"""The index of a store of weights: the ways to a step, what is kept, and that it comes back as it was."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model.spec import layouts, place
from ps_protocol.roles.fence import Era
from ps_protocol.roles.shard import CheckpointFile
from ps_protocol.roles.weights import KeptWeights
from tests.support.parameter_servers.checkpoints import MODEL
from worker_client.following.index import Entry, Index, decode_index, encode_index
from worker_client.following.sources import Followed

FOLLOWED = Followed(
    model=MODEL,
    layouts=layouts(place(MODEL, num_shards=2), num_shards=2),
    era=Era(life=1 << 63, epoch=3),
    kept=KeptWeights(encoding=FloatEncoding.BFLOAT16, has_tables=True),
)
ANCHOR_BYTES, PATCH_BYTES = 100, 10


def entry(before: int | None, step: int, num_bytes: int | None = None) -> Entry:
    size = num_bytes or (ANCHOR_BYTES if before is None else PATCH_BYTES)
    files = tuple(CheckpointFile(name=f"ps-{shard}.safetensors", shard=shard, num_bytes=size // 2, sha256="0" * 64) for shard in range(2))
    return Entry(tag=f"{before}-{step}", before=before, step=step, files=files)


def index(*steps: tuple[int | None, int], num_bytes: int | None = None) -> Index:
    entries = tuple(entry(before, step, None if before is None else num_bytes) for before, step in steps)
    return Index(followed=FOLLOWED, writer="host/1/ab", beat_s=2.0, entries=entries, beat=7, newest_step=99)


def way(one: Index, held: int | None, *bad: str) -> list[str]:
    """What a reader reads until it has the newest step, or as much as there is."""
    found = []
    while held != one.step and (following := one.next_entry(held, without={*bad})) is not None:
        found.append(following.tag)
        assert held is None or following.step > held
        assert following.before in (None, held)
        held = following.step
    return found


CHAIN = index((None, 1), (1, 2), (2, 5), (None, 5), (5, 6))


@pytest.mark.parametrize(
    ("held", "bad", "expected"),
    [
        (None, [], ["None-5", "5-6"]),
        (2, [], ["2-5", "5-6"]),
        (5, [], ["5-6"]),
        (4, [], ["None-5", "5-6"]),
        (None, ["None-5"], ["None-1", "1-2", "2-5", "5-6"]),
        (2, ["2-5"], ["None-5", "5-6"]),
        (2, ["2-5", "None-5"], []),
        (5, ["5-6"], []),
        (7, [], []),
    ],
)
def test_a_reader_goes_the_shortest_way_that_can_be_read_and_never_back(held: int | None, bad: list[str], expected: list[str]) -> None:
    assert way(CHAIN, held, *bad) == expected


def test_an_anchor_is_nearer_than_patches_of_more_bytes() -> None:
    assert way(index((None, 1), (1, 2), (2, 3), (None, 3), num_bytes=60), 1) == ["None-3"]


@pytest.mark.parametrize(
    ("one", "keep_steps", "expected"),
    [
        (CHAIN, 100, ["None-1", "1-2", "2-5", "None-5", "5-6"]),
        (CHAIN, 4, ["2-5", "None-5", "5-6"]),
        (CHAIN, 1, ["None-5", "5-6"]),
        # What leads on from the newest anchor stays, however old it is.
        (index((None, 1), (1, 2), (2, 30)), 1, ["None-1", "1-2", "2-30"]),
        # Patches before it that have more bytes than two anchors would not be read.
        (index((None, 1), (1, 2), (2, 3), (3, 4), (None, 4), num_bytes=90), 100, ["2-3", "3-4", "None-4"]),
        (index((None, 1), (None, 2), (None, 3), (None, 4)), 100, ["None-2", "None-3", "None-4"]),
    ],
)
def test_what_only_readers_far_behind_would_need_is_dropped(one: Index, keep_steps: int, expected: list[str]) -> None:
    assert [entry.tag for entry in one.pruned(keep_steps).entries] == expected


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["patch", "anchor", "both"])), max_size=30), st.integers(1, 40))
def test_each_newcomer_has_a_way_to_the_newest_step(steps: list[tuple[int, str]], keep_steps: int) -> None:
    one = index((None, 0))
    for skipped, kind in steps:
        at = one.step
        assert at is not None
        added = [entry(at, at + skipped)] if kind != "anchor" else []
        added += [entry(None, at + skipped)] if kind != "patch" else []
        one = replace(one, entries=(*one.entries, *added)).pruned(keep_steps)
    assert way(one, None)[-1] in {entry.tag for entry in one.entries if entry.step == one.step}


def test_an_index_comes_back_as_it_was_and_knows_what_is_followed_again() -> None:
    content = encode_index(CHAIN)
    found = decode_index(content, where="index.json")
    assert replace(found, followed=FOLLOWED) == CHAIN
    assert found.continues(FOLLOWED)
    assert decode_index(content, where="index.json", known=FOLLOWED).followed is FOLLOWED
    others = replace(FOLLOWED, era=Era(life=1, epoch=3)), replace(FOLLOWED, kept=KeptWeights(encoding=FloatEncoding.AS_IS, has_tables=True))
    for other in others:
        assert not found.continues(other)
        assert decode_index(content, where="index.json", known=other).followed is not other
    fewer = replace(FOLLOWED, layouts=layouts(place(MODEL, num_shards=1), num_shards=1))
    assert not found.continues(fewer)
