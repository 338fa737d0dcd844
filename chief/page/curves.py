"""The curves of quantities over a training, in bounded memory: the older, the coarser. Knows numbers; no clock, no cluster, no thread."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.shard import MetricCell

# Of the whole training, evenly spread; and besides each of the newest.
MAX_POINTS, NUM_NEWEST = 300, 300
# Of metrics: more charts than a reader can view would only cost memory.
MAX_METRICS = 40
MAX_NAME = 120

Point = tuple[float, int, float | None]


@light_dataclass(frozen=True, slots=True)
class _Sum:
    """Sums up to a moment. `beginning`: how often they had begun anew; there are no differences across that."""

    at: float
    step: int
    total: float
    weight: float
    beginning: int


class Series:
    """One quantity, from sums that grow: between two moments it is the quotient of their differences, so that no report is left out.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._newest: deque[_Sum] = deque(maxlen=NUM_NEWEST)
        self._whole: list[_Sum] = []
        # Of the sums that are added, the whole training has one in so many.
        self._stride, self._num_added = 1, 0

    def add(self, *, at: float, step: int, total: float, weight: float) -> None:
        """The sums at a moment. What has not changed since adds no point; a smaller weight, or an earlier step, begins anew."""
        last = self._newest[-1] if self._newest else None
        if last is not None and weight == last.weight:
            return
        beginning = 0 if last is None else last.beginning + (weight < last.weight or step < last.step)
        added = _Sum(at, step, total, weight, beginning)
        self._newest.append(added)
        if self._num_added % self._stride == 0:
            self._whole.append(added)
            if len(self._whole) > MAX_POINTS:
                self._whole, self._stride = self._whole[::2], self._stride * 2
        self._num_added += 1

    def points(self, *, after: float = -math.inf) -> list[Point]:
        """Returns time, step and value for each interval that ended after a moment; None for a value that is not a finite number."""
        first = self._newest[0].at if self._newest else math.inf
        sums = [*(one for one in self._whole if one.at < first), *self._newest] if after < first else self._newest
        return [(other.at, other.step, _quotient(one, other)) for one, other in itertools.pairwise(sums) if other.at > after]


def _quotient(one: _Sum, other: _Sum) -> float | None:
    weight = other.weight - one.weight
    if one.beginning != other.beginning or not weight > 0.0:
        return None
    value = (other.total - one.total) / weight
    return value if math.isfinite(value) else None


class Curves:
    """The speed of a training and the metrics that its workers report. Not thread-safe."""

    def __init__(self) -> None:
        self.speed = Series()
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

    def metrics(self, *, after: float = -math.inf) -> dict[str, Sequence[Point]]:
        """Returns the points of each metric after a moment, by its name, which is cut if it is very long."""
        return {_short(name): series.points(after=after) for name, series in self._metrics.items()}


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
