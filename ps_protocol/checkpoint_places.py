"""Which kind of storage a place for checkpoints needs: a path, or a URL. Knows all storages; stores nothing itself."""

import re
from urllib.parse import unquote, urlsplit

from ps_protocol.checkpoint_local import LocalStorage
from ps_protocol.checkpoint_storage import CheckpointStorage
from ps_protocol.errors import InvalidSpec

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?://")


def open_storage(place: str) -> CheckpointStorage:
    """Returns the storage at a path ("~" is the home directory), at "file:///path", or at a URL of fsspec ("s3://bucket/run").

    Touches nothing there yet. Raises InvalidSpec if it is no place, or if a package that it needs is not installed.
    """
    if not isinstance(place, str) or not place.strip() or "\0" in place:
        raise InvalidSpec(f"checkpoint directory: got {str(place)[:80]!r}, want a path or a URL")
    if not _URL.match(place):
        return LocalStorage(place)
    if place.startswith("file:"):
        parts = urlsplit(place)
        if parts.netloc not in ("", "localhost"):
            raise InvalidSpec(f"checkpoint directory {place!r}: names the host {parts.netloc!r}; want file:///path, with three slashes")
        return LocalStorage(unquote(parts.path))
    # Not at the top: fsspec is an extra, and nobody who keeps checkpoints in a directory needs it.
    from ps_protocol.checkpoint_remote import RemoteStorage

    return RemoteStorage(place)
