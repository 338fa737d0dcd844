"""Which known name an unknown one may be meant for, with bounded work: names come from anywhere. Knows text."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

# A longer name is no misspelling. Comparing takes time in proportion to its length, and a message may have one of megabytes.
_MAX_LENGTH = 256
# Of more names the others are not looked at: a model may have a hundred thousand.
_MAX_KNOWN = 1_000


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is nearest to this one; empty: none is near."""
    if len(name) > _MAX_LENGTH:
        return ""
    return next(iter(get_close_matches(name, list(islice(known, _MAX_KNOWN)), n=1)), "")
