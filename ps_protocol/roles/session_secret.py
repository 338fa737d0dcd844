"""What shows that an incarnation is the caller's: a number that only chiefs can make, and only its holder and servers see. Pure.

A chief makes it of a key of its own, and gives its keys to the servers that it adopts: they know an incarnation that it has admitted
without having been told of it, and one that nobody has admitted cannot be made up.
"""

import hashlib

KEY_BYTES = 32
# Of one life of a cluster, those of the latest chiefs; an epoch sees one chief, rarely two.
MAX_KEYS = 16

_SECRET_BYTES = 8


def session_secret(key: bytes, *, name: str, incarnation: int) -> int:
    """Returns the secret of one incarnation of the participant `name`, as "worker 3"."""
    digest = hashlib.blake2b(f"{name}/{incarnation}".encode(), key=key, digest_size=_SECRET_BYTES)
    return int.from_bytes(digest.digest(), "little")


def joined_keys(first: tuple[bytes, ...], others: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Returns all keys, each once, the first ones first."""
    return tuple(dict.fromkeys((*first, *others)))[:MAX_KEYS]
