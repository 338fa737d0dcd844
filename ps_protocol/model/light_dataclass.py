"""How the values of the packages are declared: a dataclass that takes a quarter of the time to declare. Knows no particular value.

`dataclasses` writes and compiles six functions for each frozen class, which takes 0.4 ms: for the 150 classes that a parameter server
imports, that was a third of the processor time of its start. Here it compiles `__init__` alone; the others are shared functions.

mypy takes `light_dataclass` for `dataclass`, and refuses whatever changes a frozen one. When the program runs, nothing checks it once more,
so that making a value of nine fields takes 0.6 us instead of 1.9. The classes that `worker_client` and its packages export are
declared with `dataclass`: a user's program may be checked by nothing.
"""

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as light_dataclass
else:

    def light_dataclass(*, frozen=False, eq=True, **options):
        """As `dataclass`, for all but ordered ones. A frozen one can be hashed, as is usual."""

        def declare(cls):
            own = cls.__dict__
            made = dataclasses.dataclass(eq=False, repr=False, **options)(cls)
            fields = dataclasses.fields(made)
            if "__repr__" not in own:
                made.__repr__ = _describe
            if eq and "__eq__" not in own:
                made.__eq__ = _equality([field.name for field in fields if field.compare])
            if eq and own.get("__hash__") is None:
                hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
                made.__hash__ = _hashing(hashed) if frozen else None
            return made

        return declare

    def _describe(self):
        fields = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{self.__class__.__qualname__}({fields})"

    def _equality(names):
        values_of = _reader(names)

        def __eq__(self, other):
            return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hashing(names):
        values_of = _reader(names)

        def __hash__(self):
            return hash(values_of(self))

        return __hash__

    def _reader(names):
        """Returns what reads these attributes of an object, as a tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda value, read=attrgetter(*names): (read(value),)) if names else (lambda value: ())


__all__ = ["light_dataclass"]
