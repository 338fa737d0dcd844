"""Texts of others as they may stand in a log or a status. Knows nothing else."""

_MAX_TEXT = 300


def printable(text: str) -> str:
    """Returns a caller's text in one line of bounded length, so that it can neither forge nor flood a log or a status."""
    line = "".join(character if character.isprintable() else "?" for character in text[: _MAX_TEXT + 1])
    return line if len(line) <= _MAX_TEXT else line[:_MAX_TEXT] + "…"
