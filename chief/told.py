"""Answers that wait for what they tell to be sure, and what the record at the shards covers. Knows calls and versions; decides nothing."""

from collections.abc import Collection
from dataclasses import dataclass, field

from chief.events import Reply
from ps_protocol.shard import PushId


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An answer that tells of a contribution (None: of something else). `version`: the record that makes it sure; None: only its step."""

    reply: Reply
    push_id: PushId | None
    version: int | None


@dataclass(slots=True, kw_only=True)
class Told:
    """What is sure, and who waits for that. `is_needed` is False where the chief cannot die without its shards: all is sure there."""

    is_needed: bool = True
    version: int = 0  # of the latest record
    # The one under way: whether it goes to all shards, the contributions that it names, and how many of `unkept` it has.
    in_flight: int | None = None
    is_for_all: bool = False
    chosen: tuple[PushId, ...] = ()
    num_unkept: int = 0
    has_data: bool = False
    # Ranges of the training data that are done, and that no record has which is kept; and whether one has that there are any.
    unkept: list[int] = field(default_factory=list)
    is_data_kept: bool = False
    # Contributions that are not told to be applied, and that are sure all the same.
    sure: set[PushId] = field(default_factory=set)
    waiting: dict[int, Waiting] = field(default_factory=dict)

    @property
    def next_version(self) -> int:
        """Version of the first record that will have all that is known now."""
        return self.version + 1

    def kept(self) -> int:
        """The record under way is kept; returns its version."""
        version, self.in_flight = self.version, None
        self.sure.update(self.chosen)
        del self.unkept[: self.num_unkept]
        self.is_data_kept = self.is_data_kept or self.has_data
        return version

    def take(self, *, version: int = 0, applied: Collection[PushId] = ()) -> list[Reply]:
        """Takes out what is sure now that this record is kept, and these contributions are applied."""
        due = [
            call
            for call, one in self.waiting.items()
            if (one.version is not None and one.version <= version) or one.push_id in applied or one.push_id in self.sure
        ]
        return [self.waiting.pop(call).reply for call in due]

    def restart(self) -> None:
        """Another epoch begins: nothing is sure any more. Those who wait are somebody else's to refuse."""
        self.in_flight = None
        self.chosen, self.num_unkept, self.has_data, self.is_data_kept = (), 0, False, False
        self.unkept.clear()
        self.sure.clear()
