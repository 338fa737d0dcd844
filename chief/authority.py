"""By what parameter servers obey a chief: epoch, incarnation and life, and where it listens. Plain values; knows no connection."""

from dataclasses import dataclass


@dataclass(slots=True)
class Authority:
    """Of a chief's latest adoption; 0: it has adopted nothing yet. Changed in place by who carries out its wishes."""

    epoch: int = 0
    chief_incarnation: int = 0
    chief_address: str = ""
    life: int = 0

    def obey(self, *, epoch: int, chief_incarnation: int, life: int) -> None:
        """Everything is done under these from now on."""
        self.epoch, self.chief_incarnation, self.life = epoch, chief_incarnation, life
