"""The latest events of a cluster: participants that joined or were lost, settings that changed. Knows notes; no page and no step."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from chief.core.messages import Note, NoteKind
from ps_protocol.model.light_dataclass import light_dataclass

MAX_ENTRIES = 300


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something happened at this time of day, while `step` was open."""

    number: int
    at: float
    step: int
    kind: NoteKind
    text: str
    is_warning: bool


class EventLog:
    """The latest notes of a chief. Thread-safe; `add` never waits for long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._num_added = 0

    def add(self, note: Note, step: int) -> None:
        """Keeps a note, unless it is a detail."""
        if note.is_detail:
            return
        with self._lock:
            self._num_added += 1
            self._entries.append(
                Entry(number=self._num_added, at=time.time(), step=step, kind=note.kind, text=note.text, is_warning=note.is_warning)
            )

    def join(self, earlier: Sequence[Entry]) -> None:
        """Puts the entries of an earlier chief before those of this one, and numbers them all anew."""
        with self._lock:
            self._num_added += len(earlier)
            first = self._num_added - len(earlier) - len(self._entries)
            entries = [*earlier, *self._entries]
            self._entries.clear()
            self._entries.extend(replace(one, number=first + number) for number, one in enumerate(entries, 1))

    def since(self, number: int) -> list[Entry]:
        """Returns the entries after the one with this number, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry.number > number]
