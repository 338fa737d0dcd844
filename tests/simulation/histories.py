"""Histories of simulated processes, as files have them, and audited. Knows records; no promise of the oracle."""

from collections.abc import Iterable

import numpy as np

from lockstep.audit.books import check_books
from lockstep.audit.facts import facts_of
from lockstep.audit.values import recompute
from ps_protocol.model.variables import Array
from ps_protocol.process.history import Chronicle, Record, can_begin
from ps_protocol.roles.history import Event
from ps_protocol.wire import codec


class SimulatedHistory:
    """Implements History in memory: what is noted has been a message, as in a file. `num_kept`: keeps about so many records; 0: all."""

    def __init__(self, num_kept: int = 0) -> None:
        self._num_kept = num_kept
        self._segments: list[list[Record]] = [[]]
        self._number = 0

    def write(self, event: Event, pieces: Iterable[Array] = ()) -> None:
        """Appends one record; begins a segment, and drops the oldest, as a file does."""
        if self._num_kept and len(self._segments[-1]) >= self._num_kept // 2 and can_begin(event):
            self._segments = [*self._segments[-1:], []]
        content = np.frombuffer(b"".join(piece.tobytes() for piece in pieces), np.uint8)
        event = codec.decode(type(event), codec.encode(event))
        self._segments[-1].append(Record(event=event, number=self._number, content=content))
        self._number += 1

    def chronicle(self, name: str) -> Chronicle:
        """Returns what is kept of a process of this name."""
        records = tuple(record for segment in self._segments for record in segment)
        return Chronicle(name=name, role=name, records=records, is_cut=bool(records) and records[0].number > 0)


def audited(chronicles: Iterable[Chronicle]) -> tuple[list[str], int]:
    """Returns all that `lockstep audit` finds wrong, and how many steps of servers it has computed again."""
    facts = facts_of(chronicles)
    books, values = check_books(facts), recompute(facts)
    return [*books.problems, *values.problems], values.num_steps
