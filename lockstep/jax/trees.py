"""Converts pytrees to named arrays and back; defines the names of leaves, and which are valid. Knows JAX; no session, no optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.errors import InvalidSpec
from ps_protocol.model.variables import Array

# The name of the variable of a model that is a single array without a container.
SINGLE = "value"


@dataclass(frozen=True, slots=True)
class Tree:
    """The structure of a model: the names of its leaves, in order, and the device or sharding of each (None: JAX's default device)."""

    structure: Any
    names: tuple[str, ...]
    places: tuple[Any, ...]

    def unflatten(self, values: Mapping[str, Array]) -> Any:
        """Returns the tree with these values as JAX arrays. JAX takes over the memory of `values`, so do not write to it any more.

        On the CPU, JAX uses large aligned NumPy arrays in place (jax#37830), even where a copy is requested.
        """
        leaves = [jax.device_put(values[name], place) for name, place in zip(self.names, self.places, strict=True)]
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def changed(self, tree: Any, values: Mapping[str, Array]) -> Any:
        """Returns such a tree with other values for some leaves, whose memory JAX takes over."""
        named = zip(self.names, self.places, jax.tree_util.tree_leaves(tree), strict=True)
        leaves = [jax.device_put(values[name], place) if name in values else leaf for name, place, leaf in named]
        return jax.tree_util.tree_unflatten(self.structure, leaves)

    def named(self, tree: Any, *, what: str) -> dict[str, Any]:
        """Returns the leaves of such a tree by name; a leaf or a branch may be None. Raises InvalidSpec for another structure."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure == self.structure:
            return dict(zip(self.names, leaves, strict=True))
        given = dict(_named_leaves(tree))
        branches = tuple(f"{name}/" for name, leaf in given.items() if leaf is None and name not in self.names)
        if branches:
            given = {name: leaf for name, leaf in given.items() if f"{name}/" not in branches}
            given |= {name: None for name in self.names if name.startswith(branches)}
        missing, unknown = [n for n in self.names if n not in given], [n for n in given if n not in self.names]
        if missing or unknown:
            words = [f"lacks {_list(missing)}"] * bool(missing) + [f"has {_list(unknown)}, unknown to the model"] * bool(unknown)
            raise InvalidSpec(f"{what}: another tree than the model's: it {' and '.join(words)}; give a tree like the parameters")
        return given


def tree_of(params: Any) -> tuple[Tree, dict[str, Array]]:
    """Returns the structure of a model's parameters, and copies of their values.

    Raises InvalidSpec for parameters that cannot be a model.
    """
    refuse_trace("create_or_join()", params)
    named = _named_leaves(params, with_none=False)
    structure = jax.tree_util.tree_structure(params)
    if not named:
        raise InvalidSpec(f"params: got {type(params).__name__} without any array in it, want a pytree of arrays")
    values = {}
    for name, leaf in named:
        if name in values:
            raise InvalidSpec(f"params: two leaves are called {name!r}; use keys without '/'")
        values[name] = _value(name, leaf)
    places = tuple(_place(leaf) for _, leaf in named)
    return Tree(structure, tuple(values), places), values


def array_of(what: str, leaf: Any) -> Array:
    """Returns a leaf as a NumPy array, for reading only. Waits until JAX has computed it. Raises InvalidSpec for anything but an array."""
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidSpec(f"{what}, a {type(leaf).__name__}, cannot be read as an array: {first_line}") from error
    if array.dtype == jax.dtypes.float0:
        raise InvalidSpec(f"{what} is the gradient of an integer, which JAX does not have; keep integers out of the parameters")
    return array


def refuse_trace(call: str, tree: Any) -> None:
    """Raises InvalidSpec while JAX traces: a call to servers would be made only once, when the function is compiled."""
    leaves = jax.tree_util.tree_leaves(tree)
    # If the traced function was given no part of the tree, only an array that JAX makes itself shows the trace.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves) or isinstance(jax.device_put(0.0), jax.core.Tracer):
        raise InvalidSpec(
            f"{call} was called inside a function that JAX transforms (jit, grad, vmap, scan): it talks to servers in every step, "
            "so call it outside, with what the transformed function returns"
        )


def path_name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf: the keys, indices and attributes on its path from the root, joined by "/"."""
    return "/".join(_key(part) for part in path) or SINGLE


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def _named_leaves(tree: Any, *, with_none: bool = True) -> list[tuple[str, Any]]:
    is_leaf = (lambda leaf: leaf is None) if with_none else None
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_name(path), leaf) for path, leaf in pairs]


def _value(name: str, leaf: Any) -> Array:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InvalidSpec(f"params: {name!r} is a random key; keep it out of the parameters")
    array = array_of(f"params: {name!r}", leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InvalidSpec(f"params: {name!r} is {array.dtype}, want floats: only they have gradients; keep it out of the parameters")
    # The type that JAX computes with, so that gradients have the same. A copy, because the program may donate its array.
    return np.array(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype))


def _place(leaf: Any) -> Any:
    """Returns a leaf's sharding if it is on several devices, else None: JAX then chooses the device, as for any other array."""
    sharding = getattr(leaf, "sharding", None)
    return None if sharding is None or len(sharding.device_set) == 1 else sharding


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:10])
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown
