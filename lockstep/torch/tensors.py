"""Tensors and NumPy arrays of the same numbers: whole lists copied at once, on any device, never kept as one memory. Knows no session."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Servers give and take two sets of memory by turns.
_NUM_SETS = 2


def array_of(tensor: "torch.Tensor") -> Array:
    """Returns a tensor's numbers in an array of its own. Raises ImportError for bfloat16 without the package ml_dtypes."""
    plain = tensor.detach().to("cpu", copy=True).contiguous()
    if plain.dtype is not torch.bfloat16:
        found: Array = plain.numpy()
        return found
    halves: Array = plain.view(torch.int16).numpy().view(_bfloat16())
    return halves


def tensor_of(array: Array) -> "torch.Tensor":
    """Returns a tensor in an array's very memory: for a copy that is made at once, and never to be given away."""
    if array.dtype.name == "bfloat16":
        return tensor_of(array.view(np.int16)).view(torch.bfloat16)
    with warnings.catch_warnings():
        # Nothing writes to memory that is read-only: it is only copied from.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


class Copies:
    """Copies between tensors and arrays of these names: `out` from the servers' memory, `into` it. `tensors` may lie on any device."""

    def __init__(self, names: Sequence[str], *, is_on_gpu: bool) -> None:
        self._names = names
        self._sets: list[tuple[list[Array], list[torch.Tensor]]] = []
        # From and to a GPU by memory that it can reach by itself.
        self._is_pinned = is_on_gpu and torch.cuda.is_available()
        self._pinned: dict[str, torch.Tensor] = {}

    def out(self, arrays: Mapping[str, Array], tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Writes what arrays hold into tensors, and rounds to their types."""
        sources = self._tensors_of(arrays)
        if self._is_pinned:
            pinned = [self._pin(name, source) for name, source in zip(self._names, sources, strict=True)]
            torch.cuda.synchronize()  # what was copied from there last has arrived
            torch._foreach_copy_(pinned, sources)
            torch._foreach_copy_([tensors[name] for name in self._names], pinned, non_blocking=True)
            return
        torch._foreach_copy_([tensors[name] for name in self._names], sources)

    def into(self, arrays: Mapping[str, Array], tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Writes those of the tensors that there are into the arrays of their names, and rounds to their types."""
        sinks = dict(zip(self._names, self._tensors_of(arrays), strict=True))
        targets = [sinks[name] for name in tensors]
        sources = list(tensors.values())
        if not sources:
            return
        if self._is_pinned:
            pinned = [self._pin(name, sinks[name]) for name in tensors]
            torch._foreach_copy_(pinned, sources, non_blocking=True)
            torch.cuda.synchronize()
            sources = pinned
        torch._foreach_copy_(targets, sources)

    def _pin(self, name: str, like: "torch.Tensor") -> "torch.Tensor":
        if name not in self._pinned:
            self._pinned[name] = torch.empty_like(like, pin_memory=True)
        return self._pinned[name]

    def _tensors_of(self, arrays: Mapping[str, Array]) -> "list[torch.Tensor]":
        given = [arrays[name] for name in self._names]
        for known, tensors in self._sets:
            if all(one is other for one, other in zip(known, given, strict=True)):
                return tensors
        made = [tensor_of(array) for array in given]
        self._sets = [*self._sets[1 - _NUM_SETS :], (given, made)]
        return made
