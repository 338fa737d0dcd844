"""From an address to a follower. Knows addresses and arguments; no step."""

import os
from collections.abc import Iterable, Mapping

from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import InvalidSpec, is_boundary
from ps_protocol.model.shown import shown
from ps_protocol.security.options import Security
from worker_client.following.follower import Follower, Part, parts_of
from worker_client.following.sources import ClusterSource
from worker_client.model.wire_format import wire_format
from worker_client.opening import TIMEOUT_S, enter_as_observer


@is_boundary
def follow(
    chief: str | None = None,
    *,
    wire: str | None = None,
    names: Iterable[str] | Mapping[str, str | Part] | None = None,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    security: Security | None = None,
) -> Follower:
    """Follows the dense variables of a cluster step by step, and returns the follower; use it as a context manager.

    `wire`: how float32 variables travel and are kept: "float32", "bfloat16", "float16"; None: LOCKSTEP_WIRE, else as they are. A step is
    sent as the words of 16 bits that it has changed, where that is shorter than all of them. `names`: the variables to follow (None: all),
    or a dict from the name that one has here to its name there, or to a `Part` of it. The other arguments are those of `observe()`; the
    cluster must have answered once, and may be away later: the follower keeps what it has, and goes on when it is there again. Raises
    what `observe()` raises.
    """
    encoding = _encoding(wire)
    parts = parts_of(names)
    link, registration = enter_as_observer(chief, cluster=cluster, timeout_s=timeout_s, wire=None, security=security)
    return Follower(ClusterSource(link, registration), encoding=encoding, parts=parts)


def _encoding(wire: str | None) -> FloatEncoding:
    if wire is None:
        return wire_format(os.environ.get("LOCKSTEP_WIRE") or None).variable_encoding
    names = [one.name for one in FORMATS.values() if one.is_for_variables]
    if wire not in names:
        raise InvalidSpec(f"wire: got {shown(wire)}, want one of {', '.join(map(repr, names))}")
    return wire_format(wire).variable_encoding
