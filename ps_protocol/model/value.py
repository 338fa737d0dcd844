"""How to declare a value of which every step makes some: a frozen dataclass at a third of the price. Knows no particular value.

A frozen dataclass sets each of its fields by a call, so that making one of nine fields takes 1.9 us instead of 0.6. mypy takes `step_value`
for `dataclass`, and refuses whatever changes a frozen one; when the program runs, nothing checks it once more.
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as step_value
else:

    def step_value(*, frozen, eq=True, **options):
        """As `dataclass`, with the same options. A frozen one can be hashed, as is usual."""
        return dataclasses.dataclass(eq=eq, unsafe_hash=frozen and eq, **options)


__all__ = ["step_value"]
