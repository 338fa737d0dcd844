"""States of workers' own programs, exactly of the step: applied, counted, and not kept by shards yet. Knows text; no call, step or clock.

A contribution may bring its worker's state. It holds from the step on that the contribution becomes a part of, and is a part of nothing if
the contribution is not. What has changed since shards have kept a record travels with every step, so that a successor knows all of it.
"""

from collections.abc import Iterable, Mapping, Sequence

from ps_protocol.errors import LimitExceeded
from ps_protocol.roles.contribution import MAX_USER_STATES_BYTES, PushId, UserState, check_user_state

# States that have not changed again travel with the steps until so many bytes have; then a record is worth its bytes.
_MAX_CARRIED_BYTES = 64 << 10


class UserStates:
    """The states of all workers of a cluster, by index."""

    def __init__(self) -> None:
        self.restart(())

    def restart(self, states: Iterable[UserState]) -> None:
        """Only these are applied; none is counted."""
        self._applied = {one.worker: one.json for one in states}
        self._counted: dict[PushId, str] = {}
        # Applied since the record that shards keep.
        self._unkept: dict[int, str] = {}
        self._num_carried = 0
        self._num_bytes = sum(map(len, self._applied.values()))

    def resume(self, recorded: Iterable[UserState], since: Iterable[UserState]) -> None:
        """As `restart`, from a record, and from the steps that were applied since."""
        self.restart(recorded)
        for one in since:
            self._apply(one.worker, one.json)

    def check(self, worker: int, json: str) -> None:
        """Raises LimitExceeded if a worker may not bring this state."""
        check_user_state(json)
        total = self._num_bytes - len(self._applied.get(worker, "")) + len(json)
        if total > MAX_USER_STATES_BYTES:
            raise LimitExceeded(
                f"user_state: with the {len(json)} bytes of worker {worker}, the states of all workers together have {total} bytes,"
                f" {MAX_USER_STATES_BYTES} at most; keep less in each"
            )

    def count(self, push_id: PushId, json: str) -> None:
        """A contribution that brings a state is a part of a step to come."""
        self.uncount(push_id)
        self._counted[push_id] = json
        self._num_bytes += len(json)

    def uncount(self, push_id: PushId) -> bool:
        """A contribution that was counted is in no step; True if it brought a state."""
        json = self._counted.pop(push_id, "")
        self._num_bytes -= len(json)
        return bool(json)

    def applied(self, contributors: Sequence[PushId]) -> None:
        """These contributions, in their order, are applied."""
        if not self._counted:
            return
        for push_id in contributors:
            json = self._counted.pop(push_id, "")
            if json:
                self._num_bytes -= len(json)
                self._apply(push_id.worker, json)

    def counted_of(self, push_id: PushId) -> str:
        """Returns what a contribution brings that is counted and not applied; empty: nothing."""
        return self._counted.get(push_id, "")

    def all(self) -> tuple[UserState, ...]:
        """Returns the states as of the steps that are applied, by worker."""
        return _states(self._applied)

    def applied_of(self, worker: int) -> str:
        """Returns a worker's state as of the steps that are applied; empty: it has none."""
        return self._applied.get(worker, "")

    def latest_of(self, worker: int) -> str:
        """Returns the state that a worker goes on with: that of its last contribution that counts, applied or not; empty: it has none."""
        counted = [push_id for push_id in self._counted if push_id.worker == worker]
        return self._counted[max(counted)] if counted else self.applied_of(worker)

    def of_step(self, contributors: Sequence[PushId]) -> tuple[UserState, ...]:
        """Returns the states that change with a step of these contributions, and those that changed before and that no record has."""
        if not self._counted and not self._unkept:
            return ()
        brought = {push_id.worker: self._counted[push_id] for push_id in contributors if push_id in self._counted}
        self._num_carried += sum(len(json) for worker, json in self._unkept.items() if worker not in brought)
        return _states({**self._unkept, **brought})

    # -- records

    @property
    def unkept(self) -> Mapping[int, str]:
        """The states that have changed since the record that shards keep, by worker."""
        return self._unkept

    @property
    def is_record_due(self) -> bool:
        """Whether so much has travelled with steps for want of a record that one is to be kept."""
        return self._num_carried > _MAX_CARRIED_BYTES

    def kept(self, states: Mapping[int, str]) -> None:
        """A record is kept that has these, which were not kept before."""
        for worker, json in states.items():
            if self._unkept.get(worker) == json:
                del self._unkept[worker]
        self._num_carried = 0

    # -- inside

    def _apply(self, worker: int, json: str) -> None:
        self._num_bytes += len(json) - len(self._applied.get(worker, ""))
        self._applied[worker] = self._unkept[worker] = json


def _states(jsons: Mapping[int, str]) -> tuple[UserState, ...]:
    return tuple(UserState(worker=worker, json=jsons[worker]) for worker in sorted(jsons))
