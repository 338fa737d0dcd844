"""Looks at a cluster without taking part: evaluation, status. Knows the seams to chief and shards; no transport."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ps_protocol.errors import NotInitialized, StepGone
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import AgreedModel, ClusterState, GetModelRequest, ModelState, Registration
from worker_client.cluster.chief import ChiefLink
from worker_client.core.place import LOST
from worker_client.core.sides import run
from worker_client.model.memory import ModelMemory, arranged
from worker_client.session.common import CommonCalls, Result
from worker_client.session.membership import Membership, failure_text
from worker_client.session.reading import ModelReader, VariableMemory

log = logging.getLogger("lockstep.worker")


class Observer(CommonCalls):
    """A reader of a cluster; made by `observe()`, used as a context manager. The cluster's processes stay until its observers have left.

    Belongs to one thread. Every method may raise Unavailable (a server did not answer within the observer's `timeout_s`). An observer
    registers again by itself when the cluster is brought back to an earlier step, or has another chief, and reads on.
    What needs a model blocks until there is one and says so after 2 s; `timeout_s` (None: no limit) bounds that, then DeadlineExceeded.
    """

    def __init__(self, link: ChiefLink, registration: Registration) -> None:
        self._member = Membership(link, registration, what="the observer", renewal="observe()")
        self._variables: VariableMemory | None = None
        self._reader: ModelReader | None = None
        self._participant = self._member.participant  # whose connections the two have
        self._step: int | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(failure_text(error))

    @property
    def membership(self) -> Membership:
        """The observer's place in the cluster."""
        return self._member

    @property
    def step(self) -> int | None:
        """The step of the variables that `read()` gave last; None before that."""
        return self._step

    def read(self, step: int | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the dense variables of one step, the newest unless `step` names one, whole over all shards, by name.

        Under the policies ssp and async, shards may be some steps apart. The arrays are the caller's own: writable, and they stay as they
        are. Raises StepGone or StepNotReady for a step that is not kept (only the last two are).
        """
        return {name: view.copy() for name, view in self.views(step, timeout_s=timeout_s).items()}

    def views(self, step: int | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns what `read()` does without a copy: the observer's own memory, read-only, until the next `read()` or `views()`."""
        wait = Wait("observer reads the variables", timeout_s=timeout_s)

        def read(variables: VariableMemory, _: ModelReader) -> dict[str, Array]:
            if step is None:
                self._read_newest(variables, wait)
            else:
                self._fetch(variables, step)
            return dict(variables.views)

        return self._do(read, wait)

    def read_rows(self, name: str, indices: Any = None, *, timeout_s: float | None = None) -> Array:
        """Returns the newest rows of one table in the given order, an array of the shape of `indices` (None: all) and then of a row.

        All are of one step (but under async without locking). Transfers these rows only. Raises VariableNotFound, DtypeMismatch,
        IndexOutOfRange, InvalidSpec; DeadlineExceeded if steps pass faster than the rows can be read, for the observer's `timeout_s`.
        """
        return self._look(lambda reader: reader.rows(name, indices, step=None).values, timeout_s)

    def model(self, *, timeout_s: float | None = None) -> ModelSpec:
        """Returns the agreed model: its variables with their options, its optimizer, placement, averages and limits."""
        return self._look(lambda reader: reader.model, timeout_s)

    def _hear_policy(self, policy: PolicySpec) -> None:
        """An observer asks for the policy whenever it reads the newest."""

    def _leave(self, failure: str) -> None:
        self._member.leave(failure)

    def _look(self, look: Callable[[ModelReader], Result], timeout_s: float | None) -> Result:
        return self._do(lambda _, reader: look(reader), Wait("observer looks at the model", timeout_s=timeout_s))

    def _do(self, act: Callable[[VariableMemory, ModelReader], Result], wait: Wait) -> Result:
        """Returns what `act` returns; once the cluster was brought back to an earlier step, does it again there."""
        while True:
            variables, reader = self._model(wait)
            known = self._member.place.registration
            try:
                return act(variables, reader)
            except LOST as error:
                deadline = Wait("the observer asks what has become of its servers", timeout_s=self._member.link.transport.timeout_s)
                run(self._member.place.await_other(known, error, deadline))
                log.warning("observer: the cluster has begun again in epoch %d: %s", self._member.participant.era.epoch, error.message)
                self._step = None

    def _model(self, wait: Wait) -> tuple[VariableMemory, ModelReader]:
        self._member.check_open()
        if self._member.participant is not self._participant:
            self._variables = self._reader = None
        while self._variables is None or self._reader is None:
            agreed = self._agreed_model(wait.slice_s())
            if agreed.state is ModelState.READY and agreed.model is not None:
                self._take(agreed, agreed.model)
            else:
                if self.status().state is ClusterState.FINISHED:
                    raise NotInitialized("training ended before any worker gave the model its first values; there is nothing to read")
                wait.explain("the model has no values yet: the first worker to join gives them")
        return self._variables, self._reader

    def _take(self, agreed: AgreedModel, model: ModelSpec) -> None:
        self._participant, link = self._member.participant, self._member.link
        shards = self._member.shards()
        arrangement = arranged(model, agreed.placement, num_shards=len(shards))
        self._reader = ModelReader(
            model,
            layouts=arrangement,
            shards=shards,
            who="observer",
            timeout_s=link.transport.timeout_s,
            applies_on_arrival=self._member.applies_on_arrival,
        )
        shards.know_layouts(arrangement)
        self._variables = VariableMemory(model, ModelMemory(model, layouts=arrangement, is_writable=False), shards)

    def _agreed_model(self, max_wait_s: float) -> AgreedModel:
        return self._member.link.ask(GetModelRequest(max_wait_s=max_wait_s), what="the model")

    def _read_newest(self, variables: VariableMemory, wait: Wait) -> None:
        while True:
            status = self.status()
            if not status.policy.has_common_steps:
                self._step = None
                self._step = variables.fetch_latest(is_aligned=not status.policy.applies_on_arrival)
                return
            try:
                self._fetch(variables, status.global_step)
                return
            except StepGone as error:
                wait.explain(error.message)

    def _fetch(self, variables: VariableMemory, step: int) -> None:
        if variables.step != step:
            self._step = None
            variables.fetch(step, may_view=False)
        self._step = step
