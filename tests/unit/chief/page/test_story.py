"""The past that a page shows goes over to the next chief's page: whole, bounded, and whatever the bytes are."""

import json
import random
import zlib
from dataclasses import replace
from typing import Any

import pytest

from chief.core.messages import Note, NoteKind
from chief.page.curves import MAX_METRICS, Curves, Series
from chief.page.event_log import EventLog
from chief.page.story import MAX_BYTES, Story, pack, unpack
from ps_protocol.roles.chief import ContributionCounts
from ps_protocol.roles.shard import MetricCell


def cells(loss: float, number: int = 1) -> list[MetricCell]:
    return [MetricCell(name=f"loss {one}", worker=0, total=loss, weight=loss, count=1, last=loss) for one in range(number)]


def story_of(log: EventLog, curves: Curves, **counts: int) -> Story:
    return Story(events=log.since(0), counts=ContributionCounts(**counts), speed=curves.speed.sums(), metrics=curves.sums_of_metrics)


def trained(num_seconds: int, *, first: int = 0, num_metrics: int = 1) -> Curves:
    curves, chance = Curves(), random.Random(1)
    for second in range(first, first + num_seconds):
        curves.add_step(5 * second, at=1e9 + second)
        curves.add_metrics(cells(second + chance.random(), num_metrics), step=5 * second, at=1e9 + second)
    return curves


def test_events_counters_and_curves_come_back_as_they_were() -> None:
    log, curves = EventLog(), trained(100)
    log.add(Note(text="worker 0 joined", kind=NoteKind.JOINED), 3)
    log.add(Note(text="worker 0 is lost", kind=NoteKind.LOST, is_warning=True), 4)
    story = story_of(log, curves, accepted=7, stale=2, late=1)
    assert unpack(pack(story)) == story


def test_a_curve_goes_on_where_that_of_the_chief_before_ended() -> None:
    before, joined, whole = trained(50), trained(50, first=55), Series()
    joined.join(before.speed.sums(), before.sums_of_metrics)
    for second in [*range(50), *range(55, 105)]:
        whole.add(at=1e9 + second, step=5 * second, total=5.0 * second, weight=1e9 + second)
    assert [(at, step) for at, step, _ in joined.speed.points()] == [(at, step) for at, step, _ in whole.points()]
    assert joined.speed.points()[-1][2] == 5.0
    assert len(joined.metrics()["loss 0"]) == 99


def test_a_rollback_between_two_chiefs_leaves_a_gap_in_the_curve() -> None:
    before, now = trained(50), trained(1, first=55)
    rolled_back = Series()
    rolled_back.add(at=1e9 + 60, step=10, total=10.0, weight=1e9 + 60)
    rolled_back.join(before.speed.sums())
    assert rolled_back.points()[-1] == (1e9 + 60, 10, None)
    now.join(before.speed.sums(), {})
    assert now.speed.points()[-1][2] == 5.0


def test_events_of_the_chief_before_come_first_and_are_counted_with_the_others() -> None:
    before, log = EventLog(), EventLog()
    before.add(Note(text="one"), 0)
    before.add(Note(text="two"), 1)
    log.add(Note(text="three"), 2)
    log.join(before.since(0))
    log.add(Note(text="four"), 3)
    assert [(one.number, one.text) for one in log.since(0)] == [(1, "one"), (2, "two"), (3, "three"), (4, "four")]


def test_a_story_is_bounded_whatever_has_happened() -> None:
    log, curves, chance = EventLog(), trained(700, num_metrics=MAX_METRICS), random.Random(2)
    for _ in range(1_000):
        log.add(Note(text="".join(map(chr, chance.choices(range(0x4E00, 0x9FFF), k=1_000)))), chance.getrandbits(40))
    packed = pack(story_of(log, curves))
    assert len(packed) <= MAX_BYTES
    story = unpack(packed)
    assert story.events[-1].step == log.since(0)[-1].step, "the latest stay"
    assert len(story.metrics) == MAX_METRICS


def test_metrics_with_very_long_names_are_left_out_of_a_story() -> None:
    curves = Curves()
    for name in ("loss", "x" * 1_000_000):
        for second in range(2):
            curves.add_metrics([replace(cells(1.0 + second)[0], name=name)], step=second, at=float(second))
    assert list(unpack(pack(story_of(EventLog(), curves))).metrics) == ["loss"]


_GOOD: dict[str, Any] = {"events": [], "counts": {"accepted": 1, "stale": 0, "late": 0}, "speed": [], "metrics": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {**_GOOD, "events": [[1.0, 2, "no kind", "text", False]]},
        {**_GOOD, "events": [[float("nan"), 2, "joined", "text", False]]},
        {**_GOOD, "events": 7},
        {**_GOOD, "counts": {"unknown": 1}},
        {**_GOOD, "speed": [[2.0, 1, 1.0, 1.0, 0], [1.0, 1, 1.0, 1.0, 0]]},
        {**_GOOD, "speed": [[1.0, 1]]},
        {**_GOOD, "metrics": []},
        {**_GOOD, "counts": {"accepted": float("inf")}},
    ],
)
def test_bytes_that_are_no_story_are_an_empty_one(wrong: object) -> None:
    assert unpack(zlib.compress(json.dumps(wrong).encode())) == Story()
    assert unpack(zlib.compress(json.dumps(_GOOD).encode())) != Story()


def test_damaged_bytes_are_an_empty_story() -> None:
    packed, chance = pack(story_of(EventLog(), trained(100))), random.Random(3)
    for damaged in (b"", packed[: len(packed) // 2], bytes(100), zlib.compress(bytes(100 << 20))):
        assert unpack(damaged) == Story()
    for _ in range(300):
        changed = bytearray(packed)
        changed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
        unpack(bytes(changed))
