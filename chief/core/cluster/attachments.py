"""Attachments of contributions, besides tensors: checks them, keeps them, and joins those of a step. Knows no call, step or clock.

Attachments apply to the step that their contribution becomes a part of, and to no other. A step has one set of hyper-parameters: those of
the contribution with the lowest push id that has any, so that the order of arrival makes no difference. A shard that lacks that
contribution takes the set of the next one. States of workers' programs outlive the step. Those that have changed since shards kept a
record travel with every step, so that a successor of the chief knows all of them.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.spec import ModelSpec, StepNumbers
from ps_protocol.roles.contribution import (
    MAX_USER_STATES_BYTES,
    NO_ATTACHMENTS,
    NO_STEP_ATTACHMENTS,
    Attachments,
    GivenNumbers,
    PushId,
    StepAttachments,
    check_user_state,
    joined,
    user_states,
)

if TYPE_CHECKING:
    from chief.core.state import Cluster

# States that have not changed again travel with the steps until so many bytes have; then a record is worth its bytes.
_MAX_CARRIED_BYTES = 64 << 10


class ContributedAttachments:
    """Attachments of the contributions that are counted and not applied, and of the applied ones."""

    def __init__(self, cluster: "Cluster") -> None:
        self._model, self._out, self._has_successors = cluster.model, cluster.out, cluster.has_successors
        self._checks: tuple[ModelSpec, StepNumbers] | None = None
        self._has_warned = False
        self.resume(NO_STEP_ATTACHMENTS)

    def resume(self, lasting: StepAttachments, since: Iterable[StepAttachments] = ()) -> None:
        """Begins with lasting attachments, and those of the steps that were applied since; no contribution is counted."""
        self._counted: dict[PushId, Attachments] = {}
        self._states = {one.worker: one.json for one in lasting.user_states}
        # Applied since the record that shards keep.
        self._unkept: dict[int, str] = {}
        self._num_carried = 0
        # Of the applied states, and of the counted ones.
        self._num_bytes = sum(map(len, self._states.values()))
        for attached in since:
            for one in attached.user_states:
                self._apply(one.worker, one.json)

    def check(self, worker: int, given: Attachments, *, applies_on_arrival: bool) -> None:
        """Raises InvalidSpec or LimitExceeded if a contribution of the worker may not bring this."""
        if given.hyperparameters:
            self._check_numbers(given, applies_on_arrival=applies_on_arrival)
        if given.user_state:
            self._check_state(worker, given.user_state)

    def count(self, push_id: PushId, given: Attachments) -> None:
        """A contribution that brings something is a part of a step to come."""
        self.uncount(push_id)
        self._counted[push_id] = given
        self._num_bytes += len(given.user_state)

    def uncount(self, push_id: PushId) -> bool:
        """A contribution that was counted is in no step; True if it brought something."""
        given = self._counted.pop(push_id, NO_ATTACHMENTS)
        self._num_bytes -= len(given.user_state)
        return given is not NO_ATTACHMENTS

    def applied(self, contributors: Sequence[PushId]) -> None:
        """Notes that these contributions are applied, in their order."""
        if not self._counted:
            return
        for push_id in contributors:
            given = self._counted.pop(push_id, NO_ATTACHMENTS)
            if given.user_state:
                self._num_bytes -= len(given.user_state)
                self._apply(push_id.worker, given.user_state)

    def of(self, push_id: PushId) -> Attachments:
        """Returns the attachments of a contribution that is counted and not applied."""
        return self._counted.get(push_id, NO_ATTACHMENTS)

    def of_step(self, contributors: Sequence[PushId]) -> StepAttachments:
        """Returns the attachments of a step of these contributions; notes if their workers ask for different hyper-parameters."""
        if not self._counted and not self._unkept:
            return NO_STEP_ATTACHMENTS
        attached = joined([(one, self._counted[one]) for one in contributors if one in self._counted], earlier=self._unkept)
        brought = {one.worker for one in contributors if self.of(one).user_state}
        self._num_carried += sum(len(json) for worker, json in self._unkept.items() if worker not in brought)
        if attached.numbers:
            self._say_if_different(attached.numbers)
        return attached

    @property
    def lasting(self) -> StepAttachments:
        """The lasting attachments of the applied steps."""
        return StepAttachments(user_states=user_states(self._states)) if self._states else NO_STEP_ATTACHMENTS

    def lasting_of(self, worker: int, *, only_applied: bool) -> Attachments:
        """Returns the state that a worker continues with: that of its contributions that count, applied or not."""
        counted = [] if only_applied else [push_id for push_id, one in self._counted.items() if push_id.worker == worker and one.user_state]
        state = self._counted[max(counted)].user_state if counted else self._states.get(worker, "")
        return Attachments(user_state=state) if state else NO_ATTACHMENTS

    # -- records

    @property
    def has_unkept(self) -> bool:
        """Whether something has changed since the record that shards keep."""
        return bool(self._unkept)

    @property
    def unkept(self) -> StepAttachments:
        """The states that have changed since the record that shards keep."""
        return StepAttachments(user_states=user_states(self._unkept))

    @property
    def is_record_due(self) -> bool:
        """Whether so much has travelled with steps for want of a record that one is to be kept."""
        return self._num_carried > _MAX_CARRIED_BYTES

    def kept(self, attached: StepAttachments) -> None:
        """A record is kept that has these, which were not kept before."""
        for one in attached.user_states:
            if self._unkept.get(one.worker) == one.json:
                del self._unkept[one.worker]
        self._num_carried = 0

    # -- inside

    def _check_numbers(self, given: Attachments, *, applies_on_arrival: bool) -> None:
        model = self._model.model
        assert model is not None
        if self._checks is None or self._checks[0] is not model:
            self._checks = model, StepNumbers(model)
        self._checks[1].check(given.hyperparameters, applies_on_arrival=applies_on_arrival)

    def _check_state(self, worker: int, json: str) -> None:
        check_user_state(json)
        total = self._num_bytes - len(self._states.get(worker, "")) + len(json)
        if total > MAX_USER_STATES_BYTES:
            raise LimitExceeded(
                f"user_state: with the {len(json)} bytes of worker {worker}, the states of all workers together have {total} bytes,"
                f" {MAX_USER_STATES_BYTES} at most; keep less in each"
            )

    def _apply(self, worker: int, json: str) -> None:
        self._num_bytes += len(json) - len(self._states.get(worker, ""))
        self._states[worker] = json
        if self._has_successors:
            self._unkept[worker] = json

    def _say_if_different(self, numbers: Sequence[GivenNumbers]) -> None:
        if len(numbers) > 1 and not self._has_warned:
            first, second = numbers[0], numbers[1]
            ours, theirs = ({(one.group, one.name): one.value for one in given.hyperparameters} for given in (first, second))
            group, name = next(key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key))
            of = f" of group {group!r}" if group else ""
            lowest, other = first.push_ids[0].worker, second.push_ids[0].worker
            self._out.note(
                f"workers {lowest} and {other} have a step use different numbers: {name}{of} is {ours.get((group, name))} and"
                f" {theirs.get((group, name))}; the step uses those of worker {lowest}, the lowest",
                is_warning=True,
            )
        self._has_warned = len(numbers) > 1
