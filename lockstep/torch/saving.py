"""Saves a model's values of one step to a file that plain PyTorch loads. Knows a state_dict and a file."""

import os
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import DeadlineExceeded
from lockstep.torch.model import plain_name
from lockstep.torch.tensors import tensor_of

_MAX_TRIES = 10


def save_model(optimizer: Any, model: Any, path: str | os.PathLike[str]) -> int:
    """Writes `model.state_dict()` of the step that the parameters have, tables as whole weights, and returns that step.

    Writes the file atomically: as safetensors if its name ends in `.safetensors` (needs the package safetensors), else with torch.save.
    Call it in one worker: `if optimizer.worker_index == 0`. Reads the tables, and makes no other call. If other workers made steps in the
    meantime, takes the parameters of a later step and reads again; under ssp and async there is no common step, and the newest values are
    written. Raises DeadlineExceeded if steps pass faster than the tables can be read.
    """
    tables = _tables_of_step(optimizer) if optimizer.tables else {}
    state: dict[str, Any] = {**{plain_name(name): value for name, value in model.state_dict().items()}, **tables}
    step: int = optimizer.global_step
    place = Path(path)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        if place.suffix == ".safetensors":
            from safetensors.torch import save_file

            # Copies each tensor, because the format has no tied tensors.
            save_file({key: value.detach().cpu().clone().contiguous() for key, value in state.items()}, part, metadata={"step": str(step)})
        else:
            torch.save(state, part)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    return step


def _tables_of_step(optimizer: Any) -> dict[str, Any]:
    """Reads all tables at one step, and moves the parameters to that step."""
    session = optimizer.session
    for _ in range(_MAX_TRIES):
        step = session.local_step
        tables = {name: tensor_of(session.read_rows(name)) for name in optimizer.tables}
        # Servers keep the rows of a step until the step after the next is applied.
        if session.local_step == step and (session.policy.reads_latest or session.status().global_step <= step):
            return tables
        if session.local_step == step:
            session.wait()  # returns at once: a later step is open
        optimizer.refresh()
    raise DeadlineExceeded(
        f"save_model: {_MAX_TRIES} times others made steps while the tables were read; save a checkpoint and export it instead"
        " (session.save_checkpoint(), `lockstep checkpoint export`)"
    )
