"""Values that prove when and by whom a call was made: a cluster's era and fence, a registration's secret. Pure; knows no call.

Only the codec takes eras and fences apart. Compare whole values, except to describe what differs, or where only the epoch is sent.
"""

import hashlib
from typing import NamedTuple

from ps_protocol.model.light_dataclass import light_dataclass


class Era(NamedTuple):
    """One epoch of one life of a cluster: a statement made in it holds in no other.

    `life` is random for each existence of a cluster. Another one begins where no server knows of the one before: then epochs and
    incarnations may be given that were given in it. `epoch` grows with each rollback. Both are at least 1 once a chief has begun.
    """

    life: int
    epoch: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The value that shows that a chief is in charge: the era, and its own number among the chiefs of that life."""

    era: Era
    chief_incarnation: int

    @property
    def life(self) -> int:
        """The life that it commands in."""
        return self.era.life

    @property
    def epoch(self) -> int:
        """The epoch that it commands in."""
        return self.era.epoch

    def is_overtaken_by(self, other: "Fence") -> bool:
        """Whether a server that obeys `other` refuses this chief: a later one has taken over, or one of another life with its number."""
        if other.chief_incarnation != self.chief_incarnation:
            return other.chief_incarnation > self.chief_incarnation
        return other.life != self.life


# Of a server that no chief has adopted, and of a chief that does not know its predecessors yet.
NOBODY = Fence(era=Era(life=0, epoch=0), chief_incarnation=0)

# A chief that is alive is heard by each server that it has adopted several times a second; one that is silent for longer may be gone.
LIVING_CHIEF_S = 2.5

# Numbers that each chief gives are above those of all chiefs before it. So many bits of a number are counted by one chief.
_BITS_OF_A_CHIEF = 20


def numbered(chief_incarnation: int, count: int) -> int:
    """Returns the number that a chief gives as its `count`-th: above all that earlier chiefs have given."""
    return (chief_incarnation - 1 << _BITS_OF_A_CHIEF) + count


def chief_of(number: int) -> int:
    """Returns the chief that gave a number."""
    return 1 + (number >> _BITS_OF_A_CHIEF)


# A participant shows its session secret with each call: a number that only chiefs can make, and only the participant and the servers see.
# A chief makes it with a key of its own, and gives its keys to the servers that it adopts. So they know an incarnation that it has admitted
# without a message about it, and no caller can invent one.

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
