"""Compares recorded values with computed ones. Knows tolerances, and words for a difference; nothing of the system."""

from typing import Any

import numpy as np

# Relative, and absolute: the order of a sum may differ, and an element near 0 may be the difference of two values of about 1.
_TOLERANCES = {"float16": (1e-2, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 2e-6), "float64": (1e-9, 1e-14)}


class Mismatch(AssertionError):
    """Something is not as recorded."""


def check_equal(what: str, got: object, want: object) -> None:
    """Raises Mismatch unless both are the same."""
    if got != want:
        raise Mismatch(f"{what}: got {got}, want {want}")


def check_close(what: str, got: Any, want: Any, *, dtype: str) -> None:
    """Raises Mismatch unless both have one shape and the same values, within the tolerance of the element type."""
    there, recorded = np.asarray(got, np.float64), np.asarray(want, np.float64)
    # An array without elements is recorded as [], without its other extents.
    if recorded.size == there.size == 0:
        return
    check_equal(f"{what}: shape", there.shape, recorded.shape)
    relative, absolute = _TOLERANCES[dtype]
    wrong = ~np.isclose(there, recorded, rtol=relative, atol=absolute, equal_nan=True)
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        count = f"{int(wrong.sum())} of {wrong.size} differ"
        raise Mismatch(f"{what}{list(place)}: got {float(there[place])!r}, want {float(recorded[place])!r} within {relative:g} ({count})")
