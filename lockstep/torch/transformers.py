"""A callback for the Trainer of transformers, and those of TRL: publishes the model after each optimizer step. Knows no follower.

trainer = Trainer(model=model, callbacks=[PublishCallback()], …)   # lockstep up --ps 2 --workers 1 -- python train.py
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import TrainerCallback

import lockstep
from lockstep.torch.model import plain_name

Pairs = Iterable[tuple[str, "torch.Tensor"]]


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where types are checked
    """Publishes the parameters that a Trainer has after each optimizer step, from its first process.

    `parameters`: what gives them, of the model that the Trainer has, as names and whole tensors; called in every process, so that it may
    gather what is spread over them. None: `named_parameters()`, and those of FSDP 2 gathered; DeepSpeed's ZeRO 3 needs a function of its
    own. `arguments` are those of `lockstep.publish()`. A program that is started again goes on with the cluster's next step, whatever step
    the Trainer resumes from.
    """

    def __init__(self, *, parameters: Callable[[Any], Pairs] | None = None, **arguments: Any) -> None:
        self._parameters = parameters or _gathered
        self._arguments = arguments
        self._values: list[tuple[str, torch.Tensor]] = []
        self.publisher: lockstep.Publisher | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Joins the cluster, which gets the model's values if it has none. Raises what `lockstep.publish()` raises."""
        self._values = [*self._parameters(model)]
        if state.is_world_process_zero:
            self.publisher = lockstep.publish(lambda: self._values, **self._arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Publishes the next step; blocks until followers can have it."""
        self._values = [*self._parameters(model)]
        if self.publisher is not None:
            self.publisher.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leaves the cluster."""
        if self.publisher is not None:
            self.publisher.close()


def _gathered(model: Any) -> Pairs:
    for name, parameter in model.named_parameters():
        whole = getattr(parameter, "full_tensor", None)  # a DTensor's
        yield plain_name(name), parameter if whole is None else whole()
