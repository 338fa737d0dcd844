"""How long to pause before trying again: doubling, jittered, bounded. Pure; the randomness comes from the caller."""

import random
from collections.abc import Iterator

FIRST_DELAY_S = 0.05
MAX_DELAY_S = 3.0


def delays_s(rng: random.Random, *, first_s: float = FIRST_DELAY_S, max_s: float = MAX_DELAY_S) -> Iterator[float]:
    """Yields pauses in seconds for ever: each drawn from the upper half of a bound that doubles from `first_s` to `max_s`.

    The jitter keeps many callers that lost the same server from coming back in one wave; the lower half is left out so that no one spins.
    """
    bound = first_s
    while True:
        yield bound * (0.5 + 0.5 * rng.random())
        bound = min(2 * bound, max_s)
