"""Whether a chief that starts may take its shards over, and under which incarnation. Pure: looks at what the shards report."""

from collections.abc import Sequence

from ps_protocol.errors import TrainingFailed
from ps_protocol.shard import ShardStatus


def next_chief_incarnation(statuses: Sequence[ShardStatus], *, names: Sequence[str]) -> int:
    """Returns an incarnation above all that adopted these shards before. Raises TrainingFailed if one of them holds variables.

    To be asked before any shard is adopted: a chief that may not have the shards must not take them from another one that works.
    """
    for name, status in zip(names, statuses, strict=True):
        if status.step is not None:
            raise TrainingFailed(
                f"{name} holds variables at step {status.step} already, under another chief (incarnation {status.chief_incarnation});"
                " a chief cannot take over a model that it did not see begin: end that chief, and start the parameter servers anew"
            )
    return 1 + max((status.chief_incarnation for status in statuses), default=0)
