"""Formats values as text or JSON: tables, sizes, durations, text from the network. Pure: knows no terminal and no status."""

import dataclasses
import enum
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Returns a table as text. The first row is the heading; columns are right-aligned, except those in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def bytes_text(count: int) -> str:
    """Returns a number of bytes in the unit that suits it."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def duration_text(seconds: float) -> str:
    """Returns a duration in the unit that suits it."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printable(text: str) -> str:
    """Returns text that came over the network without characters that could move a terminal's cursor."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def plain(value: object) -> object:
    """Returns a value for JSON: a dataclass or a named tuple as a dict of its fields, enums in lower case."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return {name: plain(item) for name, item in zip(names, value, strict=True)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
