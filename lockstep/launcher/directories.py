"""The directories that outlive a cluster: made, and the checkpoints' held for as long as the cluster lives. Knows files; no process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.launcher.spec import Recovery
from lockstep.launcher.supervisor import LaunchFailed, make_directory

_USAGE = 2


@contextmanager
def kept_directories(recovery: Recovery) -> Iterator[None]:
    """Makes the directories of checkpoints and history, where they are of this machine; LaunchFailed if they cannot be written to.

    Within the block no other cluster can have the same directory of checkpoints: clusters that a launcher starts have one name, so that the
    next goes on from what the last has left, and two at a time would take each other's checkpoints for their own, and remove them.
    """
    if recovery.history is not None:
        make_directory(recovery.history, flag="--history")
    place = recovery.directory
    if place is None:
        yield
        return
    make_directory(place, flag="--checkpoint-dir")
    # A lock of the directory itself: it needs no file, and is gone with this process, however that ends.
    try:
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LaunchFailed(f"cannot read {place}: {error.strerror}; choose another --checkpoint-dir", exit_code=_USAGE) from error
    try:
        _lock(held, place)
        yield
    finally:
        os.close(held)


def _lock(held: int, place: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        words = f"--checkpoint-dir: another cluster that was started here is at work in {place}; end it first, or choose another directory"
        raise LaunchFailed(words, exit_code=_USAGE) from None
    except OSError:
        pass  # a file system without locks: nobody can be kept out
