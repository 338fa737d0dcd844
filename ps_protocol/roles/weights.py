"""What followers of weights ask of a parameter server or a relay, and their values. Knows steps and bytes; no transport."""

from typing import ClassVar

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.fence import Era
from ps_protocol.roles.request import READERS, asks
from ps_protocol.roles.shard import MAX_STEP


@light_dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What a relay or a store has of the variables for followers: all dense ones in one encoding, and all tables or none of them."""

    encoding: FloatEncoding
    has_tables: bool


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FetchReply:
    """A page of what brings a reader to `step`: a patch for the step that it holds (`is_patch`), or all words of what it has selected.

    `num_bytes`: of all pages. `digests`: of each selected slice at `step`, in the order in which they lie; only with the first page.
    `newest_step`: of the shard, now.
    """

    step: int
    newest_step: int
    is_patch: bool
    num_bytes: int
    content: bytes
    digests: tuple[int, ...] = ()


@asks("ParameterService", "FetchWeights", by=READERS)
class FetchRequest:
    """Asks for what brings a reader of a shard's variables from the step that it holds (None: it holds nothing) to another one.

    `step` None: the newest, once it is above `held_step`. A step that is not there yet is waited for, for `max_wait_s`; then, or if it is
    gone, the answer is StepNotReady or StepGone, whose facts have the `step` that can be had. `slices`: positions in `layout.pieces`;
    empty: all dense ones. `offset`: of the page's first byte; pages after the first must name the step of the first, and no `held_step`
    where that was not of a patch.
    """

    era: Era
    layout_hash: str
    encoding: FloatEncoding = FloatEncoding.AS_IS
    step: int | None = None
    held_step: int | None = None
    slices: tuple[int, ...] = ()
    offset: int = 0
    max_wait_s: float = 0.0
    answer: ClassVar[type[FetchReply]] = FetchReply
    awaited: ClassVar[str] = "the weights of a later step"

    def __post_init__(self) -> None:
        if not 0 <= (self.step or 0) <= MAX_STEP or not 0 <= (self.held_step or 0) <= MAX_STEP:
            raise InvalidSpec(f"step: got {self.step} from {self.held_step}, want 0 to 2^62")
        if not 0 <= self.offset <= MAX_STEP:
            raise InvalidSpec(f"offset: got {self.offset}, want 0 to 2^62")

    @property
    def least(self) -> int:
        """The earliest step that is an answer."""
        if self.step is not None:
            return self.step
        return -1 if self.held_step is None else self.held_step + 1
