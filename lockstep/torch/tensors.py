"""Copies between tensors and NumPy arrays, whole lists at once, on any device. Keeps no shared memory between them. Knows no session."""

import contextlib
import ctypes
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.shared_memory.segment import mapping_of

Array = npt.NDArray[Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The servers' memory alternates between two sets of arrays.
_NUM_SETS = 2
_READ_ONLY = 0x08  # cudaHostRegisterReadOnly
# Shared memory that CUDA has been told of, or has refused, by address.
_known_to_gpus: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


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


def gpus_of(tensors: "Iterable[torch.Tensor]") -> "list[torch.device]":
    """Returns the devices of CUDA on which these tensors lie, each once."""
    return list(dict.fromkeys(one.device for one in tensors if one.is_cuda))


def _let_gpus_copy(memory: memoryview) -> None:
    """Has GPUs copy to and from shared memory directly, which is several times as fast. If CUDA refuses, they copy in the slower way.

    Only for memory that processes share: after a fork, a process may have other pages of its own memory than those that CUDA knows.
    """
    mapping: Any = memory.obj
    address = ctypes.addressof(mapping)
    if address in _known_to_gpus:
        return
    _known_to_gpus[address], cuda = mapping, torch.cuda.cudart()
    if cuda.cudaHostRegister(address, memory.nbytes, _READ_ONLY if memory.readonly else 0) == cuda.cudaError.success:
        # Called before the memory is unmapped: of an object's finalizers, the last is called first.
        weakref.finalize(mapping, cuda.cudaHostUnregister, address).atexit = False
        return
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").item()  # CUDA gives its last error to the next caller: to this one, not to the program


def _bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


class Copies:
    """Copies between tensors and arrays with these names, in their order: `out` of the servers' memory, and `into` it.

    The tensors may lie on any devices; `gpus`: those that CUDA knows. One call of torch copies all of them, and is complete on return.
    """

    def __init__(self, names: Sequence[str], *, gpus: Collection["torch.device"] = ()) -> None:
        self._names = tuple(names)
        self._positions = {name: position for position, name in enumerate(self._names)}
        # Arrays, kept so that no other array gets one of their ids; their ids; tensors that share their memory.
        self._sets: list[tuple[list[Array], list[int], list[torch.Tensor]]] = []
        self._gpus = tuple(gpus)

    def out(self, arrays: Mapping[str, Array], tensors: "list[torch.Tensor]") -> None:
        """Copies the arrays into these tensors, one for each name, and rounds to the tensors' types."""
        if tensors:
            self._copy(tensors, self._tensors_of(arrays))

    def into(self, arrays: Mapping[str, Array], tensors: "Mapping[str, torch.Tensor]", *, scale: float | list[float] = 1.0) -> None:
        """Copies the given tensors, in the order of the names, into their arrays, with rounding, multiplied by `scale`.

        `scale`: a number, or one for each of these tensors.
        """
        if not tensors:
            return
        sinks, sources = self._tensors_of(arrays), [*tensors.values()]
        if len(sources) < len(sinks):
            sinks = [sinks[self._positions[name]] for name in tensors]
        self._copy(sinks, sources)
        if scale != 1.0:
            torch._foreach_mul_(sinks, scale)

    def _copy(self, targets: "list[torch.Tensor]", sources: "list[torch.Tensor]") -> None:
        torch._foreach_copy_(targets, sources, non_blocking=bool(self._gpus))
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()

    def _tensors_of(self, arrays: Mapping[str, Array]) -> "list[torch.Tensor]":
        given = [*map(arrays.__getitem__, self._names)]
        ids = [*map(id, given)]
        for _, known, tensors in self._sets:
            if known == ids:
                return tensors
        if self._gpus:
            for memory in filter(None, map(mapping_of, given)):
                _let_gpus_copy(memory)
        made = [tensor_of(array) for array in given]
        self._sets = [*self._sets[1 - _NUM_SETS :], (given, ids, made)]
        return made
