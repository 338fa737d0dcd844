"""Numbers that workers report along with contributions, one cell for each name and worker."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.shard import Metric, MetricCell
from ps_protocol.tensors import check_name

MAX_METRICS = 1000


@dataclass(slots=True)
class _Cell:
    total: float = 0.0
    weight: float = 0.0
    count: int = 0
    last: float = 0.0


class MetricCells:
    """What has been reported in contributions that were applied."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._cells: dict[tuple[str, int], _Cell] = {}

    def admit(self, metrics: Mapping[str, Metric]) -> None:
        """Takes up the names, all or nothing; raises LimitExceeded if there are too many, InvalidSpec if one is none."""
        if metrics.keys() <= self._names and all(_is_weight(metric.weight) for metric in metrics.values()):
            return
        for name, metric in metrics.items():
            check_name(name)
            if not _is_weight(metric.weight):
                raise InvalidSpec(f"metric {name!r}: weight = {metric.weight!r}, want a finite number >= 0")
        names = self._names | metrics.keys()
        if len(names) > MAX_METRICS:
            raise LimitExceeded(f"metrics: {len(names)} different names, {MAX_METRICS} at most; use fewer names")
        self._names = names

    def count(self, worker: int, metrics: Mapping[str, Metric]) -> None:
        """Counts what a worker reported in one contribution; its names have been admitted."""
        for name, metric in metrics.items():
            cell = self._cells.setdefault((name, worker), _Cell())
            cell.total += metric.value * metric.weight
            cell.weight += metric.weight
            cell.count += 1
            cell.last = metric.value

    def cells(self) -> Iterable[MetricCell]:
        """Returns all cells, by name and worker."""
        for (name, worker), cell in sorted(self._cells.items()):
            yield MetricCell(name=name, worker=worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)

    def resume(self, cells: Iterable[MetricCell]) -> None:
        """Goes on from what `cells` has returned, in place of what is here. Raises LimitExceeded, InvalidSpec."""
        self._names, self._cells = set(), {}
        for cell in cells:
            self.admit({cell.name: Metric(value=cell.last, weight=0.0)})
            self._cells[cell.name, cell.worker] = _Cell(total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)


def _is_weight(weight: float) -> bool:
    return 0 <= weight < float("inf")
