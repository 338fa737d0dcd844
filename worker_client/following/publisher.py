"""Publishes the parameters of a program that trains by other means, step by step, for followers. Knows sessions; no framework."""

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from ps_protocol.errors import InvalidSpec, is_boundary
from ps_protocol.model.shown import shown
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.security.options import Security
from worker_client.model.optimizers import custom_optimizer
from worker_client.opening import TIMEOUT_S, connect
from worker_client.session.session import Session

# The one contribution of a step is what its variables are then.
_ASSIGN = custom_optimizer("# published\nv = lr * g", learning_rate=1.0)
# Names and arrays, or what gives them when it is asked.
Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]]


class Publisher:
    """Gives a cluster the values that a program's parameters have. Made by `publish()`, used as a context manager. For one thread."""

    def __init__(self, read: Callable[[], dict[str, Array]], session: Session) -> None:
        self._read, self._session = read, session
        values = read()
        self._shapes = _shapes(values)
        session.create_or_join(values, optimizer=_ASSIGN)
        status = session.status()
        if status.replicas_to_aggregate != 1 or not status.policy.has_common_steps:
            raise InvalidSpec(
                f"publish: a step of this cluster takes {status.replicas_to_aggregate} contributions of policy {status.policy.text};"
                " want one, synchronous: start it with --workers 1"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.__exit__(kind, error, trace)

    def close(self) -> None:
        """Leaves the cluster, which ends where nobody else is in it. Idempotent."""
        self._session.close()

    @property
    def global_step(self) -> int:
        """The step that was published last; 0: the values that the first publisher began with."""
        return self._session.global_step

    def step(self, *, timeout_s: float | None = None) -> int:
        """Publishes the parameters as they are now, whole on all servers, as the next step, whose number it returns.

        Blocks until followers can have it. Where the cluster is rolled back or gets another chief meanwhile, the values count once all the
        same. Raises InvalidSpec where names or shapes are others than before; what `Session.step()` raises.
        """
        values = self._read()
        if (shapes := _shapes(values)) != self._shapes:
            changed = min(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name))
            before, now = (one.get(changed, "not there") for one in (self._shapes, shapes))
            raise InvalidSpec(f"publish: {changed!r} was {before} and is {now} now; publish the parameters that it began with")
        while True:
            push = self._session.step(values, timeout_s=timeout_s)
            if push.outcome is not PushOutcome.ROLLED_BACK:
                return self._session.global_step


@is_boundary
def publish(
    parameters: "Parameters | Callable[[], Parameters]",
    *,
    chief: str | None = None,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    transport: str | None = None,
    security: Security | None = None,
) -> Publisher:
    """Publishes the parameters of a program that trains by other means, for `follow()`; returns the publisher, a context manager.

    `parameters`: pairs of a name and a NumPy array or a PyTorch tensor of floating-point numbers, such as `model.named_parameters()`, or a
    dict, read anew at each `step()`; or a function that returns such, for models whose parameters are gathered first. Half-precision
    tensors are held as float32, so no bit is lost. The cluster has one worker, which this program is: `lockstep up --ps 2 --workers 1 --
    python train.py`. A program that is started again goes on with the next step of the same cluster; a second publisher is refused.

    The other arguments and errors are those of `connect()`: WorkerIndexTaken where there is a publisher. Also raises ModelMismatch where
    the cluster has other parameters, and InvalidSpec.
    """
    read = reader_of(parameters)
    read()
    session = connect(chief, worker_index=0, cluster=cluster, timeout_s=timeout_s, transport=transport, security=security)
    try:
        return Publisher(read, session)
    except BaseException:
        session.close()
        raise


def reader_of(parameters: "Parameters | Callable[[], Parameters]") -> Callable[[], dict[str, Array]]:
    """Returns what reads the parameters as arrays, each time anew. Raises InvalidSpec, as it does then."""
    if callable(parameters):
        return lambda: _arrays(parameters())
    if isinstance(parameters, Mapping):
        return lambda: _arrays(parameters)
    if not isinstance(parameters, Iterable):
        raise InvalidSpec(f"publish: got {shown(parameters)}, want pairs of a name and an array, such as model.named_parameters()")
    kept = [*parameters]  # an iterator can be read once only
    return lambda: _arrays(kept)


def _shapes(values: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{array.dtype} of shape {array.shape}" for name, array in values.items()}


def _arrays(parameters: Parameters) -> dict[str, Array]:
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    found: dict[str, Array] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidSpec(f"publish: got {shown(pair)}, want pairs of a name and an array, such as model.named_parameters()")
        name, value = pair
        if name in found:
            raise InvalidSpec(f"publish: {name!r} occurs twice")
        found[name] = _array(name, value)
    if not found:
        raise InvalidSpec("publish: there are no parameters")
    return found


def _array(name: str, value: Any) -> Array:
    if hasattr(value, "detach"):  # a tensor of PyTorch, wherever it lies
        value = value.detach()
        value = (value.float() if value.element_size() == 2 else value).cpu().numpy()
    array = np.asarray(value)
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype not in (np.float32, np.float64):
        raise InvalidSpec(f"publish: {name!r} has elements of type {array.dtype}; want floating-point numbers")
    return array
