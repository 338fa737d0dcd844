"""How a monitored session comes to its session: open, set the policy, create or join the model. Knows graphs and checkpoints; no hooks."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ps_protocol import retry
from ps_protocol.chief import ClusterState
from ps_protocol.errors import EpochMismatch, LeaseExpired, MalformedMessage, Unavailable
from ps_protocol.policy_spec import PolicyName, PolicySpec
from ps_protocol.tensors import Array
from worker_client.graph import Graph, ModelDeclaration
from worker_client.training_session import Opener, TrainingSession
from worker_client.variables import State, Table, Variable
from worker_client.worker_checkpoint import Checkpoint, checkpoints, load_checkpoint

log = logging.getLogger("lockstep.worker")

# A bound for those who set none: a retry needs a number.
NO_LIMIT_S = 1e9


class SessionCreator:
    """Makes a worker's session with its model, and makes it again after a loss. For one thread."""

    def __init__(
        self,
        opener: Opener,
        *,
        graph: Graph,
        is_chief: bool,
        checkpoint_dir: str | Path | None,
        max_wait_s: float | None,
        worker_index: int | None,
    ) -> None:
        self._open = opener
        self._graph = graph
        self._is_chief = is_chief
        self._checkpoint_dir = checkpoint_dir
        self._max_wait_s = max_wait_s
        self._worker_index = worker_index

    def create(self) -> TrainingSession:
        """Returns a session that has the model; blocks until there is one. Raises RuntimeError if nothing trains the graph."""
        declaration = self._graph.declaration()
        if self._is_chief and self._checkpoint_dir is not None:
            declaration = _restored(declaration, self._checkpoint_dir)
        return self._joined(declaration, self._worker_index, takeover=False)

    def recreate(self, worker_index: int) -> TrainingSession:
        """Returns a new session in place of a lost one; tries again while the cluster cannot be reached, at most `max_wait_s`."""
        declaration = self._graph.declaration()
        limit_s = NO_LIMIT_S if self._max_wait_s is None else self._max_wait_s

        def attempt(_: float) -> TrainingSession:
            try:
                return self._joined(declaration, worker_index, takeover=True)
            except (LeaseExpired, EpochMismatch) as error:
                raise Unavailable(f"the session was lost again: {error.message}") from error

        return retry.call(attempt, what=f"a new session for worker {worker_index}", timeout_s=limit_s)

    def end_training(self, session: TrainingSession) -> None:
        """After synchronous training, the chief worker's end is everybody's: in the original its queue of tokens closes."""
        policy = self._graph.policy
        if self._is_chief and policy is not None and policy.name is PolicyName.SYNC and not session.is_finished:
            session.finish(f"the chief worker ({session.worker_index}) has ended its session")

    def _joined(self, declaration: ModelDeclaration, worker_index: int | None, *, takeover: bool) -> TrainingSession:
        session = self._open(worker_index, takeover)
        try:
            if self._is_chief and declaration.policy is not None:
                _have_policy(session, declaration.policy, timeout_s=self._max_wait_s)
            session.create_or_join(
                declaration.values,
                optimizer=declaration.optimizer,
                averages=declaration.averages,
                create=self._is_chief,
                timeout_s=self._max_wait_s,
            )
        except BaseException:
            session.close()
            raise
        return session


def _have_policy(session: TrainingSession, policy: PolicySpec, *, timeout_s: float | None) -> None:
    """Sets the policy, but not on a training that goes by it already: its tokens are out."""
    status = session.status()
    is_under_way = status.state is ClusterState.TRAINING
    counts = (policy.replicas_to_aggregate, policy.total_num_replicas)
    is_same = status.policy == policy.text and all(
        want is None or want == have for want, have in zip(counts, (status.replicas_to_aggregate, status.total_num_replicas), strict=True)
    )
    if session.is_finished or status.state is ClusterState.FINISHED or (is_under_way and is_same):
        return
    step = session.set_policy(policy, timeout_s=timeout_s)
    log.info("policy set policy=%s step=%d", policy.text, step)


def _restored(declaration: ModelDeclaration, directory: str | Path) -> ModelDeclaration:
    """The declaration with the values of the newest whole checkpoint as first values; without one as it is."""
    checkpoint = _newest_whole(directory)
    if checkpoint is None:
        return declaration
    values = {name: _with_value(name, declared, checkpoint.values.get(name)) for name, declared in declaration.values.items()}
    log.warning(
        "the model, if it is new, begins with the values of step %d from %s; optimizer slots and tables begin anew, and steps from 0",
        checkpoint.global_step,
        directory,
    )
    return replace(declaration, values=values)


def _newest_whole(directory: str | Path) -> Checkpoint | None:
    for path in checkpoints(directory):
        try:
            return load_checkpoint(path)
        except (OSError, MalformedMessage) as error:
            log.warning("skipping a checkpoint: %s", error)
    return None


def _with_value(name: str, declared: Any, value: Array | None) -> Any:
    if value is None or isinstance(declared, Table):
        return declared
    initial = np.asarray(declared.value if isinstance(declared, (Variable, State)) else declared)
    if (initial.shape, initial.dtype) != (value.shape, value.dtype):
        raise ValueError(
            f"variable {name!r} has shape {initial.shape} {initial.dtype}, the checkpoint's has {value.shape} {value.dtype};"
            " give another checkpoint_dir, or the model that it was written with"
        )
    return replace(declared, value=value) if isinstance(declared, (Variable, State)) else value
