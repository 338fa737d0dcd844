"""Converts a module's parameters, buffers and tables to a session's variables, and back. Knows a module and its groups; no step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.torch.embedding import Embedding, EmbeddingBag, Table
from lockstep.torch.recognition import Recognized, recognize
from lockstep.torch.tensors import FLOATS, Array, Copies, array_of, gpus_of, tensor_of
from worker_client import Buffer, OptimizerSpec, Variable

TABLES = "tables"


class Model:
    """The parts of a module that a session trains: the optimizer's parameters, buffers and tables, by their names in the module.

    Parameters that the optimizer does not have are left out; tied ones count once. Raises TypeError and ValueError with what is wrong.
    """

    def __init__(self, model: Any, optimizer: "torch.optim.Optimizer | OptimizerSpec", *, master: Any) -> None:
        self._module = module = model if isinstance(model, nn.Module) else None
        pairs = list(module.named_parameters()) if module is not None else _pairs(model)
        self.groups = groups = _groups_of(optimizer, pairs)
        named = {plain_name(name): one for name, one in pairs}
        names = {id(parameter): name for name, parameter in reversed(named.items())}
        self.group_of: dict[str, int] = {}
        self.recognized: list[Recognized] = []
        for position, group in enumerate(groups):
            self.recognized.append(recognize(optimizer, group))
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"the optimizer has a parameter of shape {shape} in group {position} that is not the model's: make the optimizer"
                        " from this model's parameters, after the last change of its layers"
                    )
                check_parameter(name, parameter)
                self.group_of[name] = position
        # In the module's order, which all workers share.
        self.parameters = {name: named[name] for name in named if name in self.group_of}
        self._shapes = [parameter.shape for parameter in self.parameters.values()]
        self.tables = self._find_tables()
        self._owners = self._find_buffers()
        self._master = master
        self.specs = [one.spec if position == 0 else one.spec.in_group(f"group {position}") for position, one in enumerate(self.recognized)]
        self._gradient_copies = Copies(list(self.parameters), gpus=gpus_of(self.parameters.values()))
        self._begin_copies()

    def _find_tables(self) -> dict[str, Table]:
        if self._module is None:
            return {}
        found: dict[str, Table] = {}
        for name, part in self._module.named_modules():
            # Modules that share a table have it under the name of the first.
            if isinstance(part, (Embedding, EmbeddingBag)) and not any(part.table is table for table in found.values()):
                found[plain_name(f"{name}.weight" if name else "weight")] = part.table
        return found

    def _find_buffers(self) -> "dict[str, tuple[dict[str, Any], str]]":
        """Returns the dict and key of each buffer, because modules may replace the tensors."""
        if self._module is None:
            return {}
        kept = self._module.state_dict(keep_vars=True)
        found = {}
        for name, buffer in self._module.named_buffers():
            if name in kept and not buffer.is_complex():
                path, _, key = name.rpartition(".")
                found[plain_name(name)] = self._module.get_submodule(path)._buffers, key
        return found

    def _begin_copies(self) -> None:
        self._copies = Copies([*self.parameters, *self._owners], gpus=gpus_of([*self.parameters.values(), *self._buffers()]))
        self._trained = [*self.parameters.values()]
        self._version = 0
        # Kernels of normalizations change buffers without a new version number, so buffers are compared with what they were.
        self._parts: dict[str, _Part] = {}
        end = 0
        for name, buffer in zip(self._owners, self._buffers(), strict=True):
            is_count = buffer.dtype not in FLOATS
            dtype = np.dtype(np.float64) if is_count else array_of(buffer.new_empty(0)).dtype
            self._parts[name] = _Part(slice(end, end := end + buffer.numel()), tuple(buffer.shape), dtype, is_count)
        self._taken = self._statistics()

    def _statistics(self) -> Array:
        """Returns the numbers of all buffers, one after the other, with one copy for each device.

        As float64, which is exact for whole numbers up to 2^53, truth values and all floats.
        """
        by_device: dict[torch.device, list[tuple[slice, torch.Tensor]]] = {}
        for part, buffer in zip(self._parts.values(), self._buffers(), strict=True):
            # Other devices than CUDA's may not have float64.
            one = (buffer if buffer.is_cuda else buffer.cpu()).detach().reshape(-1).to(torch.float64)
            by_device.setdefault(one.device, []).append((part.place, one))
        found = np.empty(sum(math.prod(part.shape) for part in self._parts.values()))
        for parts in by_device.values():
            flat, end = torch.cat([one for _, one in parts]).cpu().numpy(), 0
            for place, one in parts:
                found[place] = flat[end : (end := end + one.numel())]
        return found

    def _buffers(self) -> "list[torch.Tensor]":
        return [owner[key] for owner, key in self._owners.values()]

    def drop_buffers(self) -> None:
        """Leaves the buffers out, so that each worker keeps its own."""
        self._owners = {}
        self._begin_copies()

    # -- declaring

    def declarations(self) -> dict[str, Any]:
        """Returns the declarations for `create_or_join`."""
        found: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            value = array_of(parameter if self._master is None else parameter.detach().to(self._master))
            position = self.group_of[name]
            found[name] = value if position == 0 else Variable(value, optimizer=self.specs[position])
        for name, part in self._parts.items():
            found[name] = Buffer(part.of(self._taken), "mean")
        for name, table in self.tables.items():
            own = table.declared.optimizer
            found[name] = table.declared if own is not None else replace(table.declared, optimizer=self.table_spec)
        return found

    @property
    def table_spec(self) -> OptimizerSpec:
        """The optimizer of tables without their own: the first group's, applied only to rows with a gradient."""
        first = self.specs[0]
        lazy = {"lazy": 1.0} if "lazy" in first.kind.hyperparameters else {}
        return replace(first, hyperparameters={**first.hyperparameters, **lazy}).in_group(TABLES)

    # -- values, gradients and statistics

    def take(self, values: Mapping[str, Array]) -> None:
        """Copies the variables of a step into the parameters and buffers."""
        with torch.no_grad():
            self._copies.out(values, self._trained + self._buffers())
        for name, part in self._parts.items():
            self._taken[part.place] = values[name].reshape(-1)
        self._version = self._trained[0]._version if self._trained else 0

    def held(self, name: str) -> Array:
        """Returns a copy of a parameter or a buffer as it is now, as servers have it."""
        if (parameter := self.parameters.get(name)) is not None:
            return array_of(parameter)
        owner, key = self._owners[name]
        return array_of(owner[key].to(torch.float64) if self._parts[name].is_count else owner[key])

    def put(self, values: Mapping[str, Array]) -> None:
        """Copies values into some of the parameters and buffers."""
        with torch.no_grad():
            for name, value in values.items():
                owner, key = self._owners.get(name, (self.parameters, name))
                owner[key].copy_(tensor_of(value))

    @property
    def counts(self) -> list[str]:
        """The buffers of whole numbers."""
        return [name for name, part in self._parts.items() if part.is_count]

    def is_overwritten(self, values: Callable[[], Mapping[str, Array]]) -> bool:
        """Whether the program has changed the first parameter since the variables were copied to it."""
        if not self._trained or self._trained[0]._version == self._version:
            return False
        self._version = self._trained[0]._version
        name, parameter = next(iter(self.parameters.items()))
        return not _are_equal(parameter, values()[name])

    def has_values(self, values: Mapping[str, Array]) -> bool:
        """Whether the parameters equal these variables, so that their gradients are gradients of the variables."""
        return all(_are_equal(parameter, values[name]) for name, parameter in self.parameters.items())

    def gradients(self) -> "dict[str, torch.Tensor]":
        """Returns the existing gradients as dense tensors. Raises ValueError if the shape of a parameter has changed."""
        found = {name: gradient for name, parameter in self.parameters.items() if (gradient := parameter.grad) is not None}
        for name in [name for name, gradient in found.items() if gradient.layout is not torch.strided]:
            found[name] = found[name].to_dense()
        if [parameter.shape for parameter in self._trained] != self._shapes:
            self._refuse_shapes()
        return found

    def _refuse_shapes(self) -> None:
        for (name, parameter), shape in zip(self.parameters.items(), self._shapes, strict=True):
            if parameter.shape != shape:
                now, had = tuple(parameter.shape), tuple(shape)
                raise ValueError(f"parameter {name!r} has shape {now} now, and had {had} when the optimizer was made")

    def stage(self, gradients: "Mapping[str, torch.Tensor]", sink: dict[str, Any], *, scale: float) -> None:
        """Writes the gradients, multiplied by `scale`, into the arrays of `sink`.

        A parameter without a gradient gets None in place of its array.
        """
        signs = [-scale if one.is_negated else scale for one in self.recognized]
        is_same = all(sign == signs[0] for sign in signs)
        with torch.no_grad():
            self._gradient_copies.into(sink, gradients, scale=signs[0] if is_same else [signs[self.group_of[name]] for name in gradients])
        if len(gradients) < len(self.parameters):
            sink.update(dict.fromkeys(self.parameters.keys() - gradients.keys()))

    def updates(self, *, gives_counts: bool) -> dict[str, Array] | None:
        """Returns the buffers that have changed since the last step; those of whole numbers only if `gives_counts`."""
        if not self._parts:
            return None
        now, taken = self._statistics(), self._taken
        given = {name: part for name, part in self._parts.items() if gives_counts or not part.is_count}
        return {name: part.of(now) for name, part in given.items() if not np.array_equal(now[part.place], taken[part.place])} or None


class _Part(NamedTuple):
    """Where a buffer's numbers are among those of all buffers, and the array that the servers have of it."""

    place: slice
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    is_count: bool

    def of(self, numbers: Array) -> Array:
        """Returns the buffer's array."""
        return numbers[self.place].astype(self.dtype).reshape(self.shape)


def plain_name(name: str) -> str:
    """Returns a parameter's name in the model itself, without that of the module in which torch.compile() wraps it."""
    return name.replace("_orig_mod.", "")


def _are_equal(parameter: "torch.Tensor", value: Array) -> bool:
    mine = parameter.detach()
    return bool(torch.allclose(mine, tensor_of(value).to(mine), rtol=0.0, atol=0.0, equal_nan=True))


def check_parameter(name: str, parameter: "torch.Tensor") -> None:
    """Raises TypeError or ValueError unless servers can hold such a parameter."""
    if parameter.dtype not in FLOATS:
        raise TypeError(
            f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: servers train float16, bfloat16, float32 and float64;"
            " leave it out of the optimizer, or register it as a buffer"
        )
    if parameter.device.type == "meta":
        raise ValueError(f"parameter {name!r} has no values (device meta); give it some, for example by model.to_empty(device='cpu')")
    if parameter.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} is sparse; use lockstep.torch.Embedding, whose rows are on the servers")


def _pairs(model: Any) -> "list[tuple[str, torch.Tensor]]":
    """Returns the pairs of a model that is given as pairs. Raises TypeError for anything else."""
    wanted = "want a torch.nn.Module, or (name, parameter) pairs such as model.named_parameters()"
    if not isinstance(model, Iterable) or isinstance(model, (Mapping, torch.Tensor)):
        raise TypeError(f"model: got a {type(model).__name__}, {wanted}")
    given = list(model)
    for one in given:
        if not (isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], torch.Tensor)):
            raise TypeError(f"model: got a {type(one).__name__} among the pairs, {wanted}")
    return given


def _groups_of(optimizer: "torch.optim.Optimizer | OptimizerSpec", named: "list[tuple[str, torch.Tensor]]") -> list[dict[str, Any]]:
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: list[dict[str, Any]] = optimizer.param_groups
        return groups
    rate = optimizer.learning_rate
    numbers = optimizer.hyperparameters if optimizer.is_custom else optimizer.numbers
    return [{"params": [one for _, one in named if one.requires_grad], "lr": rate.arguments.get("value", 0.0), **numbers}]
