"""The monitored session of tf.compat.v1.train: opens a session, creates or joins the model, runs hooks. Knows no transport.

Source: tf.compat.v1.train.MonitoredTrainingSession.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ps_protocol.errors import DataLoss
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ClusterState
from worker_client.model.declarations import Buffer, EmbeddingTable, Variable
from worker_client.opening import connect, local
from worker_client.session.session import Session
from worker_client.sync_replicas.graph import (
    Graph,
    Run,
    check,
    default_graph,
    evaluate,
)
from worker_client.sync_replicas.hooks import (
    Coordinator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
)
from worker_client.sync_replicas.saving import Checkpoint, CheckpointSaverHook, SummarySaverHook, checkpoints, load_checkpoint

# Creating the session of a monitored session: open it, set the policy, create or join the model.


log = logging.getLogger("lockstep.worker")

# The bound if the program sets none: three years.
NO_LIMIT_S = 1e8
# How long the end of a session waits for a chief that does not answer.
_FINISH_S = 10.0


# Opens a session; called with the worker's index (None: any).
Opener = Callable[[int | None], Session]


def _opener_of(master: Any, *, max_wait_s: float | None) -> Opener:
    """Returns a function that opens the session at `master`, as `MonitoredTrainingSession` describes it. Opens nothing itself."""
    if callable(master):
        return master  # type: ignore[no-any-return]  # the caller's promise
    if hasattr(master, "chief") and hasattr(master, "shards"):
        return lambda index: local(master, worker_index=index)
    if not master and not os.environ.get("LOCKSTEP_CHIEF") and not os.environ.get("TF_CONFIG"):
        return lambda index: local(worker_index=index)
    if master and not isinstance(master, str):
        raise ValueError(f"master: got {master!r}, want 'host:port' or 'unix:/path' of the chief, '' or a cluster inside this process")
    # How long the session waits for lost servers; it comes back by itself.
    timeout_s = NO_LIMIT_S if max_wait_s is None else max_wait_s
    return lambda index: connect(master or None, worker_index=index, timeout_s=timeout_s)


def _created(
    opener: Opener, graph: Graph, *, is_chief: bool, checkpoint_dir: str | Path | None, max_wait_s: float | None, worker_index: int | None
) -> Session:
    """Returns a session that has the model; blocks until there is one. Raises RuntimeError if nothing trains the graph."""
    values, optimizer = graph.declared()
    if is_chief and checkpoint_dir is not None:
        values = _restored(values, checkpoint_dir)
    session = opener(worker_index)
    try:
        if is_chief and graph.policy is not None:
            _have_policy(session, graph.policy, timeout_s=max_wait_s)
        session.create_or_join(values, optimizer=optimizer, averages=graph.averages, create=is_chief, timeout_s=max_wait_s)
    except BaseException:
        session.close()
        raise
    session.recovery_timeout_s = max_wait_s
    return session


def _have_policy(session: Session, policy: PolicySpec, *, timeout_s: float | None) -> None:
    """Sets the policy, unless the cluster already has it: setting it again would add tokens."""
    status = session.status()
    is_under_way = status.state is ClusterState.TRAINING
    counts = (policy.replicas_to_aggregate, policy.total_num_replicas)
    is_same = status.policy.text == policy.text and all(
        want is None or want == have for want, have in zip(counts, (status.replicas_to_aggregate, status.total_num_replicas), strict=True)
    )
    if session.is_finished or status.state is ClusterState.FINISHED or (is_under_way and is_same):
        return
    step = session.set_policy(policy, timeout_s=timeout_s)
    log.info("policy set policy=%s step=%d", policy.text, step)


def _restored(values: dict[str, Any], directory: str | Path) -> dict[str, Any]:
    """Returns the declarations with the values of the newest complete checkpoint as first values; unchanged if there is none."""
    checkpoint = _newest_whole(directory)
    if checkpoint is None:
        return values
    restored = {name: _with_value(name, declared, checkpoint.values.get(name)) for name, declared in values.items()}
    log.warning(
        "the model, if it is new, begins with the values of step %d from %s; optimizer slots and tables begin anew, and steps from 0",
        checkpoint.global_step,
        directory,
    )
    return restored


def _newest_whole(directory: str | Path) -> Checkpoint | None:
    for path in checkpoints(directory):
        try:
            return load_checkpoint(path)
        except (OSError, DataLoss) as error:
            log.warning("skipping a checkpoint: %s", error)
    return None


def _with_value(name: str, declared: Any, value: Array | None) -> Any:
    if value is None or isinstance(declared, EmbeddingTable):
        return declared
    initial = np.asarray(declared.value if isinstance(declared, (Variable, Buffer)) else declared)
    if (initial.shape, initial.dtype) != (value.shape, value.dtype):
        raise ValueError(
            f"variable {name!r} has shape {initial.shape} {initial.dtype}, the checkpoint's has {value.shape} {value.dtype};"
            " give another checkpoint_dir, or the model that it was written with"
        )
    return replace(declared, value=value) if isinstance(declared, (Variable, Buffer)) else value


# A session with hooks, with the API of tf.compat.v1.train.


class PlainSession:
    """A session without hooks, which hooks are given. `run()` calls no hook."""

    def __init__(self, session: Session, graph: Graph) -> None:
        self.session = session
        self.graph = graph

    def run(self, fetches: Any, feed_dict: Any = None) -> Any:
        """Returns the values of `fetches`; see `MonitoredSession.run`."""
        return evaluate(fetches, Run(self.session, self.graph, feed=feed_dict))

    def read(self) -> dict[str, Array]:
        """Returns copies of the dense variables by name, because hooks may keep them."""
        return self.session.read()

    def status(self) -> Any:
        """Returns the chief's report of the cluster."""
        return self.session.status()


class MonitoredSession:
    """A training session with hooks; made by `MonitoredTrainingSession()`, used as a context manager. Belongs to one thread.

    The constructor calls `begin` of all hooks, opens the session, creates or joins the model, and calls `after_create_session`. When the
    `with` block ends without an error (or with StopIteration, which is suppressed), it calls `end` of all hooks; after synchronous
    training, the chief worker then finishes the cluster's training, so that the other workers end too.
    """

    def __init__(self, create: Callable[[], Session], *, hooks: Sequence[SessionRunHook], graph: Graph, is_chief: bool) -> None:
        self._is_chief = is_chief
        self._hooks = tuple(hooks)
        self._graph = graph
        self._coordinator = Coordinator()
        self._is_closed = False
        for hook in self._hooks:
            hook.begin()
        graph.finalize()
        self._session = PlainSession(create(), graph)
        try:
            for hook in self._hooks:
                hook.after_create_session(self._session, self._coordinator)
        except BaseException as error:
            self._close(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        is_clean = error is None or isinstance(error, StopIteration)
        self._close(None if is_clean else error)
        return is_clean

    @property
    def graph(self) -> Graph:
        """The program's declarations."""
        return self._graph

    @property
    def session(self) -> Any:
        """The `worker_client.Session`."""
        return self._session.session

    def should_stop(self) -> bool:
        """Whether this worker's training has to end: a hook requested it, the cluster's training is finished, or this session is closed."""
        return self._is_closed or self._coordinator.should_stop() or self._session.session.is_finished

    def run(self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        """Evaluates `fetches` with all hooks, and returns the values in the same structure (lists, tuples, dicts).

        A fetch is a training op (its `TrainResult`), a variable, slot or average (a copy of its array), a loss function (its value), the
        global step, or a name ("w", "loss", "global_step"). Variables and losses are those that the gradients are computed from.
        `feed_dict` is the second argument of loss functions; it may be of any type, but must be a dict if a hook feeds as well. `options`
        and `run_metadata` are accepted and have no effect. Blocks as the training op does.

        After a loss of servers, the session comes back by itself, as `Session` describes, and the outcome is ROLLED_BACK. Raises
        Unavailable if one does not answer within `max_wait_secs`, DeadlineExceeded if the model is not back by then, Superseded if another
        process has this worker's index, RuntimeError for training after a stop was requested, and once this is closed, TypeError or
        ValueError for what cannot be evaluated, and what hooks and losses raise.
        """
        del options, run_metadata
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        does_train = check(fetches, self._graph)
        if does_train and self._coordinator.should_stop():
            raise RuntimeError("Run called even after should_stop requested.")
        context = SessionRunContext(SessionRunArgs(fetches, feed_dict), self._session)
        asked = {index: wish for index, hook in enumerate(self._hooks) if (wish := hook.before_run(context)) is not None}
        feed = _merged_feeds(feed_dict, [wish.feed_dict for wish in asked.values()])
        everything = {"caller": fetches, "hooks": {index: wish.fetches for index, wish in asked.items()}}
        values = evaluate(everything, Run(self._session.session, self._graph, feed=feed))
        for index, hook in enumerate(self._hooks):
            hook.after_run(context, SessionRunValues(values["hooks"].get(index)))
        if context.stop_requested:
            self._coordinator.request_stop()
        return values["caller"]

    def read(self) -> dict[str, Array]:
        """Returns copies of the dense variables by name; after the end of training, the final ones."""
        return self._session.read()

    def finish(self, reason: str = "") -> int:
        """Ends the training of all workers and returns the last step. `read()` then gives the final variables. Idempotent."""
        return int(self.session.finish(reason))

    def close(self) -> None:
        """Ends the session as the `with` block does without an error. Idempotent."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._coordinator.request_stop()
        session = self._session.session
        if error is not None:
            session.__exit__(type(error), error, error.__traceback__)  # reports to the chief why this worker leaves
            return
        with session:
            for hook in self._hooks:
                hook.end(self._session)
            policy = self._graph.policy
            if self._is_chief and policy is not None and policy.name is PolicyName.SYNC and not session.is_finished:
                # All workers end: in the original the chief worker's token queue closes.
                session.finish(f"the chief worker ({session.worker_index}) has ended its session", timeout_s=_FINISH_S)


def MonitoredTrainingSession(
    master: Any = "",
    is_chief: bool = True,
    checkpoint_dir: str | Path | None = None,
    scaffold: Any = None,
    hooks: Iterable[SessionRunHook] | None = None,
    chief_only_hooks: Iterable[SessionRunHook] | None = None,
    save_checkpoint_secs: float | None = None,
    save_summaries_steps: int | None = None,
    save_summaries_secs: float | None = None,
    config: Any = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float | None = 7200,
    save_checkpoint_steps: int | None = None,
    summary_dir: str | Path | None = None,
    save_graph_def: bool = True,
    *,
    worker_index: int | None = None,
) -> MonitoredSession:
    """Returns a session that trains the default graph's model on a cluster; the chief worker creates the model, the others wait for it.

    `master`: the chief process, "host:port" or "unix:/path"; "" means LOCKSTEP_CHIEF or TF_CONFIG, and without them a cluster inside this
    process; or an `InProcessCluster`, which workers in threads share. `worker_index`: None takes the environment's, else any free one.
    `checkpoint_dir`: the chief worker begins with the values of the newest checkpoint there, if it creates the model, and writes one every
    `save_checkpoint_secs` (None: 600) or `save_checkpoint_steps`; 0 turns that off. With `summary_dir` (None: `checkpoint_dir`) it writes
    the loss every `save_summaries_steps` (None: 100) or `save_summaries_secs`, and the speed every `log_step_count_steps`, for TensorBoard.
    `max_wait_secs` (None: no limit) bounds the wait for the cluster, for the model, and for servers that are lost, each time until the
    model is back; closing waits 10 s at most for the chief. `scaffold`, `config`, `stop_grace_period_secs` and `save_graph_def` are
    accepted and have no effect, because there is no graph of ops.

    Blocks until there is a model. Raises what hooks raise, RuntimeError if no optimizer was applied, and what `create_or_join` raises.
    """
    del scaffold, config, stop_grace_period_secs, save_graph_def
    graph = default_graph()
    all_hooks = [*(hooks or ())]
    if is_chief:
        directory = summary_dir if summary_dir is not None else checkpoint_dir
        all_hooks += [*(chief_only_hooks or ())]
        all_hooks += _speed_hooks(directory, log_step_count_steps)
        all_hooks += _summary_hooks(directory, graph, steps=save_summaries_steps, seconds=save_summaries_secs)
        all_hooks += _checkpoint_hooks(checkpoint_dir, steps=save_checkpoint_steps, seconds=save_checkpoint_secs)
    create = partial(
        _created,
        _opener_of(master, max_wait_s=max_wait_secs),
        graph,
        is_chief=is_chief,
        checkpoint_dir=checkpoint_dir,
        max_wait_s=max_wait_secs,
        worker_index=worker_index,
    )
    return MonitoredSession(create, hooks=all_hooks, graph=graph, is_chief=is_chief)


def _speed_hooks(directory: str | Path | None, every_n_steps: int | None) -> list[SessionRunHook]:
    return [StepCounterHook(every_n_steps=every_n_steps, output_dir=directory)] if every_n_steps else []


def _summary_hooks(directory: str | Path | None, graph: Graph, *, steps: int | None, seconds: float | None) -> list[SessionRunHook]:
    steps = 100 if steps is None and seconds is None else steps
    if directory is None or not graph.losses or not (steps or seconds):
        return []
    return [
        SummarySaverHook(save_steps=steps or None, save_secs=None if steps else seconds, output_dir=directory, summary_op={"loss": "loss"})
    ]


def _checkpoint_hooks(directory: str | Path | None, *, steps: int | None, seconds: float | None) -> list[SessionRunHook]:
    seconds = 600.0 if steps is None and seconds is None else seconds
    if directory is None or not (steps or seconds):
        return []
    return [CheckpointSaverHook(directory, save_steps=steps or None, save_secs=None if steps else seconds)]


def _merged_feeds(feed: Any, of_hooks: Sequence[Any]) -> Any:
    merged = feed
    for more in of_hooks:
        if more is None:
            continue
        if merged is None:
            merged = more
            continue
        if not isinstance(merged, Mapping) or not isinstance(more, Mapping):
            raise RuntimeError("a hook feeds this run, and so does its caller or another hook; give dicts, which can be merged")
        if merged.keys() & more.keys():
            raise RuntimeError(f"Same tensor is fed by two hooks: {sorted(map(str, merged.keys() & more.keys()))}")
        merged = {**merged, **more}
    return merged
