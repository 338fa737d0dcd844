"""The functions for JAX programs: create or join the model, make a step, read parameters. Knows sessions and pytrees; no formula."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

import worker_client
from lockstep.contributing import check_connected, join, left_out, until_counted
from lockstep.errors import InvalidSpec, NotInitialized
from lockstep.jax.proof import compare
from lockstep.jax.recognition import Recognized, recognize
from lockstep.jax.trees import Tree, array_of, refuse_trace, tree_of
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array
from worker_client import EmbeddingTable, IndexedSlices
from worker_client.core.outcomes import Push
from worker_client.model.gradients import Metrics
from worker_client.session.session import Session


@dataclass(frozen=True, slots=True)
class LocalUpdates:
    """An optax transformation that each worker runs on its own gradients; made by `local_updates()`."""

    transformation: Any


def local_updates(transformation: Any) -> LocalUpdates:
    """Returns an optimizer for `create_or_join()` that runs in the workers: a step adds the mean of the updates that they computed.

    For optax transformations that servers have no formula for. The result differs from that of the transformation on the mean gradient,
    unless the transformation is linear, as `sgd` and `momentum` are: each worker keeps moments of its own gradients. Moments are updated
    only if the contribution counts, are not in checkpoints, and begin anew in a restarted worker and after a rollback.
    """
    if not callable(getattr(transformation, "init", None)) or not callable(getattr(transformation, "update", None)):
        raise InvalidSpec(f"local_updates(): got {transformation!r}, want an optax transformation such as optax.adam(1e-3)")
    return LocalUpdates(transformation)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a table for a batch: `values[positions]` are those of its ids, in their shape.

    `values` has a row for each different id, and then zeros up to a power of two, so that jit meets few shapes.
    """

    values: Any
    positions: Any
    ids: Array

    def gradient(self, gradient: Any) -> IndexedSlices:
        """Returns the table's gradient for `step()`, of the one with respect to `values`."""
        return IndexedSlices(self.ids, array_of("gradient of rows", gradient)[: len(self.ids)])


class _LocalOptimizer:
    """A worker's own optimizer: computes the update that servers subtract from the variables, and keeps its state."""

    def __init__(self, transformation: Any, params: Any) -> None:
        self._init, self._update = transformation.init, jax.jit(transformation.update)
        self._state, self._next = self._init(params), None

    def negated_update(self, gradients: Any, params: Any) -> Any:
        updates, self._next = self._update(gradients, self._state, params)
        return jax.tree_util.tree_map(lambda update: -update, updates)

    def settle(self, *, is_counted: bool) -> None:
        """Keeps the state of the last update if it counts, else drops it."""
        if is_counted:
            self._state = self._next
        self._next = None

    def restart(self, params: Any) -> None:
        self._state, self._next = self._init(params), None


class _Model:
    """A session's model: the structure of its parameters, the last parameters read, and the last contribution's outcome."""

    def __init__(self, tree: Tree, params: Any, local: _LocalOptimizer | None, numbers: Callable[[int], dict[str, Any]] | None) -> None:
        self.tree, self.params, self.local = tree, params, local
        self._numbers = numbers
        self.left_out: dict[str, None] = {}
        self.push: Push | None = None

    def numbers(self, step: int) -> dict[str, Any] | None:
        """Returns the changed learning rates for a contribution to this step; None if none change."""
        return None if self._numbers is None else self._numbers(step)

    def has_values_of(self, session: Session) -> bool:
        """Whether the session's present parameters are those read last."""
        own = self.tree.named(self.params, what="params")
        if any(leaf.is_deleted() for leaf in own.values()):
            return False  # the program has donated them to JAX
        values = session.read()
        return all(np.array_equal(values[name], np.asarray(leaf), equal_nan=True) for name, leaf in own.items())

    def read(self, session: Session, *, timeout_s: float | None = None) -> Any:
        # `read()` returns copies, whose memory JAX may use in place. `views()` change with the next step.
        self.params = self.tree.unflatten(session.read(timeout_s=timeout_s))
        return self.params


# By session; a model is kept as long as its session.
_models: WeakKeyDictionary[Session, _Model] = WeakKeyDictionary()


def create_or_join(
    session: Session, params: Any, optimizer: Any, *, tables: Mapping[str, EmbeddingTable] | None = None, **options: Any
) -> Any:
    """Creates the model with these parameters if this worker is the first, else joins it; returns the parameters to begin with.

    `params`: any pytree of float arrays: dicts, lists, tuples, dataclasses and classes that are registered with JAX. Variables are named by
    their path, for example "layers/0/w". They have the types that JAX computes with (float32 for float64, unless x64 is enabled).

    `optimizer`: an optax transformation, which the servers then run on the mean gradient: it is recognized by its parts, and its formula is
    compared with optax in a few steps before it is used. Or the result of `lockstep.adam()` or another optimizer function, or of
    `local_updates(…)`.

    `tables`: tables by name, whose rows `read_rows()` gives; with their own optimizer, or that of the parameters, but not `local_updates`.
    `options` are those of `Session.create_or_join`. Blocks while another worker creates the model. Raises InvalidSpec for a tree or an
    optimizer that cannot be used, ModelMismatch if the cluster has another model.

    Called again, it begins another phase of training with these parameters, all or some of the model's: they have the cluster's values, and
    the servers' state of the optimizer begins anew.
    """
    check_connected(session, "create_or_join()")
    tree, values = tree_of(params)
    given: Mapping[str, Any] = values
    local: _LocalOptimizer | None = None
    numbers: Callable[[int], dict[str, Any]] | None = None
    if isinstance(optimizer, OptimizerSpec):
        own = optimizer
    elif isinstance(optimizer, LocalUpdates):
        if without := [name for name, table in (tables or {}).items() if table.optimizer is None]:
            raise InvalidSpec(f"tables: {without[0]!r}: local_updates() is not for rows; give the table an optimizer of its own")
        local, own = _LocalOptimizer(optimizer.transformation, params), worker_client.sgd(1.0)
    else:
        recognized = recognize(optimizer, params)
        compare(optimizer, recognized, tree, values)
        own = recognized.optimizers[0]
        given = recognized.declared(values)
        if any(recognized.rates):
            numbers = recognized.numbers
        options = _with_limits(recognized, options)
    call = "lockstep.jax.create_or_join(session, params, optimizer"
    join(session, {**given, **(tables or {})}, optimizer=own, options=options, call=call, named="of optax")
    model = _models[session] = _Model(tree, None, local, numbers)
    model.left_out = (left_out(session, values) if session.phase else {}) | dict.fromkeys(tables or {})
    return model.read(session)


def read_rows(session: Session, name: str, ids: Any, *, timeout_s: float | None = None) -> Rows:
    """Reads the rows of a batch's ids, each once: numbers of rows, or keys, as an array of integers of any shape.

    Call it outside of jit. 64-bit keys need NumPy, or JAX with x64. Raises the errors of `Session.read_rows`.
    """
    model_of(session, "read_rows()")
    refuse_trace("read_rows()", ids)
    unique, positions = np.unique(array_of("ids", ids), return_inverse=True)
    read = session.read_rows(name, unique, timeout_s=timeout_s)
    values = np.zeros((1 << max(0, len(unique) - 1).bit_length(), *read.shape[1:]), read.dtype)
    values[: len(unique)] = read
    return Rows(jax.device_put(values), jax.device_put(positions.reshape(np.shape(ids)).astype(np.int32)), unique)


def step(
    session: Session,
    gradients: Any,
    *,
    tables: Mapping[str, IndexedSlices] | None = None,
    metrics: Metrics | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Makes one contribution, waits until its step is applied, and returns the new parameters: a new tree of JAX arrays.

    `gradients`: a tree like the parameters, as `jax.grad` returns it; None in place of an array or a branch means no gradient for it.
    `tables`: gradients of tables by name, from `Rows.gradient`. `metrics`: name to a number or a JAX scalar. `outcome(session)` returns its
    outcome. Waits until JAX has computed the gradients. Call it outside of jit. Raises the errors of `Session.step`.
    """
    model = model_of(session, "step()")
    refuse_trace("step()", gradients)
    contributed = gradients if model.local is None else model.local.negated_update(gradients, model.params)
    named = model.tree.named(contributed, what="gradients")
    for leaf in named.values():
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.copy_to_host_async()  # else a GPU is waited for once for each array
    given: dict[str, Any] = {name: None if leaf is None else array_of(f"gradients: {name!r}", leaf) for name, leaf in named.items()}
    given |= model.left_out | dict(tables or {})
    num_rollbacks = session.num_rollbacks
    model.push = None
    try:
        numbers = model.numbers(session.local_step)
        model.push = until_counted(
            session,
            lambda: session.step(given, metrics=metrics, hyperparameters=numbers, timeout_s=timeout_s),
            has_same_values=lambda: model.has_values_of(session),
        )
    finally:
        if model.local is not None:
            model.local.settle(is_counted=model.push is not None and model.push.is_accepted)
    params = model.read(session, timeout_s=timeout_s)
    if model.local is not None and session.num_rollbacks != num_rollbacks:
        model.local.restart(params)
    return params


def read(session: Session, *, timeout_s: float | None = None) -> Any:
    """Returns the newest parameters that this worker may compute with, as a tree of JAX arrays; after the end the final ones."""
    return model_of(session, "read()").read(session, timeout_s=timeout_s)


def outcome(session: Session) -> Push | None:
    """Returns the outcome of the last contribution of `step()`; None before the first, or if it ended in an error."""
    return model_of(session, "outcome()").push


def model_of(session: Session, call: str) -> _Model:
    """Returns a session's model. Raises NotInitialized, InvalidSpec."""
    check_connected(session, call)
    model = _models.get(session)
    if model is None:
        raise NotInitialized(
            f"{call}: this session has no JAX model yet; call lockstep.jax.create_or_join(session, params, optimizer) first"
        )
    return model


def _with_limits(recognized: Recognized, options: dict[str, Any]) -> dict[str, Any]:
    limits = {"clip_value": recognized.clip_value, "clip_global_norm": recognized.clip_global_norm}
    found = {name: limit for name, limit in limits.items() if limit is not None}
    if both := found.keys() & options.keys():
        raise InvalidSpec(f"{min(both)}: the optimizer limits the gradient as well; give the limit once")
    return {**options, **found}
