"""Training that talks once in many steps: workers step by themselves, then all of them by how far each came. Knows an Optimizer."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

import lockstep
from lockstep.torch.optimizer import Optimizer
from worker_client import OptimizerSpec, Session

log = logging.getLogger("lockstep.torch")


class DiLoCo:
    """Trains a module by an optimizer of the worker's own, and after each `sync_every` steps of that together with all workers.

    While the `with` block is open, each call of `inner.step()` is an inner step. The last of `sync_every` contributes how far the worker
    came, `anchor - parameters`, as a gradient; the anchor is what the cluster had before. The servers step by the workers' mean with the
    outer optimizer, and the parameters become what comes of it: DiLoCo, arXiv 2311.08105, algorithm 1. With `outer=lockstep.sgd(1.0)` it is
    local SGD, arXiv 1805.09767: the mean of the workers' parameters. The mean is weighted by inner steps. Under `lockstep.outer_policy()`
    an outer step does not wait for workers that are late, and loses nothing of theirs.

    `session`, `model` and `options`: those of `lockstep.torch.Optimizer`, which `self.outer` is, with `session`, `global_step`, `report()`
    and `is_finished`. `inner`: an optimizer of torch over parameters of the model; its state stays in the worker. `outer`: None is Nesterov
    momentum of 0.9 at a rate of 0.7, which suits some hundred inner steps; fewer want a lower rate. `inner_state_dir`: a directory in which
    the inner state is kept at each outer step, so that a worker that is started again goes on with it; None: it begins anew.

    An inner step that completes an outer one blocks until the cluster has made it, and raises what `Session.step` raises; the parameters
    are then where the inner steps had brought them, up to rounding, and `sync()` tries again. What is not contributed is lost where the
    cluster goes back to a checkpoint, and at the end of the block, unless `sync()` is called before.
    """

    def __init__(
        self,
        session: "Session | Mapping[str, Any] | None",
        model: "nn.Module",
        inner: "torch.optim.Optimizer",
        *,
        sync_every: int,
        outer: OptimizerSpec | None = None,
        inner_state_dir: "str | os.PathLike[str] | None" = None,
        **options: Any,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, Optimizer):
            raise TypeError(
                f"inner: got a {type(inner).__name__}, want an optimizer of torch, such as torch.optim.AdamW(model.parameters())"
            )
        if type(sync_every) is not int or sync_every < 1:
            raise ValueError(f"sync_every: got {sync_every!r}, want how many inner steps make an outer one, at least 1")
        self.num_inner_steps = 0
        self._inner, self._sync_every, self._num_since = inner, sync_every, 0
        self.outer = Optimizer(session, model, outer or lockstep.momentum(0.7, 0.9, use_nesterov=True), **options)
        if self.outer.tables:
            self.outer.close()
            raise TypeError(f"{self.outer.tables[0]!r} is a table on the servers, whose rows take no inner steps: use torch.nn.Embedding")
        self._parameters: list[torch.Tensor] = [one for group in self.outer.param_groups for one in group["params"]]
        self._anchors = [one.detach().clone() for one in self._parameters]
        self._kept = None if inner_state_dir is None else Path(inner_state_dir, f"worker-{self.outer.worker_index}.pt")
        self._restore_inner_state()
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = self._inner.register_step_post_hook(lambda *_: self._count())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()
        if error is None and self._num_since and not self.outer.is_finished:
            log.warning(
                "%d inner steps since outer step %d were not contributed: call sync() first", self._num_since, self.outer.global_step
            )
        self.outer.__exit__(kind, error, trace)

    def sync(self) -> None:
        """Makes an outer step now, of the inner steps since the last one; all workers must do so. Blocks, and raises, as `inner.step()`."""
        gradients = [one.grad for one in self._parameters]
        with torch.no_grad():
            for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
                parameter.grad = anchor - parameter
                parameter.copy_(anchor)  # a contribution is computed from the cluster's values
            try:
                self.outer.step(weight=max(1, self._num_since))
            except BaseException:
                for parameter in self._parameters:
                    parameter.sub_(parameter.grad)  # to where the worker was
                raise
            finally:
                for parameter, gradient in zip(self._parameters, gradients, strict=True):
                    parameter.grad = gradient
            for parameter, anchor in zip(self._parameters, self._anchors, strict=True):
                anchor.copy_(parameter)
        self._num_since = 0
        self._keep_inner_state()

    def _count(self) -> None:
        self.num_inner_steps += 1
        self._num_since += 1
        if self._num_since >= self._sync_every:
            self.sync()

    def _keep_inner_state(self) -> None:
        if self._kept is not None:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            incomplete = self._kept.with_suffix(".incomplete")
            torch.save({"step": self.outer.global_step, "inner": self._inner.state_dict()}, incomplete)
            incomplete.replace(self._kept)

    def _restore_inner_state(self) -> None:
        step = self.outer.global_step
        if not step:
            return  # what may be there is of another training
        if self._kept is None or not self._kept.exists():
            log.warning("the inner optimizer begins anew at outer step %d: nothing was kept of its state", step)
            return
        try:
            kept = torch.load(self._kept, map_location="cpu", weights_only=True)
            self._inner.load_state_dict(kept["inner"])
        except Exception as error:  # a file that was damaged may raise anything
            log.warning("the inner optimizer begins anew at outer step %d: %s cannot be used: %s", step, self._kept, error)
            return
        log.info("the inner optimizer goes on with its state of outer step %d, at outer step %d", kept["step"], step)
