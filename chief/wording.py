"""Words and numbers for messages, one way everywhere. Knows no state."""

from collections.abc import Sequence

from ps_protocol.chief import ParticipantKind

_MAX_TEXT = 300
# A lease that runs longer is one that does not end, as those inside one process; its number would say nothing.
_MAX_LEASE_S = 86_400.0


def name_of(kind: ParticipantKind, index: int) -> str:
    """Returns for example "worker 3"."""
    return f"{kind.name.lower()} {index}"


def seconds(value: float) -> str:
    """Returns a duration as a person would say it: one decimal, and none from a minute on."""
    return f"{value:.0f} s" if value >= 60 else f"{max(0.0, value):.1f} s"


def lease_end(left_s: float) -> str:
    """Returns for example ", lease ends in 6.9 s"; empty if that is more than a day away."""
    return f", lease ends in {seconds(left_s)}" if left_s <= _MAX_LEASE_S else ""


def printable(text: str) -> str:
    """Returns a caller's text in one line of bounded length, so that it can neither forge nor flood a log or a status."""
    line = "".join(character if character.isprintable() else "?" for character in text[: _MAX_TEXT + 1])
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "…"


def listed(items: Sequence[str], *, limit: int = 5) -> str:
    """Joins the first `limit` items and says how many more there are."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")
