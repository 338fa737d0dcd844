"""Which stretches of a shard's memory have the same contributors in a step, and the same factor.

In the ordinary case every contribution has every gradient, and a stretch is a whole arena: nothing is done per variable.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.layout import ALIGNMENT, ArenaRange, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The bytes `start` to `stop`, all in one arena: who has a gradient for them (positions), and the factor of the mean."""

    arena: ArenaRange
    start: int
    stop: int
    contributors: tuple[int, ...]
    scale: float = 1.0


class Planner:
    """Makes the runs of each step, and keeps those of the last one, since most steps are alike. Not thread-safe."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._members = _members(layout)
        self._key: tuple[int, Sequence[Sequence[int]], Sequence[float]] = (0, (), ())
        self._runs: tuple[Run, ...] = ()

    def runs(self, num_gradients: int, *, absent: Sequence[Sequence[int]] = (), scales: Sequence[float] = ()) -> tuple[Run, ...]:
        """Returns runs that cover all arenas, in their order.

        `absent`: for each contribution, the slices that it has no gradient for. `scales`: a factor for each slice. Empty: none, and all 1.
        """
        key = (num_gradients, absent if any(absent) else (), scales if any(scale != 1.0 for scale in scales) else ())
        if key != self._key:
            self._runs = tuple(self._split(*key))
            self._key = key
        return self._runs

    def _split(self, num_gradients: int, absent: Sequence[Sequence[int]], scales: Sequence[float]) -> Iterator[Run]:
        everyone = tuple(range(num_gradients))
        if not absent and not scales:
            for arena in self._layout.arenas:
                yield Run(arena=arena, start=arena.start, stop=arena.stop, contributors=everyone)
            return
        missing: dict[int, set[int]] = {}
        for position, indices in enumerate(absent):
            for index in indices:
                missing.setdefault(index, set()).add(position)
        for arena, members in zip(self._layout.arenas, self._members, strict=True):
            run: Run | None = None
            for index in members:
                contributors = tuple(p for p in everyone if p not in missing[index]) if index in missing else everyone
                scale = scales[index] if scales else 1.0
                start, stop = span(self._layout, index)
                if run is not None and (run.contributors, run.scale) == (contributors, scale):
                    start = run.start
                elif run is not None:
                    yield run
                run = Run(arena=arena, start=start, stop=stop, contributors=contributors, scale=scale)
            if run is not None:
                yield run


def span(layout: Layout, index: int) -> tuple[int, int]:
    """Returns the first and last byte (excluded) of a slice with the padding behind it."""
    start = layout.offsets[index]
    return start, start - (-layout.slices[index].nbytes // ALIGNMENT) * ALIGNMENT


def _members(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Returns the slices of each arena, those without elements left out, as they lie one after the other."""
    members: list[tuple[int, ...]] = []
    indices = [index for index in layout.order if layout.slices[index].nbytes]
    for arena in layout.arenas:
        members.append(tuple(index for index in indices if arena.start <= layout.offsets[index] < arena.stop))
    return tuple(members)
