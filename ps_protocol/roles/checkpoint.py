"""A checkpoint: its name, and the contents of its manifest. Knows no file, no storage and no wire."""

import enum
import re

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.data import DataMarks
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, Placement
from ps_protocol.roles.contribution import NO_ATTACHMENTS, NO_STEP_ATTACHMENTS, Attachments, PushId, StepAttachments
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.shard import CheckpointFile, WorkerPushes

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWN_TAG = re.compile(r"step-\d{9,19}(?:-epoch-(\d{1,9})(?!\d))?(?:-|\Z)")


class Durability(enum.Enum):
    """How much training a server crash may cost: everything (NONE), the steps since the last checkpoint (INTERVAL), or nothing (STEP)."""

    NONE = "none"
    INTERVAL = "interval"
    STEP = "step"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPush:
    """A contribution that is counted and not applied: computed from `step`, made from these ranges of the training data."""

    push_id: PushId
    step: int
    weight: float = 1.0
    ranges: tuple[int, ...] = ()
    attached: Attachments = NO_ATTACHMENTS


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ChiefRecord:
    """The record that a chief leaves for its successor: the agreed model, and the settings that hold. `model` None: none is initialised.

    `oldest_kept`: shards may have dropped contributions to steps before this one, under a policy that accepts none of earlier steps.
    `chosen`: contributions that count for the open `step` of `epoch` (0: unknown), which a worker may know. `data`: the training data done.
    `attached`: what lasts of what applied contributions have brought.
    `earlier`: the fence under which the checkpoint was made that the present life began with; NOBODY: none is known.
    """

    model: ModelSpec | None
    policy: PolicySpec
    settings_version: int = 0
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    num_rollbacks: int = 0
    last_rollback: str = ""
    oldest_kept: int = 0
    epoch: int = 0
    step: int = 0
    chosen: tuple[ChosenPush, ...] = ()
    data: DataMarks | None = None
    attached: StepAttachments = NO_STEP_ATTACHMENTS
    earlier: Fence = NOBODY


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a manifest says, but for its format and the time of day. `fence`: of the chief that saved it. `files` by shard.

    A delta has only the rows of tables that changed since the checkpoint before it. `bases`: the files of earlier checkpoints that its own
    rest on, each shard's from a whole one on.
    """

    tag: str
    cluster: str
    fence: Fence
    step: int
    num_shards: int
    record: ChiefRecord
    placement: Placement
    files: tuple[CheckpointFile, ...]
    bases: tuple[CheckpointFile, ...] = ()
    pushes: tuple[WorkerPushes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of its own."""
        return sum(file.num_bytes for file in self.files)

    @property
    def num_bytes_to_read(self) -> int:
        """Bytes of all files that have its values."""
        return self.num_bytes + sum(file.num_bytes for file in self.bases)

    @property
    def base_tags(self) -> tuple[str, ...]:
        """The checkpoints that it rests on, the oldest first; none if it is a full one."""
        # One shard may have written a whole file later than another: the longest row of them has all.
        chains = [tuple(file.tag for file in self.bases if file.shard == shard) for shard in range(self.num_shards)]
        return max(chains, key=len, default=())

    def files_of(self, shard: int) -> tuple[CheckpointFile, ...]:
        """Returns the files with a shard's values, in the order in which they are to be read."""
        return (*(file for file in self.bases if file.shard == shard), self.files[shard])

    @property
    def age_order(self) -> tuple[int, int]:
        """Sorts checkpoints of a cluster, the newest last: what was saved after the cluster was rolled back is newer."""
        return self.fence.epoch, self.step


def check_tag(tag: str) -> str:
    """Returns the name of a checkpoint as it is. Raises InvalidSpec if it could be anything but the name of a directory."""
    if not _TAG.fullmatch(tag):
        raise InvalidSpec(f"checkpoint tag {tag[:80]!r}: want 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
    return tag


def epoch_of(tag: str) -> int:
    """Returns the epoch in a name made by `tag_of`, with or without a suffix; 0: it is no such name."""
    found = _OWN_TAG.match(tag)
    return 0 if found is None else int(found.group(1) or 1)


def tag_of(*, step: int, epoch: int) -> str:
    """Returns the name that a checkpoint of this step has, for example "step-000001200", or "step-000001200-epoch-2"."""
    return f"step-{step:09}" + (f"-epoch-{epoch}" if epoch > 1 else "")
