"""Short names for eras and chiefs' fences in tests. Asserts nothing."""

from ps_protocol.roles.fence import Era, Fence

LIFE = 7


def era(epoch: int, *, life: int = LIFE) -> Era:
    """An epoch, of the life of most tests."""
    return Era(life=life, epoch=epoch)


def fence(epoch: int, chief: int = 1, *, life: int = LIFE) -> Fence:
    """What a chief commands by, in the life of most tests."""
    return Fence(era=era(epoch, life=life), chief_incarnation=chief)
