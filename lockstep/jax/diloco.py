"""DiLoCo for pytrees of JAX. Knows how leaves become the arrays that `worker_client.outer` has outer steps of."""

import logging
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

import worker_client
from lockstep.jax.training import model_of
from lockstep.jax.trees import refuse_trace
from ps_protocol.model.variables import Array
from worker_client.session.session import Session

log = logging.getLogger("lockstep.jax")


class DiLoCo:
    """Counts inner steps by an optimizer of the worker's own, and has all workers step together after each `sync_every` of them.

    For a session that has its model by `create_or_join(session, params, outer)`, where `outer` is `lockstep.outer_optimizer(sync_every)`
    or another, such as `lockstep.sgd(1.0)`. `options`: those of `lockstep.DiLoCo`, which `self.outer` is; it has `global_step`,
    `is_finished` and `report()`. `params`: the parameters to begin with. Call it outside of jit.
    """

    def __init__(self, session: Session, *, sync_every: int, **options: Any) -> None:
        self._tree = model_of(session, "DiLoCo()").tree
        self.outer = worker_client.DiLoCo(session, sync_every=sync_every, names=self._tree.names, **options)
        self.params = self._tree.unflatten({name: value.copy() for name, value in self.outer.values.items()})

    def inner_state(self, state: Any) -> Any:
        """Returns the inner optimizer's state to begin with: what was kept by `inner_state_dir`, in a tree like `state`; else `state`."""
        leaves, structure = jax.tree_util.tree_flatten(state)
        kept = [*self.outer.inner_state.values()]
        if [_bytes_of(leaf) for leaf in leaves] != [leaf.nbytes for leaf in kept]:
            if kept:
                log.warning("the inner optimizer begins anew: its state that was kept has other arrays than this optimizer's")
            return state
        given = [jax.numpy.asarray(one.view(np.asarray(leaf).dtype)) for one, leaf in zip(kept, leaves, strict=True)]
        return jax.tree_util.tree_unflatten(structure, given)

    def step(self, params: Any, inner_state: Any = None) -> Any:
        """Counts an inner step; returns the parameters to go on with: the same, or new ones. Blocks and raises as `lockstep.DiLoCo.step`.

        `inner_state`: the optimizer's, any tree of arrays, to be kept.
        """
        return self._changed(params, self.outer.step(self._named(params), lambda: _arrays(inner_state)))

    def sync(self, params: Any, inner_state: Any = None) -> Any:
        """Makes an outer step now, of all fragments; all workers must do so. Returns the cluster's parameters."""
        return self._changed(params, self.outer.sync(self._named(params), lambda: _arrays(inner_state)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.outer.__exit__(kind, error, trace)

    def _named(self, params: Any) -> dict[str, Any]:
        refuse_trace("DiLoCo.step()", params)
        return self._tree.named(params, what="params")

    def _changed(self, params: Any, given: dict[str, Array]) -> Any:
        return self._tree.changed(params, given) if given else params


def _arrays(state: Any) -> dict[str, Array]:
    return {str(position): np.asarray(leaf) for position, leaf in enumerate(jax.tree_util.tree_leaves(state))}


def _bytes_of(leaf: Any) -> int:
    return np.asarray(leaf).nbytes
