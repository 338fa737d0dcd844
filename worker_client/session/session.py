"""A worker's part in the training, from joining the model to leaving. Knows the seams to chief and shards; no transport."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ps_protocol.errors import ModelMismatch, NotInitialized
from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import AverageSpec, ClipSpec, StepNumbers
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import ClusterStatus, Registration, SavedCheckpoint
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments
from worker_client.cluster.chief import ChiefLink
from worker_client.core.data import WorkerData
from worker_client.core.outcomes import MetricReport, Push
from worker_client.core.requests import run
from worker_client.core.worker import Worker
from worker_client.model.declarations import Placement, declare, placement_of
from worker_client.model.gradients import Gradients, Metrics, Updates, no_gradients
from worker_client.model.optimizers import Hyperparameters, step_hyperparameters
from worker_client.model.user_state import UserState
from worker_client.session import changes
from worker_client.session.calls import WorkerCalls
from worker_client.session.membership import Membership, failure_text
from worker_client.session.spans import StepSpans
from worker_client.session.training import Contribution, Training

if TYPE_CHECKING:
    from ps_protocol.metrics.exposition import Family
    from worker_client.session.exporting import WorkerMetrics


class DataBatches:
    """The iterator over a worker's ranges of the training data; made by `Session.batches()`. For one thread."""

    def __init__(self, spec: DataSpec, *, calls: WorkerCalls, member: Membership) -> None:
        self.timeout_s: float | None = None
        self._calls, self._member = calls, member
        self._data = WorkerData(spec, calls.worker, begin_wait=Wait)

    def __iter__(self) -> Iterator[DataRange]:
        return self

    def __next__(self) -> DataRange:
        self._member.check_open()
        given = run(self._data.next(timeout_s=self.timeout_s), self._calls.acts)
        if given is None:
            raise StopIteration
        return given


class Session:
    """A worker in a cluster; made by `connect()` or `local()`, used as a context manager.

    Belongs to one thread; several sessions, each in its own thread, may live in one process. It does not survive a fork: the child must
    connect anew, and leaves the parent's session alone. A heartbeat in a thread of its own keeps the worker's lease meanwhile.

    When the chief is another, or the cluster goes back to a checkpoint, the session registers again and goes on by itself.
    docs/reference/api.md has the details. Where a call waits, `timeout_s` (None: no limit) bounds that; in calls that read, the wait for
    servers that are brought back.

    Every method may raise Unavailable (a server did not answer within the session's `timeout_s`), Superseded (another process has taken its
    index) and TrainingFailed; all of them are PsError.
    """

    def __init__(
        self, link: ChiefLink, registration: Registration, *, spans: StepSpans | None = None, metrics: "WorkerMetrics | None" = None
    ) -> None:
        self._who = f"worker {registration.participant.index}"
        self._member = Membership(link, registration, what=f"the session of {self._who}", renewal="connect()")
        self._calls = WorkerCalls(self._member, spans)
        self._worker, self._acts = self._calls.worker, self._calls.acts
        self._batches: dict[DataSpec, DataBatches] = {}
        self._numbers: StepNumbers | None = None
        self._num_workers: tuple[PolicySpec, int] | None = None  # and the policy under which it is so many
        self._metrics = metrics
        if metrics is not None:
            metrics.start(self._families, worker=self.worker_index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(failure_text(error))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"the session of {self._who} belongs to one process: it cannot be copied or pickled; another process connects anew")

    @property
    def membership(self) -> Membership:
        """The participant's place in the cluster, for what is built on it."""
        return self._member

    @property
    def metrics_url(self) -> str:
        """Where this worker serves its metrics; empty: nowhere."""
        return "" if self._metrics is None else self._metrics.url

    @property
    def worker_index(self) -> int:
        """The worker's index in the cluster."""
        return self._member.participant.index

    @property
    def local_step(self) -> int:
        """The step of the variables that `read()` gives and that the next gradients are for; with fifo tokens, that of the token."""
        return self._worker.state.local_step

    @property
    def epoch(self) -> int:
        """The cluster's epoch as this session has heard of it; it grows whenever the cluster is brought back to a checkpoint."""
        return self._worker.state.participant.era.epoch

    @property
    def num_rollbacks(self) -> int:
        """How often this session has been taken back to an earlier step with the cluster."""
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
        """How training has ended, as far as this session has heard: "finished", "interrupted" or "failed"; None: it goes on. Makes no call.

        "finished": its last step was reached, somebody finished it, or all workers had left. "interrupted": the cluster was stopped before
        that, by Ctrl-C or SIGTERM, or because too few workers were left. "failed": it could not go on, and TrainingFailed said why.
        """
        if self._member.place.has_failed:
            return "failed"
        end = self._worker.state.end or self._member.place.end
        return end.name.lower() if end else None

    @property
    def user_state(self) -> UserState:
        """State of this program's own, by name: it is saved in checkpoints with the step, and goes back with it. Makes no call.

        What is set here belongs to the step of the next contribution that counts. Each worker index has a state of its own. A process that
        joins finds what the last contribution of its index that counts had brought. After a rollback the mapping has the state of the
        step that training goes on from, and what was set since is gone.

        Values are None, bools, finite numbers, strings, bytes, NumPy arrays of numbers, and lists and dicts of these, together at most
        64 KiB as JSON. Reading a value gives a copy: set the name again to change it. Raises NotInitialized before `create_or_join()`;
        setting raises InvalidSpec and LimitExceeded.
        """
        return self._at_work().user_state

    @property
    def leases_data(self) -> bool:
        """Whether this session has been asked for ranges of the training data. Makes no call."""
        return bool(self._batches)

    @property
    def num_workers(self) -> int:
        """How many workers the cluster is for (0: any number); asks the chief the first time, and again after the policy has changed."""
        policy, known = self._worker.state.policy, self._num_workers
        if known is None or known[0] is not policy:
            known = self._num_workers = policy, self.status().total_num_replicas
        return known[1]

    @property
    def transport(self) -> tuple[str, ...]:
        """How dense gradients and variables reach each parameter server, by index: "shared_memory", "sockets", "grpc" or "local".

        Known once the session has its model; "grpc" until then. What cannot lie in shared memory, like rows of tables, goes over gRPC.
        """
        return self._member.transports

    @property
    def policy(self) -> PolicySpec:
        """How the workers are coordinated, as far as this session has heard: when it joined, or since. Makes no call."""
        return self._worker.state.policy

    @property
    def recovery_timeout_s(self) -> float | None:
        """How long calls wait, after the cluster has gone back to a checkpoint, until this worker has its model again; None: no limit.

        A call with a shorter `timeout_s` waits for that long. Then DeadlineExceeded; the next call goes on waiting.
        """
        return self._worker.recovery_timeout_s

    @recovery_timeout_s.setter
    def recovery_timeout_s(self, timeout_s: float | None) -> None:
        self._worker.recovery_timeout_s = timeout_s

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
        """Creates the model with these values if this worker is the first, else joins it as it is. Returns whether it created the model.

        `initial_values`: name to array, `Variable`, `EmbeddingTable` or `Buffer`; float arrays of any shape keep their type, Python floats
        and lists of them become float64, integers are refused. All workers give the same names, types, shapes and options in the same
        order, and the same optimizer, placement, averages and limits. `placement` is "greedy_bytes", "round_robin" or a `Placement`; a
        variable of more than `split_bytes` bytes (None: 64 MiB) is split over shards along axis 0 (0: never). `averages`: what
        `moving_average()` returns.
        The mean gradient is limited to `clip_value` in each element, then `clip_norm` in each variable, then `clip_global_norm` in all.

        `on_optimizer_change`: what to do where the cluster trains, or resumes from a checkpoint, with other numbers of the optimizers
        (learning rate, schedule, decays, …) than these. "refuse" raises ModelMismatch; "keep" goes on with the cluster's; "adopt" has the
        cluster go on with these, from its next step.

        Blocks while another worker creates the model (without `create`, until one has), or while the open step takes nothing from this
        worker, and says so after 2 s; `timeout_s` (None: no limit) bounds that. Once only. Raises ModelMismatch with the differences,
        InvalidSpec, DeadlineExceeded.
        """
        self._member.check_open()
        if self._worker.has_model:
            raise RuntimeError("this session has its model already; open another session for another model")
        clip = ClipSpec(value=clip_value or 0.0, norm=clip_norm or 0.0, global_norm=clip_global_norm or 0.0)
        where = placement_of(placement, split_bytes=split_bytes)
        declared = declare(initial_values, optimizer=optimizer, placement=where, averages=averages, clip=clip)
        how = changes.on_optimizer_change(on_optimizer_change)
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

    def read(self, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the dense variables, whole and of one step over all shards, by name: those of `local_step`, or the newest there are.

        The newest: under the policies ssp and async, and with fifo tokens. Under async, shards may be a step apart, and without locking any
        number. The arrays are the caller's own: writable, and they stay as they are. `views()` spares the copy.

        Sends nothing if they are held already, or `step()` has just read them. If this worker was so slow that its step is no longer kept
        anywhere, takes a newer token first, and `local_step` grows. After the end of training: the final variables.
        """
        return run(self._at_work().read(is_copied=True, timeout_s=timeout_s), self._acts)

    def views(self, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns what `read()` does without a copy: read-only arrays, valid until the next token.

        They are memory of the session or, in sync, of parameter servers that it shares memory with. Where the newest are read, they are
        valid until the next `read()`, `views()` or `step()`. A backup worker that others have overtaken by a whole step may see that in
        them; its contribution is then dropped as stale. Other libraries may take the memory as theirs and write to it, which ends the
        process: give them what `read()` returns.
        """
        return run(self._at_work().read(is_copied=False, timeout_s=timeout_s), self._acts)

    def read_rows(self, name: str, indices: Any = None, *, timeout_s: float | None = None) -> Array:
        """Returns rows of one table in the order asked for, an array of the shape of `indices` (None: all rows) and then of a row.

        All are of one step (but under async without locking): in sync that of `read()`, else the newest. Reads these rows only. The array
        is the caller's. Raises VariableNotFound, DtypeMismatch and IndexOutOfRange for indices that are no row numbers, InvalidSpec for a
        variable that is no table, DeadlineExceeded if steps pass faster than the rows can be read, for as long as `timeout_s` of connect().
        """
        return run(self._at_work().read_rows(name, indices, timeout_s=timeout_s), self._acts)

    def gradient_buffers(self) -> dict[str, Array]:
        """Returns writable arrays by name for all dense variables that take gradients: the memory that gradients are sent from.

        They are zero at first; later they have what an earlier contribution left. Ask for each contribution, or once and keep them. Under
        strict sync, filling them and passing them to `step()` spares a copy. `push()`, and every other policy, copies them: they can be
        written at once. Only where `step()` ends while its contribution is still under way in memory that a server shares (an error like
        DeadlineExceeded, or the first time that a step wants more from this worker) are they read-only until `wait()` or a later call finds
        it over; views made of them are not, and must be left alone meanwhile. Asked for then, the arrays are others, and writable.
        """
        return run(self._at_work().do(Training.gradient_buffers), self._acts)

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Updates | None = None,
        metrics: Metrics | None = None,
        hyperparameters: Hyperparameters | None = None,
    ) -> Push:
        """Sends one contribution to `local_step`, to all shards at once, has it counted, and returns what became of it.

        `gradients`: for every variable that takes some, an array of its shape and type (for tables, `IndexedSlices` of rows as well), or
        None: no gradient; what no contribution has one for does not change. Nothing is cast or broadcast. `updates`: name to array, for
        variables declared as `Buffer`. `metrics`: name to a number, or to (number, weight). All of it counts together or not at all.
        `hyperparameters`: what the optimizer uses in the step that the contribution becomes a part of, in place of the settings, and in no
        other: a name ("learning_rate", or that of a hyper-parameter) to a number, for the model's optimizer; for the optimizer of a group
        (`sgd(0.1).in_group("head")`) the group to such a dict. Where workers differ, the step uses what the lowest one gives.

        Does not wait for other workers. A call that fails half-way has no effect on any step (but under async without locking); what is
        repeated on the way is counted once. Stale, late and rolled back contributions are outcomes, not errors. Raises VariableNotFound,
        IncompletePush, ShapeMismatch, DtypeMismatch, IndexOutOfRange, InvalidSpec before anything is sent.
        """
        worker = self._at_work()
        if gradients is None:
            raise no_gradients()
        content = Contribution(gradients, updates, metrics)
        attached = self._attached(hyperparameters) if hyperparameters else NO_ATTACHMENTS
        return run(worker.contribute(content, is_waited_for=False, attached=attached), self._acts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until there is a token, that is, leave to compute the next gradients. False: training is finished.

        Under sync `local_step` is then the token's step, mostly the next one (with T < R sometimes the same: one more contribution is
        wanted). After 2 s, and then every 10 s, logs a WARNING that says what is waited for. Raises DeadlineExceeded with the same words
        after `timeout_s` seconds (None: never); waiting can then be taken up again.
        """
        return run(self._at_work().wait(timeout_s=timeout_s), self._acts)

    def step(
        self,
        gradients: Gradients,
        *,
        updates: Updates | None = None,
        metrics: Metrics | None = None,
        hyperparameters: Hyperparameters | None = None,
        timeout_s: float | None = None,
    ) -> Push:
        """Does `push()`, `wait()` and `read()` in the fewest calls, and returns what became of the contribution.

        Arguments and errors are those of the three. After DeadlineExceeded the contribution has been counted: go on with `wait()`.
        """
        worker = self._at_work()
        if gradients is None:
            raise no_gradients()
        content = Contribution(gradients, updates, metrics)
        attached = self._attached(hyperparameters) if hyperparameters else NO_ATTACHMENTS
        return run(worker.contribute(content, is_waited_for=True, timeout_s=timeout_s, attached=attached), self._acts)

    def skip(self, *, timeout_s: float | None = None) -> Push:
        """Takes part in a step without a gradient for any variable, so that nobody waits for this worker; else as `step()`.

        The mean is over the others; where all skip, no variable and no slot changes, and the step counts. Ranges of the training data that
        were given out since the last contribution are done with it.
        """
        return run(self._at_work().skip(timeout_s=timeout_s), self._acts)

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
        """Yields ranges of the training data for this worker to compute gradients from, each `start` to `stop` - 1 of the samples.

        All workers together get each range of each pass once: a range counts as done when a contribution made from it is applied, and the
        next `push()` or `step()` names those yielded since the last. What is dropped, rolled back, or held by a worker that is lost, is
        yielded again, here or elsewhere. All give the same arguments; `num_epochs` 0: without end. `shuffle_seed` gives each pass another
        order of the ranges (None: ascending). Ends when all passes are done, or training is finished; until then blocks while the rest is
        with others (`timeout_s`, None: no limit), and says so; in that time it gives contributions without gradients if others wait for
        it. Asked again with the same data, goes on. Raises InvalidSpec, DataMismatch, DeadlineExceeded. See docs/how-to/data.md.
        """
        spec = DataSpec(name=name, num_samples=num_samples, range_size=batch_size, num_epochs=num_epochs, shuffle_seed=shuffle_seed)
        self._at_work()
        batches = self._batches.get(spec)
        if batches is None:
            batches = self._batches[spec] = DataBatches(spec, calls=self._calls, member=self._member)
        batches.timeout_s = timeout_s
        return batches

    def read_averages(self, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the moving averages of the newest step by name, of all variables that have one or of those named; the caller's arrays.

        Raises SlotNotFound if there is none, VariableNotFound.
        """
        return run(self._at_work().do(lambda training: training.reader.averages(names), timeout_s=timeout_s), self._acts)

    def read_metrics(self, *, timeout_s: float | None = None) -> dict[str, MetricReport]:
        """Returns, by name, what workers have reported as `metrics` in contributions that count, since the model was created."""
        return run(self._at_work().do(lambda training: training.reader.metrics(), timeout_s=timeout_s), self._acts)

    def get_slot_names(self, *, timeout_s: float | None = None) -> list[str]:
        """Returns the names of the slots of all optimizers of the model, sorted; none for plain SGD."""
        return run(self._at_work().do(lambda training: training.reader.slot_names(), timeout_s=timeout_s), self._acts)

    def get_slot(self, variable: str, slot: str, *, timeout_s: float | None = None) -> Array:
        """Returns a copy of one variable's slot (optimizer state) of the newest step, in the variable's shape and type.

        Transfers the slot of all variables that share shards with this one, or a whole table's: not for every step. What changes
        while it is copied is read again. Raises VariableNotFound, SlotNotFound; DeadlineExceeded after `timeout_s` of connect().
        """
        return run(self._at_work().do(lambda training: training.reader.slot(variable, slot), timeout_s=timeout_s), self._acts)

    def set_policy(self, policy: PolicySpec, timeout_s: float | None = None) -> int:
        """Has the whole cluster coordinated by `policy`, from the next moment when no step is being applied; returns the step of that.

        Contributions that are counted and not applied go over to it. `policy`: what `sync_policy()`, `ssp_policy()` or `async_policy()`
        returns. May come before the model. `timeout_s` (None: no limit) bounds the wait. Raises InvalidSpec; DeadlineExceeded, with what
        is waited for, but the change is made all the same, as soon as it can be.
        """
        self._member.check_open()
        step = changes.set_policy(self._member.link, policy, who=self._who, timeout_s=timeout_s)
        self._worker.state.policy = policy
        return step

    def set_hyperparameters(
        self,
        *,
        learning_rate: float | Schedule | None = None,
        variable: str | None = None,
        timeout_s: float | None = None,
        **hyperparameters: float,
    ) -> int:
        """Gives an optimizer new numbers, at the next moment when no step is being applied; returns the version of the settings.

        It is the model's optimizer, or that of `variable`, if that has its own. What is not named stays as it is. `timeout_s` (None: no
        limit) bounds the wait. Raises InvalidSpec, VariableNotFound; DeadlineExceeded, but the change is made all the same.
        """
        self._member.check_open()
        link, numbers = self._member.link, dict(hyperparameters)
        return changes.set_hyperparameters(
            link, who=self._who, learning_rate=learning_rate, variable=variable, hyperparameters=numbers, timeout_s=timeout_s
        )

    def save_checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Has the cluster save a checkpoint, and returns its `tag` and `step` once it is whole; training goes on meanwhile.

        `timeout_s` (None: no limit) bounds the wait. Raises DeadlineExceeded, with what is waited for, but it is saved all the same;
        InvalidSpec where the cluster was started without a place for checkpoints.
        """
        self._member.check_open()
        return changes.save_checkpoint(self._member.link, who=self._who, timeout_s=timeout_s)

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Returns the chief's report of the cluster, with the newest entries of the ledger if some are asked for."""
        return self._member.status(max_ledger_entries=max_ledger_entries)

    def finish(self, reason: str = "", timeout_s: float | None = None) -> int:
        """Ends the training of all workers and returns the last step. `read()` then gives the final variables. Idempotent.

        `timeout_s` (None: that of `connect()`) bounds the wait for a chief that does not answer; then DeadlineExceeded.
        """
        self._member.check_open()
        why = reason or f"{self._who} finished it"
        last_step = self._member.link.ask(lambda chief: chief.finish(reason=why), what="finish", timeout_s=timeout_s)
        self._worker.state.finish(last_step)
        return last_step

    def close(self) -> None:
        """Leaves the cluster of the worker's own accord, in at most 2 s. Idempotent."""
        self._leave("")

    def _attached(self, hyperparameters: Hyperparameters) -> Attachments:
        model = self._worker.place.model
        assert model is not None
        if self._numbers is None:
            self._numbers = StepNumbers(model)
        given = step_hyperparameters(hyperparameters)
        # What was given last is not checked again.
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
        if self._metrics is not None:
            self._metrics.stop()
        self._calls.close()
        self._member.leave(failure)

    def _at_work(self) -> Worker:
        self._member.check_open()
        if not self._worker.has_model:
            raise NotInitialized("this session has no model yet; call create_or_join() first")
        return self._worker
