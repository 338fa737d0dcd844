"""When and by whom something is said: a cluster's life and epoch, and the chief's number, as one value. Knows no call.

Only the codec takes these values apart. Compare whole values, except to say in words what differs, or where only the epoch is sent.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """One epoch of one life of a cluster: what was said in it holds in no other.

    `life` is random for each existence of a cluster. Another one begins where no server knows of the one before: then epochs and
    incarnations may be given that were given in it. `epoch` grows with each rollback. Both are at least 1 once a chief has begun.
    """

    life: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What a chief commands by: the era, and its own number among the chiefs of that life."""

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


# Of a server that no chief has adopted, and of a chief that does not know yet who came before it.
NOBODY = Fence(era=Era(life=0, epoch=0), chief_incarnation=0)

# Numbers that each chief gives are above those of all chiefs before it. So many bits of a number are counted by one chief.
_BITS_OF_A_CHIEF = 20


def numbered(chief_incarnation: int, count: int) -> int:
    """Returns the number that a chief gives as its `count`-th: above all that earlier chiefs have given."""
    return (chief_incarnation - 1 << _BITS_OF_A_CHIEF) + count


def chief_of(number: int) -> int:
    """Returns the chief that gave a number."""
    return 1 + (number >> _BITS_OF_A_CHIEF)
