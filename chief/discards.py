"""Contributions that shards hold and that will never be applied. Knows push ids; no call, lease or clock.

Only shards that keep contributions of steps gone by need to be told; the others drop them by themselves.
"""

from collections.abc import Iterable

from chief.policy import Counted
from ps_protocol.shard import PushId

_MAX_REMEMBERED = 10_000


class Discards:
    """Single contributions, and whole incarnations that are gone; the latter once nothing of theirs is left to apply.

    At most so many of each are remembered: more can only come from a caller that makes them up, or while nothing is applied for long.
    """

    def __init__(self) -> None:
        self._pushes: set[PushId] = set()
        self._gone: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._pushes or self._gone)

    def add(self, push_id: PushId) -> None:
        """A contribution is not applied."""
        if len(self._pushes) < _MAX_REMEMBERED:
            self._pushes.add(push_id)

    def add_incarnation(self, worker: int, incarnation: int) -> None:
        """An incarnation is gone."""
        if len(self._gone) < _MAX_REMEMBERED:
            self._gone.add((worker, incarnation))

    def clear(self) -> None:
        """Forgets all."""
        self._pushes.clear()
        self._gone.clear()

    def take(self, counted: Iterable[Counted]) -> tuple[PushId, ...]:
        """Takes out what shards may drop now, sorted; an incarnation, as its sequence 0, unless something of its is still `counted`."""
        busy = {(entry.push_id.worker, entry.push_id.incarnation) for entry in counted}
        ready = self._gone - busy
        whole = [PushId(worker=worker, incarnation=incarnation, sequence=0) for worker, incarnation in ready]
        single = [push_id for push_id in self._pushes if (push_id.worker, push_id.incarnation) not in ready]
        self._gone -= ready
        self._pushes.clear()
        return tuple(sorted([*whole, *single]))
