"""A module's parameters, buffers and tables as the variables of a session, and back. Knows a module and its optimizer's groups; no step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.torch.embedding import Embedding, EmbeddingBag, Table
from lockstep.torch.recognition import Recognized, recognize
from lockstep.torch.tensors import FLOATS, Array, Copies, array_of
from worker_client import Buffer, OptimizerSpec, Variable

TABLES = "tables"


class Model:
    """What a session has of a module: parameters that the optimizer has, buffers and tables, by their names in the module.

    Parameters that the optimizer does not have are left out; tied ones count once. Raises TypeError and ValueError with what is wrong.
    """

    def __init__(
        self, module: Any, optimizer: "torch.optim.Optimizer | OptimizerSpec", groups: list[dict[str, Any]], *, master: Any
    ) -> None:
        self._module = module if isinstance(module, nn.Module) else None
        named = dict(module.named_parameters()) if self._module is not None else dict(module)
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
                        f"the optimizer has a parameter of shape {shape} in group {position} that the model has not: make the optimizer"
                        " from this model's parameters, after the last change of its layers"
                    )
                check_parameter(name, parameter)
                self.group_of[name] = position
        # In the module's order, which all workers share.
        self.parameters = {name: named[name] for name in named if name in self.group_of}
        self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.tables = self._find_tables()
        self.buffers = self._find_buffers()
        self._master = master
        self.specs = [one.spec if position == 0 else one.spec.in_group(f"group {position}") for position, one in enumerate(self.recognized)]
        is_on_gpu = any(parameter.is_cuda for parameter in self.parameters.values())
        self.copies = Copies([*self.parameters, *self.buffers], is_on_gpu=is_on_gpu)
        self.gradient_copies = Copies(list(self.parameters), is_on_gpu=is_on_gpu)
        self._taken: dict[str, torch.Tensor] = {}

    def _find_tables(self) -> dict[str, Table]:
        if self._module is None:
            return {}
        found = ((name, part) for name, part in self._module.named_modules() if isinstance(part, (Embedding, EmbeddingBag)))
        return {f"{name}.weight" if name else "weight": part.table for name, part in found}

    def _find_buffers(self) -> "dict[str, torch.Tensor]":
        if self._module is None:
            return {}
        kept = self._module.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self._module.named_buffers() if name in kept and not buffer.is_complex()}

    def drop_buffers(self) -> None:
        """Leaves the buffers to each worker."""
        self.buffers = {}
        self.copies = Copies(list(self.parameters), is_on_gpu=any(one.is_cuda for one in self.parameters.values()))

    # -- declaring

    def declarations(self) -> dict[str, Any]:
        """Returns what `create_or_join` is given."""
        found: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            value = array_of(parameter if self._master is None else parameter.detach().to(self._master))
            position = self.group_of[name]
            found[name] = value if position == 0 else Variable(value, optimizer=self.specs[position])
        for name, buffer in self.buffers.items():
            found[name] = Buffer(self._statistics(buffer), "mean")
        for name, table in self.tables.items():
            own = table.declared.optimizer
            found[name] = table.declared if own is not None else replace(table.declared, optimizer=self.table_spec)
        return found

    @property
    def table_spec(self) -> OptimizerSpec:
        """The optimizer of tables that have none of their own: the first group's, for the rows that have a gradient."""
        first = self.specs[0]
        lazy = {"lazy": 1.0} if "lazy" in first.kind.hyperparameters else {}
        return replace(first, hyperparameters={**first.hyperparameters, **lazy}).in_group(TABLES)

    def _statistics(self, buffer: "torch.Tensor") -> Array:
        # Whole numbers and truth values travel as float64, in which those up to 2^53 are what they are.
        return array_of(buffer) if buffer.dtype in FLOATS else array_of(buffer.to(torch.float64))

    # -- values, gradients and statistics

    def take(self, values: Mapping[str, Array]) -> None:
        """Copies the variables of a step into the parameters and buffers."""
        self._refresh()
        with torch.no_grad():
            self.copies.out(values, {**self.parameters, **self.buffers})
        # The kernels of normalizations change theirs without a word, so they are compared.
        self._taken = {name: buffer.clone() for name, buffer in self.buffers.items()}

    def _refresh(self) -> None:
        """A buffer may have been given another tensor."""
        if self._module is not None and self.buffers:
            now = dict(self._module.named_buffers())
            self.buffers = {name: now.get(name, buffer) for name, buffer in self.buffers.items()}

    def gradients(self) -> "dict[str, torch.Tensor]":
        """Returns the gradients that there are, dense. Raises ValueError where one does not fit its parameter."""
        found = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            found[name] = gradient
        return found

    def updates(self, *, gives_counts: bool) -> dict[str, Array] | None:
        """Returns the statistics that have changed since the last step; those that are whole numbers only if `gives_counts`."""
        self._refresh()
        found = {}
        for name, buffer in self.buffers.items():
            if (buffer.dtype in FLOATS or gives_counts) and not torch.equal(buffer, self._taken[name]):
                found[name] = self._statistics(buffer)
        return found or None


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
