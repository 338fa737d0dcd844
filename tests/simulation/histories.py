"""Histories of simulated processes, written by the code that writes real ones, and audited. Knows records; no promise of the oracle."""

import json
from collections.abc import Iterable

import numpy as np

from lockstep.audit.books import check_books
from lockstep.audit.facts import facts_of
from lockstep.audit.values import recompute
from ps_protocol.model.variables import Array
from ps_protocol.process.history import Chronicle, Record, Words


class SimulatedHistory:
    """Implements History in memory. What is noted has been through JSON, as in a file."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def write(self, kind: str, words: Words, pieces: Iterable[Array] = ()) -> None:
        """Appends one record."""
        content = np.concatenate([np.empty(0, np.uint8), *pieces])
        self._records.append(Record(kind=kind, number=len(self._records), words=json.loads(json.dumps(words)), content=content))

    def chronicle(self, name: str) -> Chronicle:
        """Returns what was written by a process of this name."""
        return Chronicle(name=name, role=name, records=tuple(self._records), is_torn=False)


def audited(chronicles: Iterable[Chronicle]) -> tuple[list[str], int]:
    """Returns all that `lockstep audit` finds wrong, and how many steps of servers it has computed again."""
    facts = facts_of(chronicles)
    books, values = check_books(facts), recompute(facts)
    return [*books.problems, *values.problems], values.num_steps
