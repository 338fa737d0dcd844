"""Keys of tables that have no size: any 64-bit integer. How they are spread over parameter servers. Knows no server.

A key is *spread*: turned into another integer by a bijection whose result looks random, also for keys that count up. Spread keys travel and
lie on servers; programs and files have keys as they were given. The highest bits of a spread key are its bucket. A keyed table is cut into
ranges of buckets, as another is cut into ranges of rows; sorted, the spread keys of a range lie side by side. A bound on its rows holds for
each bucket by itself, so that what a table keeps does not depend on the number of servers.

Source of the bijection: the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

import enum
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import shown

# Of a table without a bound on its rows.
NUM_BUCKETS = 1 << 16
# The part of a keyed table in a checkpoint that has its keys; no slot of an optimizer has this name, which is none in a formula.
KEYS_PART = "row keys"
# And the part with the step that used each row last, modulo 2^32, where old rows make room for new ones.
USE_PART = "row use"
# And the part with the counters of keys that are not admitted yet: bytes, the same number for each bucket.
OCCURRENCES_PART = "row occurrences"
# And in a delta the part that says which rows of a table the others have, by their numbers in the slice, ascending.
ROWS_PART = "row numbers"

# What bounds may be at most. A bucket's counters forget faster than a rarer key could be counted.
_BOUNDS = {"max_rows": 1 << 36, "max_age_steps": (1 << 31) - 1, "admit_after": 32}

# How many rows of a bounded table a bucket has at least; fewer in small tables, so that they have buckets for several servers.
_BUCKET_ROWS, _SMALL_BUCKET_ROWS, _MAX_SMALL_BUCKETS = 64, 16, 1 << 10
_LEAST = 1 << 63  # keys are signed: bucket 0 has the lowest of them
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_INVERSES = np.uint64(0x96DE1B173F119089), np.uint64(0x319642B2D24D8EC3)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)

Keys = npt.NDArray[np.int64]


class KeyKind(enum.Enum):
    """The integers that name rows, by their names in NumPy."""

    INT64 = "int64"
    UINT64 = "uint64"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class KeySpec:
    """What names the rows of a keyed table, and which keys have one.

    Where it has `max_rows`, those that were not used lately make room for new ones. After `max_age_steps` that did not use it, a row is
    gone. A key gets one in a step with `admit_probability`, or in the `admit_after`th step that has a gradient for it. None: no such bound.
    """

    kind: KeyKind = KeyKind.INT64
    max_rows: int | None = None
    max_age_steps: int | None = None
    admit_probability: float = 1.0
    admit_after: int | None = None

    def check(self, what: str) -> None:
        """Raises InvalidSpec, which says of what, unless each number is one that it may be."""
        for option, most in _BOUNDS.items():
            value = getattr(self, option)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise InvalidSpec(f"{what}: {option} = {shown(value)}, want a whole number from 1 to {most}, or None for no bound")
        chance = self.admit_probability
        if type(chance) not in (int, float) or not 0 < chance <= 1:
            raise InvalidSpec(f"{what}: admit_probability = {shown(chance)}, want more than 0 and at most 1")
        if chance < 1 and self.admit_after is not None:
            raise InvalidSpec(f"{what}: admit_probability = {chance} and admit_after = {self.admit_after}; give one of them")

    @property
    def num_buckets(self) -> int:
        """The buckets that the table is cut by, a power of two."""
        return buckets_for(self.max_rows or 0)

    def are_gone(self, used: npt.NDArray[np.uint32], *, step: int) -> npt.NDArray[np.bool_]:
        """Returns whether rows are gone at a step, by the steps that used them last, modulo 2^32."""
        # Signed: a step that is being applied has used rows later.
        gone: npt.NDArray[np.bool_] = (np.uint32(step & 0xFFFFFFFF) - used).view(np.int32) >= (self.max_age_steps or 1 << 31)
        return gone


def spread(keys: npt.NDArray[Any]) -> Keys:
    """Returns the spread keys of int64 or uint64 keys, in the same shape."""
    words = keys.view(np.uint64) + _GAMMA
    mix(words)
    return words.view(np.int64)


def gathered(spread_keys: Keys) -> Keys:
    """Returns the keys whose spread keys these are, as int64."""
    words = spread_keys.view(np.uint64) ^ (spread_keys.view(np.uint64) >> _SHIFTS[2])
    words ^= words >> np.uint64(62)
    words *= _INVERSES[1]
    words ^= words >> _SHIFTS[1]
    words ^= words >> np.uint64(54)
    words *= _INVERSES[0]
    words ^= words >> _SHIFTS[0]
    words ^= words >> np.uint64(60)
    words -= _GAMMA
    return words.view(np.int64)


def mix(words: npt.NDArray[np.uint64]) -> None:
    """Replaces 64-bit words by others, in place, of which each bit depends on all bits."""
    scratch = words >> _SHIFTS[0]
    for factor, shift in zip(_FACTORS, _SHIFTS[1:], strict=True):
        words ^= scratch
        words *= factor
        np.right_shift(words, shift, out=scratch)
    words ^= scratch


def buckets_for(max_rows: int) -> int:
    """Returns how many buckets a keyed table of at most so many rows has, a power of two; 0 rows: any number of them."""
    if not max_rows:
        return NUM_BUCKETS
    most = max(1, max_rows // _BUCKET_ROWS, min(max_rows // _SMALL_BUCKET_ROWS, _MAX_SMALL_BUCKETS))
    return 1 << (most.bit_length() - 1)


def draws(spread_keys: Keys, *, seed: int, step: int) -> npt.NDArray[np.float64]:
    """Returns a number from 0 up to 1 for each key, as if at random, which follows from key, seed and step alone."""
    salt = np.array([seed], np.uint64) + _GAMMA
    mix(salt)
    salt ^= np.uint64(step)
    mix(salt)
    words = spread_keys.view(np.uint64) ^ salt
    mix(words)
    return (words >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def key_range(start: int, stop: int, *, num_buckets: int) -> tuple[int, int]:
    """Returns the least and the greatest spread key of the buckets from `start` up to `stop`, which are at least one."""
    size = (1 << 64) // num_buckets
    return start * size - _LEAST, stop * size - _LEAST - 1


def buckets_of(spread_keys: Keys, *, num_buckets: int) -> Keys:
    """Returns the bucket of each key."""
    # Shifted by 64, of one bucket, NumPy's words are 0.
    return ((spread_keys.view(np.uint64) ^ np.uint64(_LEAST)) >> np.uint64(65 - num_buckets.bit_length())).view(np.int64)


def text_keys(texts: Iterable[str]) -> Keys:
    """Returns a 64-bit key for each text: the first 8 bytes of BLAKE2b of its UTF-8, little-endian, as int64.

    Among n texts two have one key with a probability of about n²/2⁶⁵: one in four million for three million texts.
    """
    digests = []
    for text in [texts] if isinstance(texts, str) else texts:
        if not isinstance(text, str):
            raise InvalidSpec(f"text_keys: got a {type(text).__name__}, want a str; integers are keys as they are")
        digests.append(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return np.frombuffer(b"".join(digests), "<i8").astype(np.int64)
