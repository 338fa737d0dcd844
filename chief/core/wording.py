"""Wording of numbers, durations and optimizers in messages, the same everywhere. Knows no state."""

import re
from collections.abc import Iterable, Mapping, Sequence

from ps_protocol.errors import printable as printable
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import ParticipantKind
from ps_protocol.roles.contribution import PushId

# A lease that runs longer is one that does not end, as those inside one process; its number would say nothing.
_MAX_LEASE_S = 86_400.0
_SOCKET = re.compile(r" at unix:\S+: (checkpoint: )?")


def name_of(kind: ParticipantKind, index: int) -> str:
    """Returns for example "worker 3"."""
    return f"{kind.name.lower()} {index}"


def seconds(value: float) -> str:
    """Returns a duration as a person would say it: one decimal, and none from a minute on."""
    return f"{value:.0f} s" if value >= 60 else f"{max(0.0, value):.1f} s"


def lease_end(left_s: float) -> str:
    """Returns for example ", lease ends in 6.9 s"; empty if that is more than a day away."""
    return f", lease ends in {seconds(left_s)}" if left_s <= _MAX_LEASE_S else ""


def listed(items: Sequence[str], *, limit: int = 5, separator: str = ", ") -> str:
    """Joins the first `limit` items and says how many more there are."""
    rest = len(items) - limit
    return separator.join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def counted(number: int, what: str) -> str:
    """Returns for example "2 steps"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def percent(done: float, total: float) -> str:
    """Returns for example "43 %"."""
    return f"{int(100 * done / total) if total else 0} %"


def workers_of(contributions: Iterable[PushId]) -> str:
    """For example "worker 1, worker 4"."""
    return listed([f"worker {worker}" for worker in sorted({push_id.worker for push_id in contributions})])


def optimizers_words(model: ModelSpec, changed: Mapping[str, OptimizerSpec]) -> str:
    """Returns the model's optimizer, and those of single variables; `changed`: by key, those that replace the model's."""
    own: dict[str, list[str]] = {}
    for variable in model.variables:
        if variable.optimizer is not None and not variable.optimizer.is_update_rule:
            spec = variable.optimizer
            own.setdefault(optimizer_words(changed.get(spec.key, spec)), []).append(variable.name)
    of_model = optimizer_words(changed.get(model.optimizer.key, model.optimizer))
    return listed([of_model, *(f"{printable(listed(names))}: {words}" for words, names in own.items())], separator="; ")


_MAX_TITLE = 80


def optimizer_words(optimizer: OptimizerSpec) -> str:
    """Returns for example "momentum (learning_rate 0.1, momentum 0.9)"; values of 0 that are defaults are left out."""
    rate = optimizer.learning_rate
    if rate.name == "constant":
        learning_rate = f"learning_rate {rate.arguments['value']:g}"
    else:
        learning_rate = f"learning_rate {rate.name}({', '.join(f'{name} {value:g}' for name, value in rate.arguments.items())})"
    defaults = optimizer.kind.hyperparameters
    numbers = (
        f"{name} {value:g}"
        for name, value in sorted(optimizer.hyperparameters.items())
        if value or optimizer.is_custom or defaults[name][0]
    )
    if optimizer.is_custom and optimizer.title == optimizer.name:
        text = "; ".join(line.strip() for line in optimizer.formula.strip().splitlines() if line.strip())
        return f"custom ({', '.join([repr(text), learning_rate, *numbers])})"
    return f"{printable(optimizer.title[:_MAX_TITLE])} ({', '.join([learning_rate, *numbers])})"


def without_socket(why: str) -> str:
    """Returns why a server's checkpoint failed without the name of its socket on this machine, which nobody needs."""
    return _SOCKET.sub(": ", why)
