"""How often, and after which pause, a process that failed is started again. Pure: time is a number; knows no process."""

from collections.abc import Hashable

# One that lived so long had begun well: what came before does not count any more.
SOUND_LIFE_S = 30.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 8.0


class RestartLimit:
    """Counts failures in quick succession, of each process for itself. `max_restarts` 0: nothing is started again."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._in_a_row: dict[Hashable, int] = {}

    def pause_s(self, name: Hashable, *, lived_s: float) -> float | None:
        """Notes a failure and returns how long to wait before the next start, at first not at all; None: it has failed too often."""
        count = 1 if lived_s >= SOUND_LIFE_S else self._in_a_row.get(name, 0) + 1
        self._in_a_row[name] = count
        if count > self._max_restarts:
            return None
        return 0.0 if count == 1 else min(_FIRST_PAUSE_S * 2.0 ** (count - 2), _MAX_PAUSE_S)

    def num_in_a_row(self, name: Hashable) -> int:
        """Returns how many failures there were in quick succession."""
        return self._in_a_row.get(name, 0)
