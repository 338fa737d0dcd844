"""Looks at a cluster without taking part: evaluation, progress, status. Knows the seams to chief and shards; no transport."""

import os
from types import TracebackType
from typing import Self

from ps_protocol.chief import AgreedModel, ClusterState, ClusterStatus, ModelState, Registration
from ps_protocol.errors import NotInitialized, StepGone
from ps_protocol.placement import layouts
from ps_protocol.tensors import Array
from worker_client.cluster_link import ClusterLink
from worker_client.departure import failure_text, leave
from worker_client.heartbeat import Heartbeat
from worker_client.model_memory import ModelMemory
from worker_client.patience import Patience
from worker_client.shard_group import ShardGroup


class Observer:
    """A reader of a cluster; made by `observe()`, used as a context manager. The cluster's processes stay until its observers have left.

    Belongs to one thread. Every method may raise Unavailable (a server did not answer within the observer's `timeout_s`) and LeaseExpired.
    """

    def __init__(self, link: ClusterLink, registration: Registration) -> None:
        self._link = link
        self._registration = registration
        self._participant = registration.participant
        self._shards: ShardGroup | None = None
        self._variables: ModelMemory | None = None
        self._held_step: int | None = None
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
    def step(self) -> int | None:
        """The step of the variables that `read()` gave last; None before that."""
        return self._held_step

    def read(self, step: int | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns the variables of one step, the newest unless `step` names one, whole over all shards, by name.

        The arrays are the observer's own memory, read-only, and stay as they are until the next `read()`. Blocks until there is a model and
        says so after 2 s; `timeout_s` (None: no limit) bounds that. Raises StepGone or StepNotReady for a step that is not kept (only the
        last two are), DeadlineExceeded.
        """
        self._check_open()
        patience = Patience("observer reads the variables", timeout_s=timeout_s)
        variables, shards = self._model(patience)
        if step is not None:
            self._fetch(shards, variables, step)
            return dict(variables.views)
        while True:
            try:
                self._fetch(shards, variables, self.status().global_step)
                return dict(variables.views)
            except StepGone as error:
                patience.explain(error.message)

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Returns the chief's report of the cluster, with the newest entries of the ledger if some are asked for."""
        self._check_open()
        return self._link.ask(lambda chief: chief.status(max_ledger_entries=max_ledger_entries), what="status")

    def close(self) -> None:
        """Leaves the cluster, in at most 2 s. Idempotent."""
        self._leave("")

    def _model(self, patience: Patience) -> tuple[ModelMemory, ShardGroup]:
        while self._variables is None:
            agreed = self._agreed_model(patience.slice_s())
            if agreed.state is ModelState.READY and agreed.model is not None:
                arrangement = layouts(agreed.placement, num_shards=len(self._registration.shard_addresses))
                self._variables = ModelMemory(agreed.model, layouts=arrangement, is_writable=False)
            else:
                if self.status().state is ClusterState.FINISHED:
                    raise NotInitialized("training ended before any worker gave the model its first values; there is nothing to read")
                patience.explain("the model has no values yet: the first worker to join gives them")
        if self._shards is None:
            self._shards = ShardGroup(self._link, self._registration)
        return self._variables, self._shards

    def _agreed_model(self, max_wait_s: float) -> AgreedModel:
        return self._link.ask(lambda chief: chief.get_model(max_wait_s=max_wait_s), what="the model", expected_s=max_wait_s)

    def _fetch(self, shards: ShardGroup, variables: ModelMemory, step: int) -> None:
        if self._held_step != step:
            self._held_step = None
            shards.read(variables, step=step)
            self._held_step = step

    def _leave(self, failure: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._process_id:
            leave(self._link, self._participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the observer is closed; open a new one with observe()")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"the observer belongs to process {self._process_id}; a fork must connect anew")
