"""Converts a module's parameters, buffers and tables to a session's variables, and back. Knows a module and its groups; no step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.torch.embedding import Embedding, EmbeddingBag, Table
from lockstep.torch.recognition import Recognized, recognize
from lockstep.torch.tensors import FLOATS, Array, Copies, array_of, copy_all, tensor_of
from worker_client import Buffer, OptimizerSpec, Variable

TABLES = "tables"


class Model:
    """The parts of a module that a session trains: the optimizer's parameters, buffers and tables, by their names in the module.

    Parameters that the optimizer does not have are left out; tied ones count once. Raises TypeError and ValueError with what is wrong.
    """

    def __init__(
        self,
        module: "nn.Module | None",
        pairs: "list[tuple[str, torch.Tensor]]",
        optimizer: "torch.optim.Optimizer | OptimizerSpec",
        groups: list[dict[str, Any]],
        *,
        master: Any,
    ) -> None:
        self._module = module
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
        self._is_on_gpu = any(parameter.is_cuda for parameter in self.parameters.values())
        self._gradient_copies = Copies(list(self.parameters), is_on_gpu=self._is_on_gpu)
        self._begin_copies()

    def _find_tables(self) -> dict[str, Table]:
        if self._module is None:
            return {}
        found = ((name, part) for name, part in self._module.named_modules() if isinstance(part, (Embedding, EmbeddingBag)))
        return {plain_name(f"{name}.weight" if name else "weight"): part.table for name, part in found}

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
        self._copies = Copies([*self.parameters, *self._owners], is_on_gpu=self._is_on_gpu)
        self._trained = [*self.parameters.values()]
        self._version = 0
        # Kernels of normalizations change buffers without a new version number, so buffers are compared with copies.
        self._taken = [buffer.clone() for buffer in self._buffers()]

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
        for name, buffer in zip(self._owners, self._buffers(), strict=True):
            found[name] = Buffer(_statistics(buffer), "mean")
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
        buffers = self._buffers()
        with torch.no_grad():
            self._copies.out(values, self._trained + buffers)
            copy_all(self._taken, buffers)
        self._version = self._trained[0]._version if self._trained else 0

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
        found = {}
        for name, buffer, taken in zip(self._owners, self._buffers(), self._taken, strict=True):
            if (buffer.dtype in FLOATS or gives_counts) and not torch.equal(buffer, taken):
                found[name] = _statistics(buffer)
        return found or None


def plain_name(name: str) -> str:
    """Returns a parameter's name in the model itself, without that of the module in which torch.compile() wraps it."""
    return name.replace("_orig_mod.", "")


def _are_equal(parameter: "torch.Tensor", value: Array) -> bool:
    mine = parameter.detach()
    return bool(torch.allclose(mine, tensor_of(value).to(mine), rtol=0.0, atol=0.0, equal_nan=True))


def _statistics(buffer: "torch.Tensor") -> Array:
    # Whole numbers and truth values are sent as float64, which is exact up to 2^53.
    return array_of(buffer) if buffer.dtype in FLOATS else array_of(buffer.to(torch.float64))


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
