"""A worker's session, from joining the model to leaving. Knows the interfaces of chief and shards; no transport."""

import atexit
import contextlib
import logging
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from ps_protocol.errors import InvalidSpec, ModelMismatch, NotInitialized, PsError, TrainingInterrupted, at_boundary, is_boundary
from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.shown import shown
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PhaseNumbers, StepNumbers
from ps_protocol.model.variables import Array
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import FinishTrainingRequest, InnerSteps, Registration
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments
from worker_client.cluster.chief import ChiefLink
from worker_client.core.data import WorkerData
from worker_client.core.outcomes import Push
from worker_client.core.sides import run
from worker_client.core.worker import Worker
from worker_client.model.declarations import Placement, declare, placement_of
from worker_client.model.gradients import Gradients, Metrics, Updates, checked_weight, no_gradients, unknown_variable
from worker_client.model.optimizers import Hyperparameters, step_hyperparameters
from worker_client.model.user_state import UserState
from worker_client.session import changes
from worker_client.session.calls import WorkerCalls
from worker_client.session.common import CommonCalls, Result
from worker_client.session.membership import Membership, failure_text
from worker_client.session.reading import ModelReader
from worker_client.session.spans import StepSpans
from worker_client.session.training import Contribution, Training

if TYPE_CHECKING:
    from ps_protocol.metrics.exposition import Family
    from worker_client.session.exporting import WorkerMetrics


log = logging.getLogger("lockstep.worker")


class DataBatches:
    """Iterates over a worker's ranges of the training data; made by `Session.batches()`. For one thread."""

    def __init__(self, spec: DataSpec, *, worker: Worker[Training], member: Membership) -> None:
        self.timeout_s: float | None = None
        self._member = member
        self._data = WorkerData(spec, worker)

    def __iter__(self) -> Iterator[DataRange]:
        return self

    def __next__(self) -> DataRange:
        self._member.check_open()
        given = run(self._data.next(timeout_s=self.timeout_s))
        if given is None:
            raise StopIteration
        return given


class Session(CommonCalls):
    """A worker in a cluster; made by `connect()` or `local()`, used as a context manager.

    Belongs to one thread; a process may have several sessions, each in its own thread. It does not survive a fork: the child must connect
    anew, which does not affect the parent's session. A heartbeat in a thread of its own renews the worker's lease.

    When another chief takes over, or the cluster rolls back to a checkpoint, the session registers again and continues by itself.
    docs/reference/api.md has the details. `timeout_s` (None: no limit) bounds a call's wait; in calls that read, it bounds the wait for
    servers during recovery.

    Leaving the `with` block raises TrainingInterrupted if training was interrupted (`end_reason`) and no exception leaves the block.

    Every method may raise Unavailable (a server did not answer within the session's `timeout_s`), Superseded (another process has taken its
    index) and TrainingFailed; all of them are PsError.
    """

    def __init__(
        self, link: ChiefLink, registration: Registration, *, spans: StepSpans | None = None, metrics: "WorkerMetrics | None" = None
    ) -> None:
        self._who = f"worker {registration.participant.index}"
        self._member = Membership(link, registration, what=f"the session of {self._who}", renewal="connect()")
        self._calls = WorkerCalls(self._member, spans)
        self._worker = self._calls.worker
        self._batches: dict[DataSpec, DataBatches] = {}
        self._numbers: StepNumbers | None = None
        self._phase, self._phase_numbers = 0, PhaseNumbers({}, {})
        self._num_workers: tuple[PolicySpec, int] | None = None  # the policy at that time, and the number
        self._metrics = metrics
        if metrics is not None:
            metrics.start(self._families, worker=self.worker_index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(failure_text(error))
        if error is None and self.end_reason == "interrupted":
            raise TrainingInterrupted(
                f"training was interrupted at step {self.global_step}, before its end; start the cluster again: with"
                " --checkpoint-dir it continues from its newest checkpoint",
                facts={"step": str(self.global_step)},
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the session of {self._who} belongs to one process: it cannot be copied or pickled; another process connects anew")

    @property
    def membership(self) -> Membership:
        """The worker's place in the cluster."""
        return self._member

    @property
    def metrics_url(self) -> str:
        """The URL of this worker's metrics; empty: they are not served."""
        return "" if self._metrics is None else self._metrics.url

    @property
    def worker_index(self) -> int:
        """The worker's index in the cluster."""
        return self._member.participant.index

    @property
    def local_step(self) -> int:
        """The step of the variables that `read()` returns and that the next gradients are for; with fifo tokens, the token's step."""
        return self._worker.state.local_step

    @property
    def epoch(self) -> int:
        """The cluster's epoch, as far as this session has heard; it grows with each rollback to a checkpoint."""
        return self._worker.state.participant.era.epoch

    @property
    def num_rollbacks(self) -> int:
        """How often this session has been rolled back with the cluster."""
        return self._worker.num_rollbacks

    @property
    def global_step(self) -> int:
        """The newest step that this session has heard of. Makes no call."""
        return max(self._worker.state.global_step, self._worker.state.local_step)

    @property
    def is_finished(self) -> bool:
        """Whether training has ended, as planned or by an interruption (`end_reason`), as far as this session has heard. Makes no call."""
        return self._worker.state.is_finished or self._member.is_finished

    @property
    def end_reason(self) -> str | None:
        """How training has ended, as far as this session has heard: "finished", "interrupted" or "failed"; None: it has not. Makes no call.

        "finished": its last step was reached, `finish()` or `lockstep finish` was called, or all workers had left. "interrupted": its
        launcher ended it before that, at Ctrl-C, or because too few workers were left; leaving the `with` block without an exception then
        raises TrainingInterrupted. "failed": it could not continue, and a call raised TrainingFailed with the reason.
        """
        if self._member.place.has_failed:
            return "failed"
        end = self._worker.state.end or self._member.place.end
        return end.name.lower() if end else None

    @property
    def user_state(self) -> UserState:
        """The program's own state, by name: saved in checkpoints with the step, and rolled back with it. Makes no call.

        A value set here belongs to the step of the next contribution that counts. Each worker index has a state of its own. A process that
        joins gets the state of its index's last contribution that counts. After a rollback, the mapping has the state of the step that
        training continues from; values set since are lost.

        Values are None, bools, finite numbers, strings, bytes, NumPy arrays of numbers, and lists and dicts of these, together at most
        64 KiB as JSON. Reading a value gives a copy: set the name again to change it. Raises NotInitialized before `create_or_join()`;
        setting raises InvalidSpec and LimitExceeded.
        """
        return self._at_work().user_state

    @property
    def phase(self) -> int:
        """The phase of training that this session gives gradients for: how often `create_or_join()` was called after the first time."""
        return self._phase

    def model(self) -> ModelSpec:
        """Returns the agreed model: its variables with their options, its optimizer, placement, averages and limits. Makes no call."""
        model = self._at_work().place.model
        assert model is not None
        return model

    def placement(self) -> dict[str, int]:
        """Returns the index of the parameter server that holds each dense variable; of a split one, its first part. Makes no call."""
        return run(self._at_work().do(Training.placement))

    @property
    def leases_data(self) -> bool:
        """Whether this session leases ranges of the training data. Makes no call."""
        return bool(self._batches)

    @property
    def num_workers(self) -> int:
        """The cluster's number of workers (0: any number); calls the chief the first time, and again after a change of policy."""
        policy, known = self._worker.state.policy, self._num_workers
        if known is None or known[0] is not policy:
            known = self._num_workers = policy, self.status().total_num_replicas
        return known[1]

    @property
    def transport(self) -> tuple[str, ...]:
        """The transport of dense gradients and variables to each parameter server, by index: "shared_memory", "sockets", "grpc" or "local".

        Known once the session has its model; empty until then. Data that cannot lie in shared memory, such as rows of tables, goes over
        gRPC.
        """
        return self._member.transports

    @property
    def policy(self) -> PolicySpec:
        """The cluster's policy, as far as this session has heard: when it joined, or later. Makes no call."""
        return self._worker.state.policy

    @property
    def recovery_timeout_s(self) -> float | None:
        """How long calls wait after a rollback until this worker has its model again; None: no limit.

        A shorter `timeout_s` of a call counts instead. A call whose time is up raises DeadlineExceeded; the next call continues to wait.
        """
        return self._worker.recovery_timeout_s

    @recovery_timeout_s.setter
    def recovery_timeout_s(self, timeout_s: float | None) -> None:
        self._worker.recovery_timeout_s = timeout_s

    @is_boundary
    def create_or_join(
        self,
        initial_values: Mapping[str, Any],
        *,
        optimizer: OptimizerSpec,
        placement: str | Placement = "greedy_bytes",
        split_bytes: int | None = None,
        averages: AverageSpec | None = None,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        clip_global_norm: float | None = None,
        create: bool = True,
        on_optimizer_change: str = "refuse",
        timeout_s: float | None = None,
    ) -> bool:
        """Creates the model with these values if this worker is the first, else joins it. Returns whether it created the model.

        `initial_values`: name to array, `Variable`, `EmbeddingTable` or `Buffer`; float arrays of any shape keep their type, Python floats
        and lists of them become float64, integers are refused. All workers give the same names, types, shapes and options in the same
        order, and the same optimizer, placement, averages and limits. `placement` is "greedy_bytes", "round_robin" or a `Placement`; a
        variable of more than `split_bytes` bytes (None: 64 MiB) is split over shards along axis 0 (0: never). `averages`: what
        `moving_average()` returns.
        The mean gradient is limited to `clip_value` in each element, then `clip_norm` in each variable, then `clip_global_norm` in all.

        `on_optimizer_change`: what to do where the cluster trains, or resumes from a checkpoint, with other numbers of the optimizers
        (learning rate, schedule, decays, …) than these. "refuse" raises ModelMismatch; "keep" continues with the cluster's numbers; "adopt"
        makes the cluster use these from its next step on.

        Blocks while another worker creates the model (without `create`, until one has), or while the open step takes nothing from this
        worker; logs the reason after 2 s. `timeout_s` (None: no limit) bounds the wait. Raises ModelMismatch with the differences,
        InvalidSpec, DeadlineExceeded.

        Called again, it begins another phase of training, makes no call and returns False: from this session's next contribution on, steps
        have the numbers of this optimizer, and new slots and powers. Variables keep their values. The optimizer has the formula of the
        first one, and some or all of its variables; no other argument has an effect. All workers call it at the same step.
        """
        self._member.check_open()
        clip = ClipSpec(value=clip_value or 0.0, norm=clip_norm or 0.0, global_norm=clip_global_norm or 0.0)
        where = placement_of(placement, split_bytes=split_bytes)
        declared = declare(initial_values, optimizer=optimizer, placement=where, averages=averages, clip=clip)
        how = changes.on_optimizer_change(on_optimizer_change)
        if self._worker.has_model:
            self._begin_phase(declared.model)
            return False
        wait = Wait(f"{self._who} joins the model", timeout_s=timeout_s)
        try:
            has_created = self._calls.join(declared, create=create, timeout_s=wait.left_s())
        except ModelMismatch:
            agreed = changes.agreed_model(self._member.link).model
            if how is changes.OnOptimizerChange.REFUSE or agreed is None or agreed.optimizer_changes(declared.model) is None:
                raise
            has_created = self._calls.join(replace(declared, model=agreed), create=create, timeout_s=wait.left_s())
        if how is changes.OnOptimizerChange.ADOPT and not has_created:
            changes.adopt(self._member.link, declared.model, who=self._who, timeout_s=wait.left_s())
        return has_created

    def read(self, names: Collection[str] | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the dense variables by name, whole and of one step over all shards: those of `local_step`, or the newest.

        `names`: of some variables, for which only the shards that hold them are read. Raises VariableNotFound, InvalidSpec.

        Reads the newest under the policies ssp and async, and with fifo tokens. Under async, shards may be one step apart, and without
        locking any number of steps. The arrays are copies: writable, and never changed by the session. `views()` spares the copy.

        Sends nothing if the session holds them already, for example after `step()`. If this worker was so slow that no server keeps its
        step any more, takes a newer token first, and `local_step` grows. After the end of training, returns the final variables.
        """
        worker = self._at_work()
        return run(worker.read(is_copied=True, names=self._dense(names), timeout_s=timeout_s))

    def views(self, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the same variables as `read()` without a copy: read-only arrays, valid until the next token.

        They lie in memory of the session or, in sync, in memory shared with parameter servers. Where the newest are read, they are valid
        until the next `read()`, `views()` or `step()`. If the others are a whole step ahead of a backup worker, its views may change; its
        contribution is then dropped as stale. Give other libraries what `read()` returns: some write to memory that they are given, which
        ends the process.
        """
        return run(self._at_work().read(is_copied=False, timeout_s=timeout_s))

    def read_rows(self, name: str, indices: Any = None, *, timeout_s: float | None = None) -> Array:
        """Returns rows of one table (None: all), in the order of `indices`, as an array of the shape of `indices` and then of a row.

        All are of one step (except under async without locking): in sync that of `read()`, else the newest. Transfers these rows only. The
        array is a copy. Raises VariableNotFound, DtypeMismatch and IndexOutOfRange for indices that are not row numbers, InvalidSpec for a
        variable that is not a table, DeadlineExceeded if steps pass faster than the rows can be read, for as long as `timeout_s` of
        connect().
        """
        try:
            return run(self._at_work().read_rows(name, indices, timeout_s=timeout_s))
        except (PsError, KeyboardInterrupt) as error:
            raise at_boundary(error) from error.__cause__

    def gradient_buffers(self) -> dict[str, Array]:
        """Returns writable arrays by name for all dense variables that take gradients: the memory that gradients are sent from.

        They are zero at first; later they hold the values of an earlier contribution. Call this for each contribution, or once and keep the
        arrays. Under strict sync, filling them and passing them to `step()` spares a copy. `push()`, and every other policy, copies them,
        so they can be written again at once. If `step()` ends while its contribution is still under way in memory shared with a server (an
        error such as DeadlineExceeded, or the first time that a step takes several contributions from this worker), they are read-only
        until `wait()` or a later call finds that contribution over. Views that the program made of them stay writable, and must not be
        written in that time. A call in that time returns other arrays, which are writable.
        """
        return run(self._at_work().do(Training.gradient_buffers))

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Updates | None = None,
        metrics: Metrics | None = None,
        hyperparameters: Hyperparameters | None = None,
        weight: float = 1.0,
    ) -> Push:
        """Sends one contribution to `local_step`, to all shards at once, has it counted, and returns its outcome.

        `gradients`: for every variable that takes gradients, an array of its shape and type (for tables also `IndexedSlices` of rows), or
        None: no gradient. A variable without a gradient in any contribution does not change. Nothing is cast or broadcast. `updates`: name
        to array, for variables declared as `Buffer`. `metrics`: name to a number, or to (number, weight). All of it counts together or not
        at all. `hyperparameters`: numbers that replace the optimizer's settings in the one step that the contribution becomes a part of: a
        name ("learning_rate", or that of a hyper-parameter) to a number, for the model's optimizer; for the optimizer of a group
        (`sgd(0.1).in_group("head")`), the group to such a dict. If workers give different numbers, the step uses those of the lowest worker
        index. `weight`: how much the contribution counts in the mean of its step beside the others, above 0: for example its samples. Under
        ssp and async there are no others, and it changes nothing.

        Does not wait for other workers. A call that fails half-way has no effect on any step (except under async without locking), and a
        repeated message counts once. Stale, late and rolled back contributions are outcomes, not errors. Raises VariableNotFound,
        IncompletePush, ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec before anything is sent.
        """
        try:
            worker = self._at_work()
            if gradients is None:
                raise no_gradients()
            content = Contribution(gradients, updates, metrics)
            attached = self._attached(hyperparameters) if hyperparameters or self._phase else NO_ATTACHMENTS
            return run(worker.contribute(content, is_waited_for=False, attached=attached, weight=checked_weight(weight)))
        except (PsError, KeyboardInterrupt) as error:
            raise at_boundary(error) from error.__cause__

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until there is a token, the permission to compute the next gradients. Returns False if training is finished.

        Under sync, `local_step` is then the token's step, usually the next one (with T < R sometimes the same, which needs one more
        contribution). After 2 s, and then every 10 s, logs a WARNING with the reason for the wait. Raises DeadlineExceeded with that reason
        after `timeout_s` seconds (None: never); call it again to continue waiting.
        """
        try:
            return run(self._at_work().wait(timeout_s=timeout_s))
        except (PsError, KeyboardInterrupt) as error:
            raise at_boundary(error) from error.__cause__

    def step(
        self,
        gradients: Gradients,
        *,
        updates: Updates | None = None,
        metrics: Metrics | None = None,
        hyperparameters: Hyperparameters | None = None,
        weight: float = 1.0,
        names: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> Push:
        """Does `push()`, `wait()` and `read(names)` in the fewest calls, and returns the contribution's outcome.

        Arguments and errors are those of the three. After DeadlineExceeded the contribution has been counted: continue with `wait()`.
        """
        try:
            worker = self._at_work()
            if gradients is None:
                raise no_gradients()
            content = Contribution(gradients, updates, metrics)
            attached = self._attached(hyperparameters) if hyperparameters or self._phase else NO_ATTACHMENTS
            checked = checked_weight(weight)
            read = self._dense(names)
            return run(worker.contribute(content, is_waited_for=True, timeout_s=timeout_s, attached=attached, weight=checked, names=read))
        except (PsError, KeyboardInterrupt) as error:
            raise at_boundary(error) from error.__cause__

    def inner_steps(self, most: int, *, made: tuple[int, float] | None = None) -> int:
        """Returns how many of `most` steps of the worker's own optimizer to make for its next contribution, so that all come together.

        The fastest worker makes them all, the others in proportion to their speed, at least one; before two workers have told theirs, all
        make `most`. `made`: how many were made for the next contribution, and in how many seconds, which goes with it. Raises InvalidSpec.
        """
        state = self._at_work().state
        if type(most) is not int or most < 1:
            raise InvalidSpec(f"inner_steps(): got {shown(most)}, want how many at most, 1 or more")
        if made is not None:
            state.inner = _inner_steps(made)
        return max(1, int(most * state.speed))

    def skip(self, *, timeout_s: float | None = None) -> Push:
        """Takes part in a step without a gradient for any variable, so that no worker waits for this one; otherwise like `step()`.

        The mean is over the other contributions; if all skip, no variable and no slot changes, and the step counts. Ranges of the training
        data that `batches()` yielded since the last contribution count as done with it.
        """
        return run(self._at_work().skip(timeout_s=timeout_s))

    def batches(
        self,
        name: str,
        *,
        num_samples: int,
        batch_size: int,
        num_epochs: int = 1,
        shuffle_seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[DataRange]:
        """Yields ranges of the training data for this worker to compute gradients from, each with the samples `start` to `stop` - 1.

        All workers together get each range of each pass once: `push()` or `step()` names the ranges yielded since the last one, and they
        count as done when that contribution is applied. Ranges whose contribution is dropped or rolled back, or that a lost worker holds,
        are yielded again, to this worker or to another. All workers give the same arguments; `num_epochs` 0: without end. `shuffle_seed`
        gives each pass another order of the ranges (None: ascending).

        Ends when all passes are done, or training is finished. Blocks while other workers hold the remaining ranges (`timeout_s`, None: no
        limit), and logs the reason; in that time it makes contributions without gradients if others wait for this worker. A new iterator
        over the same data continues where the last one ended. Raises InvalidSpec, DataMismatch, DeadlineExceeded. See docs/how-to/data.md.
        """
        spec = DataSpec(name=name, num_samples=num_samples, range_size=batch_size, num_epochs=num_epochs, shuffle_seed=shuffle_seed)
        self._at_work()
        batches = self._batches.get(spec)
        if batches is None:
            batches = self._batches[spec] = DataBatches(spec, worker=self._worker, member=self._member)
        batches.timeout_s = timeout_s
        return batches

    def finish(self, reason: str = "", timeout_s: float | None = None) -> int:
        """Ends the training of all workers and returns the last step. `read()` then gives the final variables. Idempotent.

        `timeout_s` (None: that of `connect()`) bounds the wait for a chief that does not answer. Raises DeadlineExceeded.
        """
        self._member.check_open()
        if reason is not None and not isinstance(reason, str):
            raise InvalidSpec(f"reason: got {shown(reason)}, want a str")
        why = reason or f"{self._who} finished it"
        last_step = self._member.link.ask(FinishTrainingRequest(reason=why), what="finish", timeout_s=timeout_s)
        self._worker.state.finish(last_step)
        return last_step

    def _dense(self, names: Collection[str] | None) -> Collection[str] | None:
        """Returns the names of variables that are to be read. Raises VariableNotFound, InvalidSpec."""
        if names is None:
            return None
        kinds = {spec.name: spec for spec in self.model().variables}
        wanted = (names,) if isinstance(names, str) else tuple(names)
        for name in wanted:
            if name not in kinds:
                raise unknown_variable(name, kinds)
            if kinds[name].is_sparse:
                raise InvalidSpec(f"variable {name!r} is a table: read_rows() gives its rows")
        return wanted

    def _hear_policy(self, policy: PolicySpec) -> None:
        self._worker.state.policy = policy

    def _look(self, look: Callable[[ModelReader], Result], timeout_s: float | None) -> Result:
        return run(self._at_work().do(lambda training: look(training.reader), timeout_s=timeout_s))

    def _begin_phase(self, model: ModelSpec) -> None:
        if self.policy.applies_on_arrival:
            raise InvalidSpec("where contributions are applied on arrival, training has one phase: slots cannot begin anew; use locking")
        self._phase_numbers = self.model().phase(model)
        self._phase += 1
        log.info("%s begins phase %d of training step=%d", self._who, self._phase, self.local_step)

    def _attached(self, hyperparameters: Hyperparameters | None) -> Attachments:
        if self._numbers is None:
            self._numbers = StepNumbers(self.model())
        given = step_hyperparameters(hyperparameters or {})
        if self._phase:
            given = self._phase_numbers.of_step(self._phase, given)
        # The same numbers as last time are not checked again.
        self._numbers.check(given, applies_on_arrival=self._worker.state.policy.applies_on_arrival)
        return Attachments(hyperparameters=given)

    def _families(self) -> "Iterator[Family]":
        from ps_protocol.metrics.families import session_families

        worker = self._worker
        return session_families(
            self._member.traffic.report(),
            worker=self.worker_index,
            step=worker.state.local_step,
            num_pushes=worker.state.num_pushes,
            num_rollbacks=worker.num_rollbacks,
        )

    def _leave(self, failure: str) -> None:
        _LEFT_AT_EXIT.discard(self)
        if self._metrics is not None:
            self._metrics.stop()
        self._calls.close()
        self._member.leave(failure)

    def _at_work(self) -> Worker[Training]:
        self._member.check_open()
        if not self._worker.has_model:
            raise NotInitialized("this session has no model yet; call create_or_join() first")
        return self._worker


def _inner_steps(made: Any) -> InnerSteps:
    try:
        num, seconds = made
        num, duration_s = operator.index(num), float(seconds)
    except (TypeError, ValueError, OverflowError):
        raise InvalidSpec(f"inner_steps(): made {shown(made)}, want how many and in how many seconds, for example (50, 12.5)") from None
    return InnerSteps(num=num, duration_s=duration_s)


# Programs without a `with` block.


_LEFT_AT_EXIT: set[Session] = set()


def left_at_exit(session: Session) -> Session:
    """Has the end of the program leave the session, unless that was done before, and exit with 1 if training was interrupted."""
    _LEFT_AT_EXIT.add(session)
    return session


@atexit.register
def _leave_at_exit() -> None:
    error, was_interrupted = getattr(sys, "last_value", None), False
    for session in tuple(_LEFT_AT_EXIT):
        try:
            session.__exit__(type(error) if error is not None else None, error, None)
        except TrainingInterrupted:
            was_interrupted = True
            sys.excepthook(*sys.exc_info())
    if was_interrupted:
        # An exception that leaves an exit handler would not change the exit code.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(ExitCode.FAILED)
