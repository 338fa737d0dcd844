"""A value or a size as a message shows it: short, whatever it is. Knows no message."""

import reprlib


def shown(value: object) -> str:
    """Returns the value as Python writes it, cut in the middle where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number of more digits than Python converts
        return f"a {type(value).__name__} of thousands of digits"


def format_bytes(nbytes: int) -> str:
    """Formats a size, for example "1.5 GiB"."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
