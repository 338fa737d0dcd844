"""How the contributions to a step become the one gradient that the optimizer gets, as a value. Knows names and numbers; no gradient."""

import enum
import math
from collections.abc import Callable, Mapping

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import shown


class MergeName(enum.Enum):
    """MEAN: the weighted mean.

    TRIMMED_MEAN: for each element, of n contributions the floor(number·n) largest values and as many of the smallest are left out, and the
    weighted mean is that of the rest (Yin et al., arXiv 1803.01498, definition 2). NaN counts as the largest, and of equal values that of
    the later worker. `number` is above 0 and below 0.5.

    BOUNDED_MEAN: the weighted mean of x_i·min(1, number·median_{j≠i}(|x_j|) / |x_i|), where |x_i| is the Euclidean norm of all gradients of
    contribution i, over all variables and servers: the bound of Sun et al., arXiv 1911.07963, relative to what the others have.

    RADIAL_MEAN: for each variable, whole, whichever servers it is on, r·u/|u|, where r is the weighted mean of the norms |x_i| and u that
    of the unit vectors x_i/|x_i|, of which a zero has none and counts as zero; zero if u is (radial-directional averaging, arXiv
    2604.21428).

    What is not finite is not kept out by norms: it shows in the values.
    """

    MEAN = 1
    TRIMMED_MEAN = 2
    BOUNDED_MEAN = 3
    RADIAL_MEAN = 4

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


@light_dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """A way to merge with its number; 0 for those that have none."""

    name: MergeName = MergeName.MEAN
    number: float = 0.0

    def __post_init__(self) -> None:
        is_number = isinstance(self.number, (int, float)) and not isinstance(self.number, bool)
        wanted, is_right = _NUMBERS[self.name]
        if not is_number or not is_right(self.number):
            raise InvalidSpec(f"merge: {self.name.name.lower()} with {shown(self.number)}, want {wanted}")

    def __str__(self) -> str:
        """Returns the way as a user spells it."""
        return f"{self.name.name.lower()}:{self.number:g}" if self.number else self.name.name.lower()

    @property
    def needs_norms(self) -> bool:
        """Whether shards must report the norms of each contribution before a step is applied."""
        return self.name in (MergeName.BOUNDED_MEAN, MergeName.RADIAL_MEAN)

    def num_trimmed(self, num_values: int) -> int:
        """Returns how many of so many values are left out at each end."""
        # A share such as 0.29 of 100 is a little below 29 in binary, and one just below a half must leave one.
        most = max(0, num_values - 1) // 2
        return min(int(self.number * num_values + 1e-9), most) if self.name is MergeName.TRIMMED_MEAN else 0


_NUMBERS: Mapping[MergeName, tuple[str, Callable[[float], bool]]] = {
    MergeName.MEAN: ("no number", lambda number: number == 0),
    MergeName.BOUNDED_MEAN: ("how often the others' median norm it may be, a finite number > 0", lambda number: 0 < number < math.inf),
    MergeName.RADIAL_MEAN: ("no number", lambda number: number == 0),
    MergeName.TRIMMED_MEAN: ("the share to leave out at each end, > 0 and < 0.5", lambda number: 0 < number < 0.5),
}
MEAN = MergeSpec()


def merge_of(text: str) -> MergeSpec:
    """Returns the way that a user names, for example "mean" or "trimmed_mean:0.25". Raises InvalidSpec."""
    name, colon, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    known = {one.name.lower(): one for one in MergeName}
    try:
        return MergeSpec(name=known[name], number=float(number) if colon else 0.0)
    except (KeyError, ValueError):
        raise InvalidSpec(f"merge: got {shown(text)}, want one of {', '.join(known)}, for example 'trimmed_mean:0.25'") from None
