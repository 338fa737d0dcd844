"""The past that a page shows, as bytes for the next chief's page: bounded, and checked when it comes back. Pure: no cluster, no clock."""

import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from chief.core.messages import NoteKind
from chief.page.curves import MAX_METRICS, MAX_NAME, Sum, thinned
from chief.page.event_log import MAX_ENTRIES, Entry
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ContributionCounts

MAX_BYTES = 64 << 10
# Of all curves together.
_MAX_SUMS = 1_000
_MAX_TEXT = 300
_MAX_UNPACKED = 1 << 20


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Events, oldest first; counters; and the sums that curves are made of, of the speed and by metric."""

    events: Sequence[Entry] = ()
    counts: ContributionCounts = ContributionCounts()
    speed: Sequence[Sum] = ()
    metrics: Mapping[str, Sequence[Sum]] = field(default_factory=dict)


def pack(story: Story) -> bytes:
    """Returns the story in at most MAX_BYTES: the longer it is, the fewer points and events are left."""
    share = 1
    while len(packed := _packed(story, share)) > MAX_BYTES:
        share *= 2
    return packed


def unpack(packed: bytes) -> Story:
    """Returns the story that bytes are. Of bytes that are none, an empty one: nothing but the page depends on it."""
    try:
        unpacked = json.loads(zlib.decompressobj().decompress(packed, _MAX_UNPACKED))
        return Story(
            events=[_entry(number, row) for number, row in enumerate(unpacked["events"][-MAX_ENTRIES:])],
            counts=ContributionCounts(**{name: int(number) for name, number in unpacked["counts"].items()}),
            speed=_sums(unpacked["speed"]),
            metrics={str(name): _sums(rows) for name, rows in list(unpacked["metrics"].items())[:MAX_METRICS]},
        )
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Story()


def _packed(story: Story, share: int) -> bytes:
    num_each = _MAX_SUMS // (1 + len(story.metrics)) // share
    events = story.events[len(story.events) - len(story.events) // share :]
    counts = story.counts
    value = {
        "events": [[one.at, one.step, one.kind.value, one.text[:_MAX_TEXT], one.is_warning] for one in events],
        "counts": {"accepted": counts.accepted, "stale": counts.stale, "late": counts.late},
        "speed": _rows(story.speed, num_each),
        "metrics": {name: _rows(sums, num_each) for name, sums in story.metrics.items() if len(name) <= MAX_NAME},
    }
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def _rows(sums: Sequence[Sum], most: int) -> list[list[float | int]]:
    return [[one.at, one.step, one.total, one.weight, one.beginning] for one in thinned(sums, most)]


def _entry(number: int, row: Sequence[Any]) -> Entry:
    at, step, kind, text, is_warning = row
    return Entry(
        number=number + 1, at=_time(at), step=int(step), kind=NoteKind(kind), text=str(text)[:_MAX_TEXT], is_warning=bool(is_warning)
    )


def _sums(rows: Sequence[Sequence[Any]]) -> list[Sum]:
    found = [Sum(_time(at), int(step), float(total), float(weight), int(beginning)) for at, step, total, weight, beginning in rows]
    if any(other.at < one.at for one, other in itertools.pairwise(found)):
        raise ValueError("the moments of a curve are not in order")
    return found


def _time(given: Any) -> float:
    at = float(given)
    if not math.isfinite(at):
        raise ValueError("no time")
    return at
