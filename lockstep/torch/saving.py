"""A model's values of one step as a file that plain PyTorch loads. Knows a state_dict and a file."""

import os
from pathlib import Path
from typing import Any

import torch

from lockstep.torch.tensors import tensor_of


def save_model(optimizer: Any, model: Any, path: str | os.PathLike[str]) -> int:
    """Writes `model.state_dict()` of the step that the parameters have, tables as whole weights, and returns that step.

    The file appears whole, or not at all. `.safetensors` is written in that format (the package safetensors), anything else by torch.save.
    One worker is enough: `if optimizer.worker_index == 0`. Reads the tables, and sends nothing else.
    """
    state: dict[str, Any] = dict(model.state_dict())
    step: int = optimizer.global_step
    for name in optimizer.tables:
        state[name] = tensor_of(optimizer.session.read_rows(name))
    place = Path(path)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        if place.suffix == ".safetensors":
            from safetensors.torch import save_file

            # Each tensor once more: the format has no tied ones.
            save_file({key: value.detach().cpu().clone().contiguous() for key, value in state.items()}, part, metadata={"step": str(step)})
        else:
            torch.save(state, part)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    return step
