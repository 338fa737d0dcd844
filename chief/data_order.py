"""The order in which the ranges of a pass over the training data are handed out. Pure arithmetic: no list of them is made."""

import hashlib

_NUM_ROUNDS = 4


def nth_range(position: int, *, num_ranges: int, epoch: int, seed: int | None) -> int:
    """Returns the number of the range that comes at `position` (0 to num_ranges - 1) in this pass; without a seed they come in order.

    A permutation by a Feistel network over the smallest even number of bits that holds all numbers, repeated until the result is one.
    """
    if seed is None or num_ranges < 2:
        return position
    half = ((num_ranges - 1).bit_length() + 1) // 2
    key = f"{seed}:{epoch}".encode()
    number = _shuffled(position, half, key)
    while number >= num_ranges:
        number = _shuffled(number, half, key)
    return number


def _shuffled(number: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_NUM_ROUNDS):
        digest = hashlib.blake2b(bytes([turn]) + right.to_bytes(8, "little"), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right
