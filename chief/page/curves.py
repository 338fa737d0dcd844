"""The curves of quantities over a training, in bounded memory: the older, the coarser. Knows numbers; no clock, no cluster, no thread."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.shard import MetricCell

# Of the whole training, evenly spread; and besides each of the newest.
MAX_POINTS, NUM_NEWEST = 300, 300
# Of metrics: more charts than a reader can view would only cost memory.
MAX_METRICS = 40
MAX_NAME = 120

# Speed is that of so many steps, at least: of the few in a second, one more or less would be a zigzag.
_LEAST_STEPS, _LONGEST_S = 40, 30.0

Point = tuple[float, int, float | None]


@light_dataclass(frozen=True, slots=True)
class Sum:
    """Sums up to a moment. `beginning`: how often they had begun anew; there are no differences across that."""

    at: float
    step: int
    total: float
    weight: float
    beginning: int


class Series:
    """One quantity, from sums that grow: between two moments it is the quotient of their differences, so that no report is left out.

    `least_steps`: an interval begins so many steps ago, but not longer than _LONGEST_S. Not thread-safe.
    """

    def __init__(self, *, least_steps: int = 0) -> None:
        self._least_steps = least_steps
        self._newest: deque[Sum] = deque(maxlen=NUM_NEWEST)
        self._whole: list[Sum] = []
        # Of the sums that are added, the whole training has one in so many.
        self._stride, self._num_added = 1, 0

    def add(self, *, at: float, step: int, total: float, weight: float) -> None:
        """The sums at a moment. What has not changed since adds no point; a smaller weight, or an earlier step, begins anew."""
        last = self._newest[-1] if self._newest else None
        if last is not None and weight == last.weight:
            return
        beginning = 0 if last is None else last.beginning + (weight < last.weight or step < last.step)
        self._put(Sum(at, step, total, weight, beginning))

    def sums(self) -> list[Sum]:
        """Returns all sums that are known, oldest first."""
        first = self._newest[0].at if self._newest else math.inf
        return [*(one for one in self._whole if one.at < first), *self._newest]

    def join(self, earlier: Sequence[Sum]) -> None:
        """Puts the sums of an earlier chief before those of this one."""
        own = self.sums()
        self._newest.clear()
        self._whole, self._stride, self._num_added = [], 1, 0
        for one in earlier:
            if not own or one.at < own[0].at:
                self._put(one)
        for one in own:
            self.add(at=one.at, step=one.step, total=one.total, weight=one.weight)

    def _put(self, added: Sum) -> None:
        self._newest.append(added)
        if self._num_added % self._stride == 0:
            self._whole.append(added)
            if len(self._whole) > MAX_POINTS:
                self._whole, self._stride = self._whole[::2], self._stride * 2
        self._num_added += 1

    def points(self, *, after: float = -math.inf) -> list[Point]:
        """Returns time, step and value for each interval that ended after a moment; None for a value that is not a finite number."""
        first = self._newest[0].at if self._newest else math.inf
        sums = self.sums() if after < first else self._newest
        found, begins = list[Point](), deque[Sum]()
        for one, other in itertools.pairwise(sums):
            begins.append(one)
            while len(begins) > 1 and (begins[0].beginning != other.beginning or self._is_enough(begins[1], other)):
                begins.popleft()
            if other.at > after:
                found.append((other.at, other.step, _quotient(begins[0], other)))
        return found

    def _is_enough(self, one: Sum, other: Sum) -> bool:
        return other.step - one.step >= self._least_steps or other.at - one.at > _LONGEST_S


def thinned(sums: Sequence[Sum], most: int) -> Sequence[Sum]:
    """Returns at most so many, evenly spread, the last one among them."""
    stride = -(-len(sums) // most) if most else 0
    return sums[::-1][::stride][::-1] if stride else ()


def _quotient(one: Sum, other: Sum) -> float | None:
    weight = other.weight - one.weight
    if one.beginning != other.beginning or not weight > 0.0:
        return None
    value = (other.total - one.total) / weight
    return value if math.isfinite(value) else None


class Curves:
    """The speed of a training and the metrics that its workers report. Not thread-safe."""

    def __init__(self) -> None:
        self.speed = Series(least_steps=_LEAST_STEPS)
        self._metrics: dict[str, Series] = {}
        self.num_left_out = 0

    def add_step(self, step: int, *, at: float) -> None:
        """The open step at a moment."""
        self.speed.add(at=at, step=step, total=float(step), weight=at)

    def add_metrics(self, cells: Iterable[MetricCell], *, step: int, at: float) -> None:
        """The sums of all reports of workers up to a moment."""
        sums: dict[str, list[float]] = {}
        for cell in cells:
            entry = sums.setdefault(cell.name, [0.0, 0.0])
            entry[0] += cell.total
            entry[1] += cell.weight
        self.num_left_out = 0
        for name, (total, weight) in sorted(sums.items()):
            if name not in self._metrics and len(self._metrics) >= MAX_METRICS:
                self.num_left_out += 1
                continue
            self._metrics.setdefault(name, Series()).add(at=at, step=step, total=total, weight=weight)

    @property
    def sums_of_metrics(self) -> Mapping[str, Sequence[Sum]]:
        """The sums of each metric, by its name."""
        return {name: series.sums() for name, series in self._metrics.items()}

    def join(self, speed: Sequence[Sum], metrics: Mapping[str, Sequence[Sum]]) -> None:
        """Puts the curves of an earlier chief before those of this one."""
        self.speed.join(speed)
        for name, sums in metrics.items():
            if name in self._metrics or len(self._metrics) < MAX_METRICS:
                self._metrics.setdefault(name, Series()).join(sums)

    def metrics(self, *, after: float = -math.inf) -> dict[str, Sequence[Point]]:
        """Returns the points of each metric after a moment, by its name, which is cut if it is very long."""
        return {_short(name): series.points(after=after) for name, series in self._metrics.items()}


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
