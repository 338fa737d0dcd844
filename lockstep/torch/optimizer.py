"""A torch.optim.Optimizer whose steps the parameter servers compute. Knows a session and a model; no formula, no tensor's memory.

`step()` sends the gradients as this worker's contribution, waits for the step, and copies its values into the parameters.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch

from lockstep.contributing import OVERWRITTEN, AddedGradients, check_session, join, left_out, session_of, trains_no_more, until_counted
from lockstep.torch import data
from lockstep.torch.model import TABLES, Model
from lockstep.torch.recognition import Recognized
from lockstep.torch.tensors import FLOATS
from worker_client import OptimizerSpec, Push, Session

log = logging.getLogger("lockstep.torch")


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]  # PyTorch may not be installed where types are checked
    """Trains `model` over the workers of a cluster by the formula of `optimizer`. For one thread; does not survive a fork.

    `session`: the result of `lockstep.connect()` or `local()`; None or a dict: the optimizer connects with these arguments, and leaves the
    cluster when it is closed or the program ends, which exits with 1 if training was interrupted. `model`: a module, or (name, parameter)
    pairs. `optimizer`: a torch optimizer over the model's parameters, of which only the parameter groups are used, or a value such as
    `lockstep.lion(1e-4)`.

    All workers begin with the first worker's values. `buffers`: "mean" (float buffers become the mean over the workers, others are worker
    0's) or "local" (each worker keeps its own). `master_dtype`: the type that the servers compute in; None: each parameter's own type. The
    other arguments are those of `Session.create_or_join`.

    A second optimizer on a session begins another phase of training: values stay, the servers' state of the optimizer begins anew.
    """

    def __init__(
        self,
        session: Session | Mapping[str, Any] | None,
        model: Any,
        optimizer: "torch.optim.Optimizer | OptimizerSpec",
        *,
        buffers: str = "mean",
        master_dtype: Any = None,
        **options: Any,
    ) -> None:
        if isinstance(optimizer, Optimizer):
            raise TypeError("this is a lockstep.torch.Optimizer already; give it the torch optimizer that it was made of")
        if not isinstance(optimizer, (torch.optim.Optimizer, OptimizerSpec)):
            raise TypeError(f"optimizer: got a {type(optimizer).__name__}, want torch.optim.SGD(model.parameters(), …) or another")
        if buffers not in ("mean", "local"):
            raise ValueError(f"buffers = {buffers!r}, want 'mean' or 'local'")
        check_session(session)
        if not (master_dtype is None or master_dtype in FLOATS):
            raise TypeError(f"master_dtype = {master_dtype!r}, want torch.float32, another type of floats of torch, or None")
        self._model = Model(model, optimizer, master=master_dtype)
        groups = self._model.groups
        if buffers == "local":
            self._model.drop_buffers()
        self._torch = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._is_made = False
        super().__init__(groups, self._torch.defaults if self._torch is not None else {"lr": groups[0]["lr"]})
        self._is_made = True
        self._sent: list[_Numbers] = [_Numbers(one.numbers(group)) for one, group in zip(self._model.recognized, groups, strict=True)]
        self._metrics: dict[str, Any] = {}
        self._added = AddedGradients()
        self._warned: set[str] = set()
        self._followers: dict[int, _Follower] = {}
        self.last_push: Push | None = None
        self.num_steps = 0
        self._session = session_of(session)
        declared, name = self._model.declarations(), type(optimizer).__name__ if self._torch is not None else "'custom'"
        join(self._session, declared, optimizer=self._model.specs[0], options=options, call="Optimizer(session, …", named=name)
        self._phase = self._session.phase
        self._left_out = left_out(self._session, declared) if self._phase else {}
        for name, table in self._model.tables.items():
            table.read_rows = _reader(self._session, name)
        self.refresh()

    # Makes PyTorch's GradScaler call `step()` even if a gradient is infinite, because other workers wait for this one.
    _step_supports_amp_scaling = True

    # -- a step

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0) -> Any:
        """Contributes the gradients, waits for the step, and copies the new values into the parameters; returns the result of `closure`.

        `weight`: how much the gradients count in the mean over the workers, such as the samples of the batch. After the end of training
        (`is_finished`) it changes nothing. Errors are those of `Session.step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        session = self._session
        if (error := trains_no_more(session, self._phase)) is not None:
            raise error
        if session.is_finished:
            self._warn_once("training is finished: this step and later ones change nothing; end the loop when optimizer.is_finished")
            return loss
        scale, is_infinite = self._amp()
        if is_infinite:
            for table in self._model.tables.values():
                table.forget()
            give: Callable[[], Push] = session.skip
        else:
            give = self._contribution(scale, weight)
        self.last_push = until_counted(session, give, has_same_values=lambda: self._model.has_values(session.views()))
        self.num_steps += 1
        if self._torch is not None:
            self._torch._opt_called = True  # schedulers that were made with that optimizer check this
        self.refresh()
        return loss

    def report(self, **metrics: Any) -> None:
        """Reports metrics with the next step: each a number, or a number and its weight; see `Session.step`."""
        for name, value in metrics.items():
            self._metrics[name] = value.item() if isinstance(value, torch.Tensor) else value

    def follow(self, scheduler: Any) -> None:
        """Advances a learning-rate scheduler to the training's present step.

        Call it instead of `scheduler.step()`, and once when it is made.

        Then a restarted worker has the same rates as the others, and a rollback restores earlier rates. For a scheduler that is stepped
        once per step, and that is the only one of its groups (ChainedScheduler and SequentialLR combine several).
        """
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "follow(): ReduceLROnPlateau goes by a metric, not by the step: call scheduler.step(metric) on each worker, with a number"
                " that is the same on all of them"
            )
        known = self._followers.get(id(scheduler))
        if known is None:
            numbers = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
            known = self._followers[id(scheduler)] = _Follower(scheduler, copy.deepcopy(scheduler.state_dict()), copy.deepcopy(numbers))
        if scheduler.last_epoch > self.global_step:
            scheduler.load_state_dict(copy.deepcopy(known.state))
            for group, numbers_of in zip(self.param_groups, known.numbers, strict=True):
                group.update(copy.deepcopy(numbers_of))
        for one in (self, self._torch):
            if one is not None:
                one._opt_called = True  # schedulers check this, and a worker that joins later has made no step in this process
        while scheduler.last_epoch < self.global_step:
            scheduler.step()

    def _contribution(self, scale: float, weight: float) -> Callable[[], Push]:
        """Returns a function that contributes this step's gradients, metrics and updates; it may be called again."""
        session, model, gradients = self._session, self._model, self._model.gradients()
        self._check(gradients)
        numbers = self._numbers()
        rows = {name: table.take(-scale if model.recognized[0].is_negated else scale) for name, table in model.tables.items()}
        updates = model.updates(gives_counts=session.worker_index == 0)
        metrics, self._metrics = self._metrics, {}

        def give() -> Push:
            staged: dict[str, Any] = session.gradient_buffers()
            model.stage(gradients, staged, scale=scale)
            staged.update(rows)
            staged.update(self._left_out)
            return session.step(staged, updates=updates, metrics=metrics or None, hyperparameters=numbers, weight=weight)

        return give

    def _amp(self) -> tuple[float, bool]:
        """Returns the factor for the gradients, and whether a GradScaler has found an infinite one."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return 1.0, False
        scale = getattr(self, "grad_scale", None)
        if scale is None and any(table.has_gradient for table in self._model.tables.values()):
            raise RuntimeError("scaler.unscale_() does not know the rows of tables; leave it out, and have scaler.step() do it")
        return (1.0 if scale is None else 1.0 / float(scale)), bool(found)

    def _check(self, gradients: "Mapping[str, torch.Tensor]") -> None:
        """Raises RuntimeError if there is no gradient; warns once of likely mistakes."""
        if not gradients and not any(table.has_gradient for table in self._model.tables.values()):
            raise RuntimeError(
                "no parameter has a gradient: call loss.backward() before step(), and make the optimizer after the model's last change. A"
                " worker without a gradient calls optimizer.session.skip(), so that the others do not wait for it"
            )
        if self._added.are_in(next(iter(gradients.values()), None)):
            self._warn_once(AddedGradients.FORGOTTEN.format("optimizer.zero_grad()"))
        if self._model.is_overwritten(self._session.views):
            self._warn_once(OVERWRITTEN.format("parameters, as load_state_dict() does"))

    def _numbers(self) -> dict[str, Any] | None:
        """Returns the learning rates and hyper-parameters that a scheduler or the program has changed since the optimizer was made."""
        found: dict[str, Any] = {}
        for position, (known, one, group) in enumerate(zip(self._sent, self._model.recognized, self.param_groups, strict=True)):
            numbers = known.changed(one, group, f"group {position}")
            if not numbers:
                continue
            if position == 0:
                found.update(numbers)
                if any(table.declared.optimizer is None for table in self._model.tables.values()):
                    found[TABLES] = numbers
            elif group["params"]:
                found[f"group {position}"] = numbers
        return found or None

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning(words)

    # -- the interface of torch optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, including those of tables."""
        if set_to_none:
            # The same as in torch, without the calls for its profiler and compiler in each step.
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)
        for table in self._model.tables.values():
            table.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: the model is agreed on when the optimizer is made.

        Give a parameter that is to be trained later to the torch optimizer from the start, with requires_grad=False: without a gradient it
        does not change.
        """
        if self._is_made:
            raise RuntimeError(
                "the cluster has its model: no parameter group can be added. Give all groups to the torch optimizer first; what is to be"
                " trained later has requires_grad=False until then"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the parameter groups, and the step; the optimizer's state is on the servers, and in the cluster's checkpoints."""
        return {**super().state_dict(), "lockstep": {"step": self.global_step}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the numbers of the parameter groups, which hold from the next step on. The servers' state does not change.

        Raises ValueError for groups of another optimizer, or with another formula.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for position, (one, group) in enumerate(zip(self._model.recognized, groups, strict=False)):  # torch checks their number
            one.check(f"load_state_dict(): group {position}", group)
            for name, value in one.fixed.items():
                group.setdefault(name, value)  # for a state from an older torch without this option
        if state_dict.get("state"):
            self._warn_once(
                "the state of the optimizer is on the parameter servers, and what was loaded of it is not used; numbers of groups are"
            )
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        if self._torch is not None:
            self._torch.param_groups = self.param_groups  # so that schedulers made with that optimizer keep working

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a lockstep.torch.Optimizer belongs to one process: it cannot be copied, pickled, or given to a DataLoader's workers"
        )

    def __deepcopy__(self, memo: Any) -> Self:
        self.__getstate__()
        raise AssertionError

    # -- the cluster

    @property
    def session(self) -> Session:
        """The session, for all other calls."""
        return self._session

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""
        return self._session.is_finished

    @property
    def global_step(self) -> int:
        """The step whose values the parameters have."""
        return self._session.local_step

    @property
    def worker_index(self) -> int:
        """The index of this worker, from 0."""
        return self._session.worker_index

    @property
    def num_workers(self) -> int:
        """The number of workers that the cluster is for."""
        return self._session.num_workers

    @property
    def tables(self) -> list[str]:
        """The names of the tables of the model's embeddings."""
        return list(self._model.tables)

    def refresh(self) -> None:
        """Copies the values of this worker's step into the parameters, or the newest values under ssp, async and fifo tokens.

        `step()` does this by itself.
        """
        self._model.take(self._session.views())

    def batches(self, dataset: Any, batch_size: int, **options: Any) -> Iterator[Any]:
        """Yields batches of a data set, each sample to one worker; see `lockstep.torch.data.batches` for the options.

        When the data ends, the parameters get the values of the last step, which all workers then have.
        """
        yield from data.batches(self._session, dataset, batch_size, **options)
        self.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.__exit__(kind, error, trace)

    def close(self) -> None:
        """Leaves the cluster. Idempotent."""
        self._session.close()


class _Follower(NamedTuple):
    """A scheduler, with its state and the groups' numbers when it was made."""

    scheduler: Any
    state: Any
    numbers: list[dict[str, Any]]


class _Numbers:
    """A group's numbers that the servers have, and those that steps have changed."""

    def __init__(self, initial: dict[str, float]) -> None:
        self._initial = initial
        self._changed_names: set[str] = set()
        self._last: tuple[list[Any], dict[str, float]] | None = None

    def changed(self, one: Recognized, group: Mapping[str, Any], what: str) -> dict[str, float]:
        """Returns the numbers that differ from the initial ones, or once did. Raises ValueError if the formula has changed."""
        values = one.values(group)
        if self._last is not None and self._last[0] == values:
            return self._last[1]
        one.check(what, group)
        now = one.numbers(group)
        self._changed_names.update(name for name, value in now.items() if value != self._initial[name])
        found = {name: now[name] for name in now if name in self._changed_names}
        self._last = values, found
        return found


def _reader(session: Session, name: str) -> Callable[[Any], Any]:
    return lambda indices: session.read_rows(name, indices)
