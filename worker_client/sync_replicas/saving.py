"""The hooks that write files, and a worker's checkpoint file (safetensors). Knows runs, files and a clock; no cluster."""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ps_protocol.checkpoint.tensor_file import SavedTensor, encode_header, mapped
from ps_protocol.errors import DataLoss
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process.event_file import EventFile
from worker_client.sync_replicas.graph import GLOBAL_STEP, number_of
from worker_client.sync_replicas.hooks import (
    Coordinator,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "SummarySaverHook",
    "latest_checkpoint",
    "load_checkpoint",
]

# A worker's checkpoint file: variables and averages by name, in the safetensors format.
#
# It holds values only, no optimizer slots and no state of the servers.


_FILE = re.compile(r"-(\d+)\.safetensors$")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint: arrays by name, and the global step at which they were read."""

    values: dict[str, Array]
    global_step: int


def save_checkpoint(prefix: str | Path, values: Mapping[str, Array], *, global_step: int) -> Path:
    """Writes `<prefix>-<step>.safetensors` atomically, and returns its path. Creates the directory if it is missing."""
    path = Path(f"{prefix}-{global_step:08d}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    header, tensors = encode_header(
        [SavedTensor(name=name, array=value) for name, value in values.items()], {"global_step": str(global_step)}
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            file.write(tensor.array.tobytes())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return path


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Returns the content of a checkpoint. Raises OSError, and DataLoss for a file that is damaged or not a checkpoint."""
    header, tensors = mapped(Path(path))
    step = header.metadata.get("global_step", "")
    if not step.isdecimal():
        raise DataLoss(f"{path}: its global_step is {step[:40]!r}; use an earlier checkpoint")
    values = {one.name: tensors[one.start : one.stop].copy().view(one.dtype).reshape(one.shape) for one in header.tensors}
    return Checkpoint(values=values, global_step=int(step))


def checkpoints(checkpoint_dir: str | Path) -> list[Path]:
    """Returns the paths of a directory's checkpoints, the last written first: the steps of a training that began anew are lower."""
    found = [path for path in Path(checkpoint_dir).glob("*.safetensors") if _FILE.search(path.name)]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def latest_checkpoint(checkpoint_dir: str | Path) -> Path | None:
    """Returns the path of the checkpoint that was written last in a directory; None if there is none."""
    return next(iter(checkpoints(checkpoint_dir)), None)


# The ready-made hooks that write files: checkpoints and summaries.


log = logging.getLogger("lockstep.worker")


class CheckpointSaverListener:
    """A base class for listeners to checkpoints: each method does nothing."""

    def begin(self) -> None:
        """Called once, before there is a session."""

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Called before a checkpoint is written."""

    def after_save(self, session: Any, global_step_value: int) -> bool | None:
        """Called after a checkpoint was written; returns True to end this worker's training."""
        del session, global_step_value
        return None

    def end(self, session: Any, global_step_value: int) -> None:
        """Called once at the end, after the last checkpoint."""


class CheckpointSaverHook(SessionRunHook):
    """Writes the variables and averages to `checkpoint_dir` at the start, every so many seconds or steps, and at the end.

    Files are `<checkpoint_basename>-<step>.safetensors`, each written atomically; the newest `max_to_keep` are kept. They hold values only,
    no optimizer slots and no tables. Averages have the names "<variable>/<their name>". `saver` and `scaffold` are accepted and have no
    effect. Raises ValueError for both of them together, and unless exactly one of the intervals is given.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: Any = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        *,
        max_to_keep: int = 5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError("You cannot provide both saver and scaffold.")
        self._prefix = Path(checkpoint_dir) / checkpoint_basename
        self._timer = SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps, clock=clock)
        self._listeners = tuple(listeners or ())
        self._max_to_keep = max_to_keep
        self._saved: list[Path] = []

    def begin(self) -> None:
        """Tells the listeners."""
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Writes the first checkpoint."""
        self._save(session, session.run(GLOBAL_STEP))

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Asks for the global step."""
        return SessionRunArgs(GLOBAL_STEP)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes a checkpoint, if one is due."""
        if self._timer.should_trigger_for_step(run_values.results) and self._save(run_context.session, run_values.results):
            run_context.request_stop()

    def end(self, session: Any) -> None:
        """Writes the last checkpoint, unless there is one of that step."""
        step = session.run(GLOBAL_STEP)
        if step != self._timer.last_triggered_step():
            self._save(session, step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Any, step: int) -> bool:
        """Writes a checkpoint; returns whether a listener requests the end of training."""
        for listener in self._listeners:
            listener.before_save(session, step)
        path = save_checkpoint(self._prefix, values_of(session), global_step=step)
        self._timer.update_last_triggered_step(step)
        log.info("checkpoint written step=%d path=%s", step, path)
        self._forget_old(path)
        wishes = [listener.after_save(session, step) for listener in self._listeners]
        return any(wishes)

    def _forget_old(self, newest: Path) -> None:
        self._saved = [*(path for path in self._saved if path != newest), newest]
        while self._max_to_keep and len(self._saved) > self._max_to_keep:
            self._saved.pop(0).unlink(missing_ok=True)


def values_of(session: Any) -> dict[str, Array]:
    """Returns the values for a checkpoint: dense variables and averages by name. `session` is a hook's session."""
    values: dict[str, Array] = dict(session.read())  # copies, of one step
    graph = session.graph
    if graph.averages is not None:
        values |= {f"{name}/{graph.average_name}": np.array(value) for name, value in session.session.read_averages().items()}
    return values


class SummarySaverHook(SessionRunHook):
    """Writes numbers for TensorBoard every so many seconds or steps, to `output_dir` or with `summary_writer`.

    `summary_op`: tag to a fetch whose value is a number ({"loss": loss}), or one such fetch. `scaffold` is accepted and stands for the
    graph's loss. Raises ValueError unless exactly one of `summary_op` and `scaffold` is given, and exactly one of the intervals.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | Path | None = None,
        summary_writer: EventFile | None = None,
        scaffold: Any = None,
        summary_op: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (scaffold is None) == (summary_op is None):
            raise ValueError("Exactly one of scaffold or summary_op must be provided.")
        fetches = "loss" if summary_op is None else summary_op
        self._fetches = dict(fetches) if isinstance(fetches, Mapping) else {str(getattr(fetches, "name", "loss")): fetches}
        self._timer = SecondOrStepTimer(every_secs=save_secs, every_steps=save_steps, clock=clock)
        self._writer = summary_writer
        self._output_dir = output_dir
        self._is_due = False
        self._next_step = 0

    def begin(self) -> None:
        """Opens the event file. Raises ValueError without `output_dir` and `summary_writer`."""
        if self._writer is None:
            if self._output_dir is None:
                raise ValueError("SummarySaverHook needs an output_dir or a summary_writer")
            self._writer = EventFile.in_directory(self._output_dir)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the numbers, if they are due."""
        self._is_due = self._timer.should_trigger_for_step(self._next_step)
        return SessionRunArgs({"step": GLOBAL_STEP, "values": self._fetches if self._is_due else {}})

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the numbers."""
        step = run_values.results["step"]
        if self._is_due and self._writer is not None:
            self._timer.update_last_triggered_step(self._next_step)
            self._writer.add_scalars({tag: number_of(value) for tag, value in run_values.results["values"].items()}, step=step)
        self._next_step = step
