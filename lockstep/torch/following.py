"""Follows a cluster's weights into a module, in place, whole steps at a time. Knows tensors and a follower; no transport."""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from lockstep.torch.model import plain_name
from lockstep.torch.tensors import Array, tensor_of
from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import is_boundary
from ps_protocol.model.layout import VariableSlice
from ps_protocol.security.options import Security
from worker_client import Follower, Part
from worker_client.following.follow import follow as follow_arrays
from worker_client.following.follower import decoded
from worker_client.opening import TIMEOUT_S

# Encoded words that are elements of a tensor as they are.
_HALVES = {FloatEncoding.BFLOAT16: torch.bfloat16, FloatEncoding.FLOAT16: torch.float16}


@is_boundary
def follow(
    module: "nn.Module",
    chief: str | None = None,
    *,
    wire: str | None = None,
    names: "Iterable[str] | Mapping[str, str | Part] | None" = None,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    security: Security | None = None,
) -> "ModuleFollower":
    """Follows the weights of a cluster step by step into a module, at `swap()`; returns the follower, a context manager.

    `names` None: the variables that have the names of the module's parameters, all of which must be there, and of its buffers, where they
    are; else some of them, as for `lockstep.follow()`: names, or a dict from a name in the module to one in the cluster or to a `Part`.
    `wire` None: the type of the parameters if all are bfloat16 or all float16; else as for `lockstep.follow()`, which has the other
    arguments and errors.
    """
    return ModuleFollower(
        module,
        follow_arrays(chief, wire=wire or _wire_of(module), names=names, cluster=cluster, timeout_s=timeout_s, security=security),
        is_part=names is not None,
    )


class ModuleFollower:
    """A module whose parameters and buffers become those of a cluster's newest step at each `swap()`. Made by `follow()`.

    `weights`: what follows, with `step`, `version`, `lag`, `is_over`. For one thread of the program.
    """

    def __init__(self, module: "nn.Module", weights: Follower, *, is_part: bool = False) -> None:
        self.weights = weights
        self._module, self._is_part = module, is_part
        # The module's tensors, and what the follower knows them by: others may have taken their places since the last call.
        self._tensors: dict[str, torch.Tensor] = {}
        self._key = object()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.weights.close()

    def swap(self, *, max_lag: int | None = None, step: int | None = None, timeout_s: float | None = None) -> int:
        """Copies the newest weights that are there into the module, all of one step, and returns the step: call it between generations.

        Waits as `Follower.wait()` does with these arguments, at least for the first step. Copies only variables that have changed since the
        last call, to wherever the tensors lie and in their types: change them by `swap` alone. Raises ValueError, and then has copied
        nothing, where a name or shape is not the cluster's; what `wait()` raises.
        """
        self.weights.wait(max_lag=max_lag, step=step, timeout_s=timeout_s)
        tensors = _tensors_of(self._module)
        if tensors.keys() != self._tensors.keys() or any(one is not self._tensors[name] for name, one in tensors.items()):
            self._tensors, self._key = tensors, object()
        targets: dict[str, torch.Tensor] | None = None

        def put(name: str, part: Part, piece: VariableSlice, content: Array, encoding: FloatEncoding) -> None:
            nonlocal targets
            if targets is None:  # here, while the follower changes nothing, so that nothing is copied of what does not fit
                targets = self._checked(self.weights.shapes)
            if name in targets:
                part_of(targets[name], piece).copy_(tensor_of_slice(part, piece, content, encoding))

        with torch.no_grad():
            return self.weights.take(self._key, put).step

    def _checked(self, shapes: Mapping[str, tuple[int, ...]]) -> "dict[str, torch.Tensor]":
        """Returns the tensors that take variables of these names and shapes."""
        found: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for name in shapes:
            if name not in self._tensors:
                if self._is_part:
                    raise ValueError(
                        f"the module has no parameter or buffer {name!r}; names= maps names in the module to those of variables"
                    )
                continue
            tensor = self._tensors[name]
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name!r} has shape {tuple(tensor.shape)} in the module, and {shapes[name]} in the cluster")
            if tensor.device.type == "meta" or tensor.layout is not torch.strided or hasattr(tensor, "full_tensor"):
                raise ValueError(f"{name!r} is not a plain tensor with values on one device; its parts can be followed with names=")
            if (other := names.setdefault(id(tensor), name)) != name:
                raise ValueError(f"{other!r} and {name!r} are one tensor in the module, and two variables in the cluster; choose by names=")
            found[name] = tensor
        for name, parameter in self._module.named_parameters() if not self._is_part else ():
            if id(parameter) not in names:
                raise ValueError(
                    f"the cluster has no dense variable for the parameter {plain_name(name)!r}; if the module keeps its own, say by names="
                    " which to follow"
                )
        return found


def tensor_of_slice(part: Part, piece: VariableSlice, content: Array, encoding: FloatEncoding) -> "torch.Tensor":
    """Returns the values of a slice that `Follower.take` gives, only to be copied at once. Halves are halves, without a detour."""
    half = _HALVES.get(encoding)
    values = content.view(np.int16).reshape(piece.shape) if half is not None else decoded(content, piece, encoding)
    source = tensor_of(np.asarray(values[part.index], order="C"))
    return source if half is None else source.view(half)


def part_of(target: "torch.Tensor", piece: VariableSlice) -> "torch.Tensor":
    """Returns the part of a variable's tensor, or of the tensor for a `Part` of it, that such a slice is."""
    return target if piece.is_whole else target.narrow(piece.axis, piece.start, piece.stop - piece.start)


def _tensors_of(module: "nn.Module") -> "dict[str, torch.Tensor]":
    """Returns parameters and buffers by all of their names, tied ones by each."""
    pairs: list[tuple[str, Any]] = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {plain_name(name): one for name, one in pairs}


def _wire_of(module: "nn.Module") -> str | None:
    types = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return next((FORMATS[encoding].name for encoding, half in _HALVES.items() if types == {half}), None)
