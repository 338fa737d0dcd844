"""From an address or a place to a follower. Knows addresses and arguments; no step."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import InvalidSpec, NotInitialized, Unavailable, is_boundary
from ps_protocol.model.shown import shown
from ps_protocol.security.options import Security
from worker_client.following.follower import Follower, Part, parts_of
from worker_client.following.sources import ClusterSource, Source
from worker_client.model.wire_format import wire_format
from worker_client.opening import TIMEOUT_S, enter_as_observer


@is_boundary
def follow(
    chief: "str | os.PathLike[str] | None" = None,
    *,
    wire: str | None = None,
    names: Iterable[str] | Mapping[str, str | Part] | None = None,
    tables: bool = False,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    security: Security | None = None,
    interval_s: float = 0.5,
) -> Follower:
    """Follows the variables of a cluster step by step, and returns the follower; use it as a context manager.

    `chief`: the address of its chief or of a relay, or the place where `lockstep store` keeps its weights, which is read without any
    cluster: a directory (a path with a "/") or a URL such as "s3://bucket/x". A place is looked at each `interval_s`, and may be empty
    still; the arguments about a cluster do nothing for it.

    `wire`: how float32 variables travel and are kept: "float32", "bfloat16", "float16"; None: as a relay or a store has them; of servers
    as LOCKSTEP_WIRE says, else as they are. A step is sent as the words of 16 bits that it has changed, where that is shorter than all of
    them. `names`: the variables to follow (None: all dense ones, and with `tables` all tables, too), or a dict from the name that one has
    here to its name there, or to a `Part` of it. The follower has all rows of a table in its memory, and its servers two copies of them.
    The other arguments are those of `observe()`; the cluster must have answered once, and may be away later: the follower keeps what it
    has, and goes on when it is there again. Raises what `observe()` raises.
    """
    encoding, parts = encoding_of(wire), parts_of(names)
    source: Source
    address = None if chief is None else os.fspath(chief)
    if address is not None and (address is not chief or _is_place(address)):
        if os.path.isfile(address):
            raise InvalidSpec(f"{address}: it is a file; want the directory that `lockstep store` writes to")
        # Not at the top: clusters do without what storages need.
        from worker_client.following.store import StoreSource

        source = StoreSource(address, interval_s=interval_s)
        with suppress(NotInitialized, Unavailable):
            source.open()  # what is wrong is said at once
    else:
        source = ClusterSource(*enter_as_observer(address, cluster=cluster, timeout_s=timeout_s, wire=None, security=security))
    return Follower(source, encoding=encoding, takes_kept=wire is None, parts=parts, tables=tables)


def _is_place(text: str) -> bool:
    """Whether this is a directory or a URL, and no address."""
    is_path = text.startswith(("/", "~", ".")) or ("/" in text and not text.startswith("unix:"))
    return is_path or os.path.isdir(text)


def encoding_of(wire: str | None) -> FloatEncoding:
    """Returns how weights travel where `wire` is said; None: as LOCKSTEP_WIRE has it. Raises InvalidSpec."""
    if wire is None:
        return wire_format(os.environ.get("LOCKSTEP_WIRE") or None).variable_encoding
    names = [one.name for one in FORMATS.values() if one.is_for_variables]
    if wire not in names:
        raise InvalidSpec(f"wire: got {shown(wire)}, want one of {', '.join(map(repr, names))}")
    return wire_format(wire).variable_encoding
