"""Suggestions for misspelt names: words for messages, with bounded work, since names come from anywhere. Knows text."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice

# A longer name is no misspelling. Comparing takes time in proportion to its length, and a message may have one of megabytes.
_MAX_LENGTH = 256
# Of more names the others are not looked at: a model may have a hundred thousand.
_MAX_KNOWN = 1_000


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" with the known name that is nearest, to be appended to a message; empty if none is near."""
    near = get_close_matches(name, list(islice(known, _MAX_KNOWN)), n=1) if len(name) <= _MAX_LENGTH else ()
    return f"; did you mean {near[0]!r}?" if near else ""


def known_names(name: str, known: Collection[str]) -> str:
    """Returns the known names as text for the end of a message, with the one that is nearest to `name`."""
    meant = did_you_mean(name, known)
    return f"{'one of ' if meant else ''}{', '.join(known)}{meant}"
