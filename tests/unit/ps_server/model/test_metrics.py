"""Metrics that workers report: cells by name and worker, and their limits."""

import math

import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.roles.shard import MAX_METRICS, Metric
from ps_server.contributions.inbox import MetricCells


def test_cell_sums_values_by_their_weights() -> None:
    cells = MetricCells()
    for worker, value, weight in ((1, 2.0, 1.0), (0, 4.0, 3.0), (1, 5.0, 2.0)):
        metrics = {"loss": Metric(value=value, weight=weight)}
        cells.admit(metrics)
        cells.count(worker, metrics)
    first, second = cells.cells()
    assert (first.name, first.worker, first.total, first.weight, first.count, first.last) == ("loss", 0, 12.0, 3.0, 1, 4.0)
    assert (second.worker, second.total, second.weight, second.count, second.last) == (1, 12.0, 3.0, 2, 5.0)


def test_a_metric_that_is_nan_is_shown_and_leaves_other_metrics_intact() -> None:
    cells = MetricCells()
    metrics = {"loss": Metric(value=math.nan), "accuracy": Metric(value=0.5)}
    cells.admit(metrics)
    cells.count(0, metrics)
    accuracy, loss = cells.cells()
    assert (accuracy.total, math.isnan(loss.total)) == (0.5, True)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"": Metric(value=1.0)}, "name is empty"),
        ({"loss\n": Metric(value=1.0)}, "control character"),
    ],
)
def test_an_invalid_metric_is_refused(metrics: dict[str, Metric], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        MetricCells().admit(metrics)


def test_names_are_limited() -> None:
    cells = MetricCells()
    cells.admit({f"m{index}": Metric(value=1.0) for index in range(MAX_METRICS)})
    with pytest.raises(LimitExceeded, match="1001 different names, 1000 at most"):
        cells.admit({"one more": Metric(value=1.0)})
    cells.admit({"m3": Metric(value=2.0)})
