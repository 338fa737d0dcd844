"""The training data as a cluster goes through it, in ranges that workers lease. Knows numbers; no sample, no wire."""

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import shown

MAX_RANGES = 10_000_000
_MAX_SAMPLES = 1 << 62
_MAX_NAME = 256


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataRange:
    """Samples `start` to `stop` - 1, in pass `epoch`; `id` names it for ever: pass * ranges of a pass + number in the order of the data."""

    id: int
    epoch: int
    start: int
    stop: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """All samples of a pass, in ranges of `range_size` (the last may have fewer). `num_epochs` 0: passes without end.

    `shuffle_seed`: of the order of the ranges, another one for each pass; None: in order.
    """

    name: str
    num_samples: int
    range_size: int
    num_epochs: int = 1
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or len(self.name) > _MAX_NAME or not self.name.isprintable():
            raise InvalidSpec(f"data name: got {str(self.name)[:40]!r}, want 1 to {_MAX_NAME} printable characters")
        # The size of a range is what a user of `Session.batches()` calls batch_size.
        numbers = (
            ("num_samples", self.num_samples, 1),
            ("range_size (batch_size)", self.range_size, 1),
            ("num_epochs", self.num_epochs, 0),
        )
        for field, value, least in numbers:
            if type(value) is not int or not least <= value <= _MAX_SAMPLES:
                raise InvalidSpec(f"data {self.name!r}: {field}: got {shown(value)}, want a whole number >= {least}")
        if self.shuffle_seed is not None and (type(self.shuffle_seed) is not int or not 0 <= self.shuffle_seed < 1 << 63):
            raise InvalidSpec(f"data {self.name!r}: shuffle_seed: got {shown(self.shuffle_seed)}, want a whole number >= 0, or None")
        if self.num_ranges > MAX_RANGES:
            words = f"{self.num_ranges} ranges a pass, {MAX_RANGES} at most; use a larger range_size (batch_size)"
            raise InvalidSpec(f"data {self.name!r}: {words}")

    @property
    def num_ranges(self) -> int:
        """Ranges of a pass."""
        return -(-self.num_samples // self.range_size)

    def range(self, identity: int) -> DataRange:
        """Returns the range of this id."""
        epoch, number = divmod(identity, self.num_ranges)
        start = number * self.range_size
        return DataRange(id=identity, epoch=epoch, start=start, stop=min(start + self.range_size, self.num_samples))


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataMarks:
    """A position in the data, in few bytes: passes before `epoch` are done, and in those of `passes` (by number) the ranges with a set bit.

    One bit a range, in the order of the data, the lowest bit of a byte first.
    """

    data: DataSpec
    epoch: int
    passes: tuple[tuple[int, bytes], ...] = ()

    def __post_init__(self) -> None:
        size = (self.data.num_ranges + 7) // 8
        for number, done in self.passes:
            if number < self.epoch or len(done) != size:
                raise InvalidSpec(
                    f"data {self.data.name!r}: pass {number} is marked in {len(done)} bytes, want pass {self.epoch} or later, {size}"
                )


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataProgress:
    """The position of a cluster in its data: the pass under way, and the ids of the ranges done of it and of later ones, ascending."""

    data: DataSpec
    epoch: int
    done: tuple[int, ...]
