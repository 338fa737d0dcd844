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
class DataPass:
    """What is done of a pass: one bit a range, in the order of the data, the lowest bit of a byte first."""

    epoch: int
    done: bytes


@light_dataclass(frozen=True, slots=True, kw_only=True)
class DataMarks:
    """How far a cluster is in its data, in few bytes: passes before `epoch` are done, and of those in `passes` what they say.

    `position`: so many ranges of pass `epoch` are done without a gap, in the order in which they are handed out.
    """

    data: DataSpec
    epoch: int
    position: int = 0
    passes: tuple[DataPass, ...] = ()

    def __post_init__(self) -> None:
        num_bytes = (self.data.num_ranges + 7) // 8
        for one in self.passes:
            if one.epoch < self.epoch or len(one.done) != num_bytes:
                words = f"pass {one.epoch} is marked in {len(one.done)} bytes, want pass {self.epoch} or later, {num_bytes}"
                raise InvalidSpec(f"data {self.data.name!r}: {words}")
        if not 0 <= self.position < self.data.num_ranges:
            raise InvalidSpec(f"data {self.data.name!r}: position {self.position}, want 0 to {self.data.num_ranges - 1}")
