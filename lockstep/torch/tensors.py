"""Copies between tensors and NumPy arrays, whole lists at once, on any device. Keeps no shared memory between them. Knows no session."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The servers' memory alternates between two sets of arrays.
_NUM_SETS = 2


def array_of(tensor: "torch.Tensor") -> Array:
    """Returns a copy of a tensor as an array. Raises ImportError for bfloat16 without the package ml_dtypes."""
    plain = tensor.detach().to("cpu", copy=True).contiguous()
    if plain.dtype is not torch.bfloat16:
        found: Array = plain.numpy()
        return found
    halves: Array = plain.view(torch.int16).numpy().view(_bfloat16())
    return halves


def tensor_of(array: Array) -> "torch.Tensor":
    """Returns a tensor that shares an array's memory: only for a copy made at once; do not pass it on."""
    if array.dtype.name == "bfloat16":
        return tensor_of(array.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        # The array may be read-only: it is only copied from.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def copy_all(targets: "list[torch.Tensor]", sources: "list[torch.Tensor]") -> None:
    """Copies each source into its target, in one call; the lists may be empty."""
    if targets:
        torch._foreach_copy_(targets, sources)


def _bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


class Copies:
    """Copies between tensors and arrays with these names, in their order: `out` of the servers' memory, and `into` it.

    The tensors may lie on any device. One call of torch copies all of them.
    """

    def __init__(self, names: Sequence[str], *, is_on_gpu: bool) -> None:
        self._names = tuple(names)
        self._positions = {name: position for position, name in enumerate(self._names)}
        # Arrays, kept so that no other array gets one of their ids; their ids; tensors that share their memory.
        self._sets: list[tuple[list[Array], list[int], list[torch.Tensor]]] = []
        # Copies to and from a GPU use pinned memory.
        self._is_pinned = is_on_gpu and torch.cuda.is_available()
        self._pinned: dict[str, torch.Tensor] = {}

    def out(self, arrays: Mapping[str, Array], tensors: "list[torch.Tensor]") -> None:
        """Copies the arrays into these tensors, one for each name, and rounds to the tensors' types."""
        sources = self._tensors_of(arrays)
        if self._is_pinned and sources:
            pinned = [self._pin(name, source) for name, source in zip(self._names, sources, strict=True)]
            torch.cuda.synchronize()  # the last copy from this memory must be complete
            torch._foreach_copy_(pinned, sources)
            torch._foreach_copy_(tensors, pinned, non_blocking=True)
            return
        copy_all(tensors, sources)

    def into(self, arrays: Mapping[str, Array], tensors: "Mapping[str, torch.Tensor]", *, scale: float | list[float] = 1.0) -> None:
        """Copies the given tensors, in the order of the names, into their arrays, with rounding, multiplied by `scale`.

        `scale`: a number, or one for each of these tensors.
        """
        if not tensors:
            return
        sinks, sources = self._tensors_of(arrays), [*tensors.values()]
        if len(sources) < len(sinks):
            sinks = [sinks[self._positions[name]] for name in tensors]
        if self._is_pinned:
            pinned = [self._pin(name, sink) for name, sink in zip(tensors, sinks, strict=True)]
            torch._foreach_copy_(pinned, sources, non_blocking=True)
            torch.cuda.synchronize()
            sources = pinned
        torch._foreach_copy_(sinks, sources)
        if scale != 1.0:
            torch._foreach_mul_(sinks, scale)

    def _pin(self, name: str, like: "torch.Tensor") -> "torch.Tensor":
        if name not in self._pinned:
            self._pinned[name] = torch.empty_like(like, pin_memory=True)
        return self._pinned[name]

    def _tensors_of(self, arrays: Mapping[str, Array]) -> "list[torch.Tensor]":
        given = [*map(arrays.__getitem__, self._names)]
        ids = [*map(id, given)]
        for _, known, tensors in self._sets:
            if known == ids:
                return tensors
        made = [tensor_of(array) for array in given]
        self._sets = [*self._sets[1 - _NUM_SETS :], (given, ids, made)]
        return made
