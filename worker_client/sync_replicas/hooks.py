"""The interface of hooks, and the ready-made hooks that observe and stop. Knows runs; no cluster."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ps_protocol.process.event_file import EventFile
from worker_client.sync_replicas.graph import GLOBAL_STEP, number_of

__all__ = [
    "Coordinator",
    "FeedFnHook",
    "FinalOpsHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
]

# The interface of hooks: five calls, and their arguments.
#
# Source: tf.compat.v1.train.SessionRunHook.


@dataclass(frozen=True, slots=True)
class SessionRunArgs:
    """A hook's requests for a run: `fetches` in addition to the caller's, and `feed_dict`, which is merged with the caller's.

    `options` is accepted and has no effect.
    """

    fetches: Any
    feed_dict: Any = None
    options: Any = None


@dataclass(frozen=True, slots=True)
class SessionRunValues:
    """A hook's results of a run: `results`, in the structure of its fetches (None if it had none). The other fields are None."""

    results: Any
    options: Any = None
    run_metadata: Any = None


class SessionRunContext:
    """One call of `session.run()`, as hooks see it."""

    def __init__(self, original_args: SessionRunArgs, session: Any) -> None:
        self._original_args = original_args
        self._session = session
        self._stop_requested = False

    @property
    def original_args(self) -> SessionRunArgs:
        """The arguments that the caller gave to `run()`."""
        return self._original_args

    @property
    def session(self) -> Any:
        """The running session without hooks: its `run()` calls none, so that a hook may evaluate more."""
        return self._session

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has requested the end of this worker's training in this run."""
        return self._stop_requested

    def request_stop(self) -> None:
        """Makes the session's `should_stop()` return True from now on."""
        self._stop_requested = True


class Coordinator:
    """Whether a worker's training has to end. Thread-safe."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Requests the end. `ex` is accepted and ignored: a run raises its own errors."""
        del ex
        self._stop.set()

    def clear_stop(self) -> None:
        """Withdraws the request."""
        self._stop.clear()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Blocks until a stop is requested, at most `timeout` seconds; returns whether it was."""
        return self._stop.wait(timeout)


class SessionRunHook:
    """A base class for hooks: each method does nothing. An error that a hook raises ends the session, as an error of the run does."""

    def begin(self) -> None:
        """Called once, before there is a session: the last moment to declare variables."""

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Called once, when the session exists and its model has values."""
        del session, coord

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; returns additional fetches and feeds, or None."""
        del run_context
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run, with the results of the fetches of `before_run`; not if the run raised an error."""
        del run_context, run_values

    def end(self, session: Any) -> None:
        """Called once at the end, while the session can still be used; not if training ended by an error."""
        del session


# The ready-made hooks that only observe and stop: steps, logs, speed, NaN.
#
# Source: tf.compat.v1.train, basic_session_run_hooks.


log = logging.getLogger("lockstep.hooks")


class SecondOrStepTimer:
    """Decides when an action is due that recurs every so many seconds, or steps. Raises ValueError unless exactly one is given."""

    def __init__(
        self, every_secs: float | None = None, every_steps: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if every_secs is None and every_steps is None:
            raise ValueError("Either every_secs or every_steps should be provided.")
        if every_secs is not None and every_steps is not None:
            raise ValueError("Can not provide both every_secs and every_steps.")
        self._every_s = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets the last time, so that the action is due at once."""
        self._last_step: int | None = None
        self._last_s: float | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether the action is due at this step; never twice at the same step."""
        if self._last_step is None or self._last_s is None:
            return True
        if step == self._last_step:
            return False
        if self._every_s is not None:
            return self._clock() >= self._last_s + self._every_s
        return step >= self._last_step + (self._every_steps or 0)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Notes that the action is done; returns the seconds and steps since the last time, None at the first."""
        now = self._clock()
        if self._last_s is None or self._last_step is None:
            elapsed: tuple[float | None, int | None] = (None, None)
        else:
            elapsed = (now - self._last_s, step - self._last_step)
        self._last_s, self._last_step = now, step
        return elapsed

    def last_triggered_step(self) -> int | None:
        """Returns the step at which the action was last done."""
        return self._last_step


class StopAtStepHook(SessionRunHook):
    """Ends this worker's training when the global step has reached `last_step`, or `num_steps` more than at its start.

    Raises ValueError unless exactly one of the two is given.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is None and last_step is None:
            raise ValueError("One of num_steps or last_step must be specified.")
        if num_steps is not None and last_step is not None:
            raise ValueError("Only one of num_steps or last_step can be specified.")
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Determines the last step, and stops at once if it is already reached, for example for a worker that returns late."""
        if self._last_step is None:
            self._last_step = session.run(GLOBAL_STEP) + (self._num_steps or 0)
        if session.run(GLOBAL_STEP) >= self._last_step:
            coord.request_stop()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the global step."""
        return SessionRunArgs(GLOBAL_STEP)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Requests the end once the last step is reached."""
        if self._last_step is not None and run_values.results >= self._last_step:
            run_context.request_stop()


class NanLossDuringTrainingError(RuntimeError):
    """The loss is not a number."""

    def __str__(self) -> str:
        return "NaN loss during training."


class NanTensorHook(SessionRunHook):
    """Watches a loss: if it is NaN, raises NanLossDuringTrainingError, or, with `fail_on_nan_loss=False`, stops with a warning.

    `loss_tensor`: the loss function, a training op (its loss), or any other fetch whose value is a number.
    """

    def __init__(self, loss_tensor: Any, fail_on_nan_loss: bool = True) -> None:
        self._loss = getattr(loss_tensor, "loss", None) or loss_tensor
        self._fail_on_nan_loss = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the loss."""
        return SessionRunArgs(self._loss)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Checks the loss."""
        if not np.isnan(np.asarray(run_values.results, dtype=np.float64)).any():
            return
        if self._fail_on_nan_loss:
            log.error("Model diverged with loss = NaN.")
            raise NanLossDuringTrainingError
        log.warning("Model diverged with loss = NaN.")
        run_context.request_stop()


class LoggingTensorHook(SessionRunHook):
    """Logs values at INFO every so many runs or seconds, at the end, or both.

    `tensors`: tag to fetch, or a list of fetches (names of variables, "loss", "global_step", …). `formatter`: makes the line from the dict
    of values. Raises ValueError unless exactly one of `every_n_iter` and `every_n_secs` is given, or `at_end` alone.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not only_at_end and (every_n_iter is None) == (every_n_secs is None):
            raise ValueError("either at_end and/or exactly one of every_n_iter and every_n_secs must be provided.")
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(f"invalid every_n_iter={every_n_iter}.")
        self._tensors = dict(tensors) if isinstance(tensors, Mapping) else {_tag_of(tensor): tensor for tensor in tensors}
        self._timer = None if only_at_end else SecondOrStepTimer(every_secs=every_n_secs, every_steps=every_n_iter, clock=clock)
        self._at_end = at_end
        self._formatter = formatter or _line
        self._num_runs = 0
        self._is_due = False

    def begin(self) -> None:
        """Restarts the counting of runs."""
        self._num_runs = 0
        if self._timer is not None:
            self._timer.reset()

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetches the values, if a line is due."""
        self._is_due = self._timer is not None and self._timer.should_trigger_for_step(self._num_runs)
        return SessionRunArgs(self._tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the values."""
        if self._is_due and self._timer is not None:
            elapsed_s, _ = self._timer.update_last_triggered_step(self._num_runs)
            log.info("%s%s", self._formatter(run_values.results), "" if elapsed_s is None else f" ({elapsed_s:.3f} sec)")
        self._num_runs += 1

    def end(self, session: Any) -> None:
        """Logs the values once more, if `at_end` is set."""
        if self._at_end:
            log.info("%s", self._formatter(session.run(self._tensors)))


class StepCounterHook(SessionRunHook):
    """Logs the cluster's global steps per second, every so many steps or seconds; with `output_dir` also for TensorBoard.

    Counts the steps of all workers together. Raises ValueError unless exactly one of the two intervals is given.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | Path | None = None,
        summary_writer: EventFile | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_n_steps is None) == (every_n_secs is None):
            raise ValueError("exactly one of every_n_steps and every_n_secs should be provided.")
        self._timer = SecondOrStepTimer(every_secs=every_n_secs, every_steps=every_n_steps, clock=clock)
        self._writer = summary_writer
        self._output_dir = output_dir

    def begin(self) -> None:
        """Opens the event file, if `output_dir` is set."""
        if self._writer is None and self._output_dir is not None:
            self._writer = EventFile.in_directory(self._output_dir)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the global step."""
        return SessionRunArgs(GLOBAL_STEP)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the speed, if it is due."""
        step = run_values.results
        if not self._timer.should_trigger_for_step(step):
            return
        elapsed_s, num_steps = self._timer.update_last_triggered_step(step)
        if elapsed_s and num_steps is not None:
            log.info("global_step/sec: %g", num_steps / elapsed_s)
            if self._writer is not None:
                self._writer.add_scalars({"global_step/sec": num_steps / elapsed_s}, step=step)


class FeedFnHook(SessionRunHook):
    """Feeds each run with the result of `feed_fn()`: the second argument of the loss functions."""

    def __init__(self, feed_fn: Callable[[], Any]) -> None:
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Returns the feed, without fetches."""
        return SessionRunArgs(None, feed_dict=self._feed_fn())


class FinalOpsHook(SessionRunHook):
    """Evaluates `final_ops` at the end of a training that did not fail; `final_ops_values` has the results."""

    def __init__(self, final_ops: Any, final_ops_feed_dict: Any = None) -> None:
        self._final_ops = final_ops
        self._feed_dict = final_ops_feed_dict
        self.final_ops_values: Any = None

    def end(self, session: Any) -> None:
        """Evaluates."""
        self.final_ops_values = session.run(self._final_ops, feed_dict=self._feed_dict)


def _tag_of(tensor: Any) -> str:
    return tensor if isinstance(tensor, str) else str(getattr(tensor, "name", None) or getattr(tensor, "__name__", None) or tensor)


def _line(values: dict[str, Any]) -> str:
    return ", ".join(f"{tag} = {_words(value)}" for tag, value in values.items())


def _words(value: Any) -> str:
    try:
        number = number_of(value)
    except (TypeError, ValueError):
        return str(value)
    return str(int(number)) if math.isfinite(number) and number == int(number) and isinstance(value, int) else f"{number:.6g}"
