"""A value as a message shows it: short, whatever it is. Knows no message."""

import reprlib


def shown(value: object) -> str:
    """Returns the value as Python writes it, cut in the middle where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number of more digits than Python converts
        return f"a {type(value).__name__} of thousands of digits"
