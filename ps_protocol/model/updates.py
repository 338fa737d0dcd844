"""New values that a formula gives to variables in a step, next to them: its text, and what its names are. Knows positions; no bytes.

Variables and arrays are named by positions among a shard's dense slices. An array has no place of its own in a contribution: it lies where
a plain update of that slice would, which the formula writes anyway.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.expressions import VARIABLE, Formula, check_own_name
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.programs import Names, Program, compiled, parsed

MAX_NAMES = 32
# Of one contribution, at one shard.
MAX_UPDATES = 512
MAX_CHARACTERS = 64 * 1024


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FormulaUpdate:
    """A formula, checked when it is made, with its names: `variables` that it reads and may assign to, `arrays`, and `numbers`.

    One of the variables is VARIABLE. All variables and arrays of a formula have one shape and element type. Raises InvalidSpec.
    """

    text: str
    variables: Mapping[str, int]
    arrays: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (*self.variables, *self.arrays, *self.numbers)
        if VARIABLE not in self.variables:
            raise InvalidSpec(f"formula: its variable {VARIABLE!r} is missing; name the variable that it is for")
        if len(names) > MAX_NAMES:
            raise InvalidSpec(f"formula: {len(names)} names, {MAX_NAMES} at most")
        for name in names:
            check_own_name("formula: name", name)
            if names.count(name) > 1:
                raise InvalidSpec(f"formula: {name!r} is given twice; give one of them another name")
        for what, positions in (("variables", self.variables), ("arrays", self.arrays)):
            if len(set(positions.values())) < len(positions):
                raise InvalidSpec(f"formula: two of its {what} are at one position; give each once")
        strange = [name for name, position in self.arrays.items() if position not in self.writes]
        if strange:
            raise InvalidSpec(
                f"formula: the array {strange[0]!r} does not lie where a variable does that it assigns to; it has no other place"
            )
        _ = self.program  # refuses what needs too much memory

    @property
    def formula(self) -> Formula:
        """The formula, parsed."""
        return parsed(self.text, self._names)

    @property
    def program(self) -> Program:
        """The formula compiled for its variables and then its arrays, in their order; what it assigns to is changed in place."""
        return compiled(self.text, self._names)

    @property
    def _names(self) -> Names:
        return Names(arrays=(*self.variables, *self.arrays), in_place=tuple(self.variables), numbers=tuple(self.numbers))

    @property
    def writes(self) -> tuple[int, ...]:
        """The positions of the variables that get new values."""
        return tuple(self.variables[name] for name in self.formula.writes)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of all variables."""
        return tuple(self.variables.values())


def check_amount(texts: Sequence[str]) -> None:
    """Raises LimitExceeded if one contribution has so many formulas for a shard, or such long ones."""
    num_characters = sum(map(len, texts))
    if len(texts) > MAX_UPDATES or num_characters > MAX_CHARACTERS:
        raise LimitExceeded(
            f"formulas: {len(texts)} of {num_characters} characters in one contribution, {MAX_UPDATES} of {MAX_CHARACTERS} at most"
        )


def check_updates(updates: Sequence[FormulaUpdate]) -> None:
    """Raises LimitExceeded if one contribution has too many for a shard, InvalidSpec if two give one variable a value.

    So the cost of a contribution is bounded by the size of the model.
    """
    check_amount([update.text for update in updates])
    written = [position for update in updates for position in update.writes]
    if len(set(written)) < len(written):
        raise InvalidSpec("formulas: two of one contribution assign to the same variable; write one formula for it")


def check_fits(updates: Sequence[FormulaUpdate], layout: Layout, absent: Sequence[int]) -> None:
    """Raises InvalidSpec unless the shard of this layout can compute the updates of a contribution without the slices in `absent`."""
    check_updates(updates)
    for update in updates:
        for name, position in (*update.variables.items(), *update.arrays.items()):
            if not 0 <= position < len(layout.slices):
                raise InvalidSpec(
                    f"formula: {name!r} is at position {position} of the shard's {len(layout.slices)} slices; ask for the layout"
                )
        first = layout.slices[update.variables[VARIABLE]].variable
        for position in update.positions:
            piece, variable = layout.slices[position], layout.slices[position].variable
            if not piece.is_whole:
                raise InvalidSpec(f"formula: variable {variable.name!r} is split over shards; place it whole, with split_bytes=0")
            if not variable.is_state:
                raise InvalidSpec(f"formula: variable {variable.name!r} takes gradients; only variables declared as Buffer take updates")
            if variable.data_type.itemsize < 4:
                raise InvalidSpec(f"formula: variable {variable.name!r} is {variable.data_type.value}, want float32 or float64")
            if (variable.shape, variable.data_type) != (first.shape, first.data_type):
                raise InvalidSpec(
                    f"formula: variables {first.name!r} and {variable.name!r} have other shapes or types; nothing is broadcast but numbers"
                )
        lost = [name for name, position in update.arrays.items() if position in absent]
        if lost:
            raise InvalidSpec(f"formula: its array {lost[0]!r} lies where the contribution has nothing")
