"""What a shard's next steps depend on besides its tensors, as the texts that stand in its file."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ps_protocol.errors import DataLoss
from ps_protocol.shard import AppliedPush, MetricCell, WorkerPushes

_KEY = "shard"
_FORMAT = 1

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenState:
    """`powers` by the key of the optimizer (empty: the model's own); `average_product`: of the averages' decays of the steps gone by."""

    step: int
    powers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    average_product: float = 1.0
    num_nonfinite: int = 0
    metrics: tuple[MetricCell, ...] = ()
    pushes: tuple[WorkerPushes, ...] = ()


def encode_hidden_state(state: HiddenState) -> dict[str, str]:
    """Returns the texts for the file's metadata."""
    fields = {
        "format": _FORMAT,
        "step": state.step,
        "powers": state.powers,
        "average_product": state.average_product,
        "num_nonfinite": state.num_nonfinite,
        "metrics": [[cell.name, cell.worker, *_numbers(cell)] for cell in state.metrics],
        "pushes": [[one.worker, one.incarnation, [[push.sequence, push.step] for push in one.applied]] for one in state.pushes],
    }
    return {_KEY: json.dumps(fields, separators=(",", ":"))}


def decode_hidden_state(metadata: Mapping[str, str], *, where: str) -> HiddenState:
    """Returns what `encode_hidden_state` was given. Raises DataLoss if the texts are not its own; `where` names the file."""
    try:
        fields = json.loads(metadata[_KEY])
        if fields["format"] != _FORMAT:
            raise ValueError(f"format {fields['format']}")
        return HiddenState(
            step=_natural(fields["step"]),
            powers={str(key): _each(powers, _finite) for key, powers in fields["powers"].items()},
            average_product=_finite(fields["average_product"]),
            num_nonfinite=_natural(fields["num_nonfinite"]),
            metrics=_each(fields["metrics"], _cell),
            pushes=_each(fields["pushes"], _worker_pushes),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: the state of the shard in its header cannot be read ({str(error)[:80]})") from None


def _numbers(cell: MetricCell) -> tuple[object, ...]:
    # JSON has no number that is not finite, and a loss may be one.
    return repr(cell.total), repr(cell.weight), cell.count, repr(cell.last)


def _cell(fields: list[Any]) -> MetricCell:
    name, worker, total, weight, count, last = fields
    return MetricCell(
        name=str(name),
        worker=_natural(worker),
        total=float(total),
        weight=_finite(float(weight)),
        count=_natural(count),
        last=float(last),
    )


def _worker_pushes(fields: list[Any]) -> WorkerPushes:
    worker, incarnation, applied = fields
    return WorkerPushes(worker=_natural(worker), incarnation=_natural(incarnation), applied=_each(applied, _applied))


def _applied(fields: list[Any]) -> AppliedPush:
    sequence, step = fields
    return AppliedPush(sequence=_natural(sequence), step=_natural(step))


def _each(items: object, decode: Callable[[Any], Item]) -> tuple[Item, ...]:
    if not isinstance(items, list):
        raise ValueError("a list is missing")
    return tuple(decode(item) for item in items)


def _natural(value: object) -> int:
    # Not isinstance: a bool is an int.
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"got {str(value)[:40]}, want a whole number from 0")
    return value


def _finite(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)):  # type: ignore[arg-type]  # type is known from the line itself
        raise ValueError(f"got {str(value)[:40]}, want a finite number")
    return float(value)  # type: ignore[arg-type]
