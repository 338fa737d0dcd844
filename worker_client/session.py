"""A worker's part in the training, from joining the model to leaving. Knows the seams to chief and shards; no transport."""

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy.typing as npt

from ps_protocol.chief import ClusterStatus, CommitResult, PushCommit, Registration
from ps_protocol.errors import InternalError, NotInitialized, StepGone
from ps_protocol.model import DEFAULT_SPLIT_BYTES, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.shard import PushId
from ps_protocol.tensors import Array
from worker_client.cluster_link import ClusterLink
from worker_client.departure import failure_text, leave
from worker_client.gradients import Gradients, stage, unknown_variable
from worker_client.heartbeat import Heartbeat
from worker_client.joining import Joined, as_arrays, join_model, model_of
from worker_client.model_memory import ModelMemory
from worker_client.outcomes import Push, StepResult, push_of
from worker_client.patience import Patience
from worker_client.shard_group import ShardGroup
from worker_client.tokens import TokenWaiter


class Session:
    """A worker in a cluster; made by `connect()` or `local()`, used as a context manager.

    Belongs to one thread; several sessions, each in its own thread, may live in one process. It does not survive a fork: the child must
    connect anew, and leaves the parent's session alone. A heartbeat in a thread of its own keeps the worker's lease meanwhile.

    Every method may raise Unavailable (a server did not answer within the session's `timeout_s`), LeaseExpired or Superseded (the cluster
    has given this worker up, or another one has taken its index), and TrainingFailed; all of them are PsError.
    """

    def __init__(self, link: ClusterLink, registration: Registration) -> None:
        self._link = link
        self._registration = registration
        self._participant = registration.participant
        self._tokens = TokenWaiter(link, self._participant)
        self._shards: ShardGroup | None = None
        self._joined: Joined | None = None
        self._local_step = self._global_step = registration.global_step
        self._held_step: int | None = None
        self._sequence = 0
        self._is_finished = False
        self._is_closed = False
        self._process_id = os.getpid()
        self._heartbeat: Heartbeat | None = None
        if not link.is_in_process:
            self._heartbeat = Heartbeat(link.chief, self._participant, lease_s=registration.lease_s)
            self._heartbeat.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(failure_text(error))

    @property
    def worker_index(self) -> int:
        """The worker's index in the cluster."""
        return self._participant.index

    @property
    def local_step(self) -> int:
        """The step of the variables that `read()` gives and that the next gradients are for."""
        return self._local_step

    @property
    def global_step(self) -> int:
        """The newest step that this session has heard of; asks nobody."""
        return max(self._global_step, self._local_step)

    @property
    def is_finished(self) -> bool:
        """Whether training is finished, as far as this session has heard; asks nobody."""
        return self._is_finished or (self._heartbeat is not None and self._heartbeat.is_finished)

    def create_or_join(
        self,
        initial_values: Mapping[str, npt.ArrayLike],
        *,
        optimizer: OptimizerSpec,
        placement: str = "greedy_bytes",
        split_bytes: int = DEFAULT_SPLIT_BYTES,
        timeout_s: float | None = None,
    ) -> bool:
        """Creates the model with these values if this worker is the first, else joins it as it is. Returns whether it created the model.

        `initial_values`: name to array; float32 and float64 arrays of any shape keep their type, Python floats and lists of them become
        float64, integers are refused. All workers give the same names, types and shapes in the same order, and the same optimizer
        and placement. `placement` is "greedy_bytes" or "round_robin"; a variable of more than `split_bytes` bytes is split over shards
        along axis 0 (0: never).

        Blocks while another worker creates the model, or while the open step takes nothing from this worker, and says so after 2 s;
        `timeout_s` (None: no limit) bounds that. Once only. Raises ModelMismatch with the differences, InvalidSpec, DeadlineExceeded.
        """
        self._check_open()
        if self._joined is not None:
            raise RuntimeError("this session has its model already; open another session for another model")
        values = as_arrays(initial_values)
        model = model_of(values, optimizer=optimizer, placement=PlacementPolicy(strategy=placement, split_bytes=split_bytes))
        if self._shards is None:
            self._shards = ShardGroup(self._link, self._registration)
        joined = join_model(model, values, link=self._link, participant=self._participant, shards=self._shards, timeout_s=timeout_s)
        if not self._registration.may_contribute or joined.global_step > self._local_step:
            self._await_token(None, timeout_s=timeout_s)
        self._joined = joined
        return joined.has_initialized

    def read(self) -> dict[str, Array]:
        """Returns the variables of `local_step`, whole and of one step over all shards, by name.

        The arrays are the session's own memory and read-only. They stay as they are until the `read()` or `step()` after the next token;
        copy what is to be kept longer. Sends nothing if the step is held already. If this worker was so slow that its step is no longer
        kept anywhere, takes a newer token first, and `local_step` grows. After the end of training: the final variables.
        """
        joined = self._model()
        if self.is_finished and not self._is_finished:
            self._await_token(None, timeout_s=self._link.timeout_s)  # answered at once, with the last step
        self._fetch(joined)
        return dict(joined.variables.views)

    def gradients(self) -> dict[str, Array]:
        """Returns writable arrays by name, of the variables' shapes and types: the memory that gradients are sent from.

        Filling these arrays and passing them to `push()` or `step()` spares a copy. They are zero at first and keep what is in them.
        """
        return dict(self._model().gradients.views)

    def push(self, gradients: Gradients) -> Push:
        """Sends one contribution to `local_step`, to all shards at once, has it counted, and returns what became of it.

        `gradients`: one array for every variable, of its shape and type; nothing is cast or broadcast. Does not wait for other workers.
        A call that fails half-way has no effect on any step; what is repeated on the way is counted once. Stale and late contributions are
        outcomes, not errors. Raises VariableNotFound, IncompletePush, ShapeMismatch, DtypeMismatch before anything is sent.
        """
        commit = self._stage(gradients)
        result = self._link.ask(lambda chief: chief.commit_push(self._participant, commit), what=f"count a push to step {commit.step}")
        self._global_step = max(self._global_step, result.global_step)
        return push_of(result, step=commit.step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until there is a token, that is, leave to compute the gradients of a step. False: training is finished.

        `local_step` is then the token's step, mostly the next one (with T < R sometimes the same: one more contribution is wanted).
        After 2 s, and then every 10 s, logs a WARNING that says what the step waits for. Raises DeadlineExceeded with the same words
        after `timeout_s` seconds (None: never); waiting can then be taken up again.
        """
        self._model()
        if not self._is_finished:
            self._await_token(None, timeout_s=timeout_s)
        return not self._is_finished

    def step(self, gradients: Gradients, *, timeout_s: float | None = None) -> StepResult:
        """Does `push()`, `wait()` and `read()` in the fewest calls, and returns what became of the contribution.

        Arguments and errors are those of the three. After DeadlineExceeded the contribution has been counted: go on with `wait()`.
        """
        commit = self._stage(gradients)
        result = self._await_token(commit, timeout_s=timeout_s)
        if result is None:
            raise InternalError("the chief gave a token and did not say what became of the contribution that rode along")
        push = push_of(result, step=commit.step)
        if not self._is_finished:
            self._fetch(self._model())
        return StepResult(outcome=push.outcome, step=push.step, is_finished=self._is_finished)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the optimizer's slots, sorted; none for plain SGD."""
        self._model()
        return self._group().slot_names()

    def get_slot(self, variable: str, slot: str) -> Array:
        """Returns a copy of one variable's slot (optimizer state) of the newest step, in the variable's shape and type.

        Moves the slot of all variables that share shards with this one: for looking, not for every step. Raises VariableNotFound,
        SlotNotFound.
        """
        joined = self._model()
        if variable not in joined.variables.views:
            raise unknown_variable(variable, joined.variables.views)
        memory = ModelMemory(joined.model, layouts=joined.variables.layouts, is_writable=True)
        patience = Patience(f"worker {self.worker_index} reads slot {slot!r}", timeout_s=self._link.timeout_s)
        while True:
            try:
                self._group().read_slot(slot, memory, variable=variable)
                return memory.arrays[variable].copy()
            except StepGone as error:
                patience.explain(error.message)

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Returns the chief's report of the cluster, with the newest entries of the ledger if some are asked for."""
        self._check_open()
        return self._link.ask(lambda chief: chief.status(max_ledger_entries=max_ledger_entries), what="status")

    def finish(self, reason: str = "") -> int:
        """Ends the training of all workers and returns the last step. `read()` then gives the final variables. Idempotent."""
        self._check_open()
        words = reason or f"worker {self.worker_index} finished it"
        last_step = self._link.ask(lambda chief: chief.finish(reason=words), what="finish")
        if not self._is_finished:
            self._local_step, self._is_finished = last_step, True
        return last_step

    def close(self) -> None:
        """Leaves the cluster of the worker's own accord, in at most 2 s. Idempotent."""
        self._leave("")

    def _stage(self, gradients: Gradients) -> PushCommit:
        joined = self._model()
        stage(gradients, into=joined.gradients, step=self._local_step)
        # A new number even if the last push failed: what that one left on some shards is never counted.
        self._sequence += 1
        push_id = PushId(worker=self._participant.index, incarnation=self._participant.incarnation, sequence=self._sequence)
        is_staged = self._group().push(joined.gradients, push_id=push_id, step=self._local_step)
        return PushCommit(push_id=push_id, step=self._local_step, staged=is_staged)

    def _await_token(self, commit: PushCommit | None, *, timeout_s: float | None) -> CommitResult | None:
        grant = self._tokens.wait(local_step=self._local_step, commit=commit, timeout_s=timeout_s)
        self._local_step, self._is_finished = grant.step, grant.is_finished
        return grant.commit

    def _fetch(self, joined: Joined) -> None:
        patience = Patience(f"worker {self.worker_index} reads the variables", timeout_s=self._link.timeout_s)
        while self._held_step != self._local_step:
            self._held_step = None
            try:
                self._group().read(joined.variables, step=self._local_step)
                self._held_step = self._local_step
            except StepGone as error:
                patience.explain(error.message)
                self._await_token(None, timeout_s=self._link.timeout_s)  # answered at once: the step has moved on

    def _leave(self, failure: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # A forked child has the parent's session, not its threads; leaving would end the parent's lease.
        if os.getpid() == self._process_id:
            leave(self._link, self._participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"the session of worker {self.worker_index} is closed; open a new one with connect()")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"the session of worker {self.worker_index} belongs to process {self._process_id}; a fork must connect anew")

    def _model(self) -> Joined:
        self._check_open()
        if self._joined is None:
            raise NotInitialized("this session has no model yet; call create_or_join() first")
        return self._joined

    def _group(self) -> ShardGroup:
        if self._shards is None:
            raise NotInitialized("this session has no model yet; call create_or_join() first")
        return self._shards
