"""The calls that sessions and observers have in common: looks at a model, changes of a running cluster, leaving it. Keeps no state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, TypeVar

from ps_protocol.errors import InvalidSpec, is_boundary
from ps_protocol.model.optimizers import Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import ClusterStatus, SavedCheckpoint
from worker_client.core.outcomes import MetricReport
from worker_client.session import changes
from worker_client.session.membership import Membership
from worker_client.session.reading import ModelReader

Result = TypeVar("Result")


class CommonCalls(ABC):
    """Has no state: a session and an observer say what their place is, how they look at the model, and how they leave."""

    @property
    @abstractmethod
    def membership(self) -> Membership:
        """The participant's place in the cluster, for interfaces built on it."""

    @abstractmethod
    def _look(self, look: Callable[[ModelReader], Result], timeout_s: float | None) -> Result:
        """Returns what `look` returns; looks again where the cluster was rolled back meanwhile."""

    @abstractmethod
    def _leave(self, failure: str) -> None:
        """Leaves the cluster; `failure`: the text for the chief about an exception. Idempotent."""

    @abstractmethod
    def _hear_policy(self, policy: PolicySpec) -> None:
        """Notes that the cluster has this policy now."""

    def __enter__(self) -> Self:
        return self

    def read_averages(self, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Returns copies of the newest step's moving averages by name: of the variables in `names`, or of all that have one.

        Raises SlotNotFound if one of `names` has no average or the model keeps none, VariableNotFound.
        """
        return self._look(lambda reader: reader.averages(names), timeout_s)

    def read_metrics(self, *, timeout_s: float | None = None) -> dict[str, MetricReport]:
        """Returns by name the `metrics` that workers have reported in contributions that count, since the model was created."""
        return self._look(lambda reader: reader.metrics(), timeout_s)

    def get_slot_names(self, *, timeout_s: float | None = None) -> list[str]:
        """Returns the names of the slots of all optimizers of the model, sorted; none for plain SGD."""
        return self._look(lambda reader: reader.slot_names(), timeout_s)

    @is_boundary
    def prefetch(self, name: str, indices: Any, *, timeout_s: float | None = None) -> None:
        """Has servers with `--table-dir` read rows of a table, and their slots, from their disks: those of the next batch, for example.

        Returns when they have begun. Has no effect on values, nor on rows in memory. Raises as `read_rows` does.
        """
        self._look(lambda reader: reader.prefetch(name, indices), timeout_s)

    @is_boundary
    def get_slot(self, variable: str, slot: str, *, timeout_s: float | None = None) -> Array:
        """Returns a copy of one variable's slot (optimizer state) of the newest step, in the variable's shape and type.

        Transfers the slot of all variables that share shards with this one, or a whole table's, so do not call it in every step. Reads
        again if the slot changes while it is copied. Raises VariableNotFound, SlotNotFound; DeadlineExceeded after `timeout_s` of
        `connect()` or `observe()`.
        """
        return self._look(lambda reader: reader.slot(variable, slot), timeout_s)

    @is_boundary
    def set_policy(self, policy: PolicySpec, timeout_s: float | None = None) -> int:
        """Sets the policy of the whole cluster, at the next moment when no step is being applied; returns the step from which it holds.

        Contributions that are counted and not applied remain valid under it. `policy`: what `sync_policy()`, `ssp_policy()` or
        `async_policy()` returns. May be called before the model is created. `timeout_s` (None: no limit) bounds the wait. Raises
        InvalidSpec; DeadlineExceeded, with the reason for the wait, in which case the chief still makes the change as soon as it can.
        """
        member = self.membership
        member.check_open()
        if not isinstance(policy, PolicySpec):
            raise InvalidSpec(f"policy: got {policy!r}, want what sync_policy(), ssp_policy(2) or async_policy() returns")
        wait = Wait(f"{member.participant.name} sets the policy", timeout_s=timeout_s)
        step = changes.await_change(partial(member.link.ask, what="set the policy"), wait, policy=policy).step
        self._hear_policy(policy)
        return step

    @is_boundary
    def set_hyperparameters(
        self,
        *,
        learning_rate: float | Schedule | None = None,
        variable: str | None = None,
        timeout_s: float | None = None,
        **hyperparameters: float,
    ) -> int:
        """Sets numbers of an optimizer, at the next moment when no step is being applied; returns the version of the settings.

        Changes the model's optimizer, or that of `variable` if it has its own. Numbers that are not named stay unchanged. `timeout_s`
        (None: no limit) bounds the wait. Raises InvalidSpec, VariableNotFound; DeadlineExceeded, in which case the change is still made.
        """
        member = self.membership
        member.check_open()
        return changes.set_hyperparameters(
            member.link,
            who=member.participant.name,
            learning_rate=learning_rate,
            variable=variable,
            hyperparameters=dict(hyperparameters),
            timeout_s=timeout_s,
        )

    @is_boundary
    def save_checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Has the cluster save a checkpoint, and returns its `tag` and `step` once it is complete. Training continues meanwhile.

        `timeout_s` (None: no limit) bounds the wait. Raises DeadlineExceeded, with the reason for the wait, in which case the checkpoint is
        still saved; InvalidSpec if the cluster was started without a place for checkpoints.
        """
        member = self.membership
        member.check_open()
        wait = Wait(f"{member.participant.name} saves a checkpoint", timeout_s=timeout_s)
        return changes.await_checkpoint(partial(member.link.ask, what="save a checkpoint"), wait)

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Returns the chief's report of the cluster, with at most `max_ledger_entries` of the ledger's newest entries."""
        return self.membership.status(max_ledger_entries=max_ledger_entries)

    def close(self) -> None:
        """Leaves the cluster. Blocks for at most 2 s. Idempotent."""
        self._leave("")
