"""DiLoCo for a module and an optimizer of torch. Knows how tensors become the arrays that `worker_client.outer` has outer steps of."""

import io
import logging
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

import lockstep
from lockstep.contributing import check_session, join, session_of, trains_no_more
from lockstep.torch.model import Model
from lockstep.torch.optimizer import Optimizer
from lockstep.torch.tensors import Array
from worker_client import OptimizerSpec, Session, WireFormat
from worker_client.outer import check_numbers

log = logging.getLogger("lockstep.torch")


class DiLoCo:
    """Trains a module by an optimizer of the worker's own, and after each `sync_every` steps of that together with all workers.

    While the `with` block is open, each call of `inner.step()` is an inner step of `lockstep.DiLoCo`, which `self.outer` is: it explains
    `sync_every`, `fragments`, `delay`, `alpha`, `inner_state_dir` and `by_speed`, and has `session`, `global_step`, `is_finished` and
    `report()`.

    `session`, `model`, `buffers` and `options`: those of `lockstep.torch.Optimizer`. `inner`: an optimizer of torch over parameters of the
    model; its state stays in the worker. `outer`: None is `lockstep.outer_optimizer(sync_every)`: Nesterov momentum of 0.9 at a rate of
    0.7, and a lower one below 50 inner steps. `wire`: how the exchange travels, for a session that is opened here; see `lockstep.connect`.

    An inner step that completes an outer one blocks, without a `delay`, until the cluster has made it, and raises what `Session.step`
    raises; the parameters then stay, and `sync()` or the next inner step tries again. What is not contributed is lost where the cluster
    goes back to a checkpoint, and at the end of the block, unless `sync()` is called before. After an exception nothing is contributed.
    """

    def __init__(
        self,
        session: "Session | Mapping[str, Any] | None",
        model: "nn.Module",
        inner: "torch.optim.Optimizer",
        *,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        outer: OptimizerSpec | None = None,
        inner_state_dir: "str | os.PathLike[str] | None" = None,
        by_speed: bool = False,
        wire: str | WireFormat | None = None,
        buffers: str = "mean",
        **options: Any,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, Optimizer):
            raise TypeError(
                f"inner: got a {type(inner).__name__}, want an optimizer of torch, such as torch.optim.AdamW(model.parameters())"
            )
        check_session(session)
        check_numbers(sync_every=sync_every, fragments=fragments, delay=delay, alpha=alpha)
        if wire is not None:
            if isinstance(session, Session):
                raise TypeError("wire: the session is open already; give it to lockstep.connect()")
            session = {**(session or {}), "wire": wire}
        spec = outer or lockstep.outer_optimizer(sync_every)
        self._inner, self._model = inner, Model(model, spec, master=None)
        if buffers not in ("mean", "local"):
            raise ValueError(f"buffers = {buffers!r}, want 'mean' or 'local'")
        if buffers == "local":
            self._model.drop_buffers()
        if tables := [*self._model.tables]:
            raise TypeError(f"{tables[0]!r} is a table on the servers, whose rows take no inner steps: use torch.nn.Embedding")
        declared = self._model.declarations()
        self._session = session_of(session)
        join(self._session, declared, optimizer=spec, options=options, call="DiLoCo(session, …", named="outer")
        self._phase = self._session.phase
        self.outer = lockstep.DiLoCo(
            self._session,
            sync_every=sync_every,
            fragments=fragments,
            delay=delay,
            alpha=alpha,
            names=declared,
            counts=self._model.counts,
            inner_state_dir=inner_state_dir,
            by_speed=by_speed,
        )
        self._model.put(self.outer.values)
        if self.outer.inner_state:
            self._restore(self.outer.inner_state)
        self._values, self._hook = _Held(self._model, [*declared]), None

    def __enter__(self) -> Self:
        self._hook = self._inner.register_step_post_hook(lambda *_: self._count())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook.remove()
        try:
            self.outer.__exit__(kind, error, trace)
        finally:
            self._session.__exit__(kind, error, trace)

    def sync(self) -> None:
        """Makes an outer step now, of the inner steps since the last one; all workers must do so. Blocks, and raises, as `inner.step()`."""
        self._model.put(self.outer.sync(self._values, self._state))

    def _count(self) -> None:
        if (error := trains_no_more(self._session, self._phase)) is not None:
            raise error
        self._model.put(self.outer.step(self._values, self._state))

    def _state(self) -> dict[str, Array]:
        file = io.BytesIO()
        torch.save(self._inner.state_dict(), file)
        return {"torch": np.frombuffer(file.getvalue(), np.uint8)}

    def _restore(self, state: Mapping[str, Array]) -> None:
        try:
            kept = torch.load(io.BytesIO(state["torch"].tobytes()), map_location="cpu", weights_only=True)
            self._inner.load_state_dict(kept)
        except Exception as error:  # that of another optimizer may raise anything
            log.warning("the inner optimizer begins anew: its state that was kept cannot be used: %s", error)


class _Held(Mapping[str, Array]):
    """A model's present values, each copied when it is looked up."""

    def __init__(self, model: Model, names: list[str]) -> None:
        self._model, self._names = model, names

    def __getitem__(self, name: str) -> Array:
        return self._model.held(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
