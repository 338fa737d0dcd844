"""By what parameter servers obey a chief: epoch and incarnation, and where it listens. Plain values; knows no connection."""

from dataclasses import dataclass


@dataclass(slots=True)
class Authority:
    """Of a chief's latest adoption; 0: it has adopted nothing yet. Changed in place by who carries out its wishes."""

    epoch: int = 0
    chief_incarnation: int = 0
    chief_address: str = ""
