"""The layout of the memory that a worker shares with a shard: positions of numbers in a header page. Pure; no mapping, no RPC."""

import enum

from ps_protocol.errors import TooManyPushes

# A segment is one page of header, and then arenas, each beginning at a page. The header is 512 little-endian uint64, numbered here; a
# worker maps a segment only if the first six are what it expects. There are two kinds.
#
# *Variables*: two arenas, which no worker can write. The shard publishes in the header whom it serves (EPOCH, 0: nobody), how contributions
# are taken (MODE), the step that it collects them for (OPEN_STEP), how many of one worker it holds (MAX_BUFFERS), and for each of the two
# arenas its step (NO_STEP while it is being written) and its version. A version grows after the step was withdrawn and before the first
# byte is overwritten: who finds version and step, copies, and finds the same version again, has copied no mixture.
#
# *Gradients*: one arena, a buffer, for one contribution of one worker. The worker writes 0 to SEQUENCE, then the gradients, then who and
# for what (WORKER to OF_EPOCH), and the sequence of the push last: from then on the contribution is whole. The shard copies each number
# once and believes none: a contribution that does not have the very id, step and epoch that the chief names is not there. DONE is the
# shard's: the last sequence in this buffer that it has applied or dropped; CLOSED is not 0 once it looks here no more for what comes anew:
# the worker sees that sooner than it hears that the sharing has ended. NUM_PUSHES is how often the worker made one whole.

HEADER_BYTES = 4096

NONCE_BYTES = 16

MAGIC = int.from_bytes(b"lockstep", "little")

FORMAT = 1

NO_STEP = (1 << 64) - 1

# The numbers of a header page: memoryview.cast("Q").
Words = memoryview

# Of every segment. The nonce takes two.
MAGIC_AT, FORMAT_AT, KIND_AT, ARENA_BYTES_AT, NONCE_AT = range(5)

# Of the variables.
EPOCH, MODE, OPEN_STEP, MAX_BUFFERS = range(8, 12)

# Of each of its two arenas, from there on.
ARENA_AT = (16, 24)

VERSION, STEP = range(2)

# Of a buffer: what its worker writes. No two writers share a cache line.
SEQUENCE, WORKER, INCARNATION, OF_STEP, OF_EPOCH, NUM_PUSHES = range(8, 14)

# Of a buffer: what the shard writes.
DONE, CLOSED = range(16, 18)


class SegmentKind(enum.IntEnum):
    """The contents of a segment."""

    VARIABLES = 1
    GRADIENTS = 2


class PushMode(enum.IntEnum):
    """The way in which a shard takes contributions that lie in buffers."""

    # Each by a call that names its buffer: they are applied on arrival.
    BY_CALL = 0
    # Those of the open step, without a call.
    OPEN_STEP_ONLY = 1
    # Those of any step, without a call; they stay until they are applied or discarded.
    ANY_STEP = 2


def page_aligned(nbytes: int) -> int:
    """Returns the least multiple of a page that so many bytes fit in."""
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


def segment_bytes(arena_bytes: int, *, kind: SegmentKind) -> int:
    """Returns the size of a segment."""
    return HEADER_BYTES + page_aligned(arena_bytes) * num_arenas(kind)


def num_arenas(kind: SegmentKind) -> int:
    """Returns how many arenas a segment has."""
    return 2 if kind is SegmentKind.VARIABLES else 1


def private_words() -> Words:
    """Returns the words of a header page that is not shared."""
    return memoryview(bytearray(HEADER_BYTES)).cast("Q")


def too_many_pushes(worker: int, *, in_flight: int, limit: int) -> TooManyPushes:
    """Returns the error for a worker that has as many contributions on their way as it may."""
    return TooManyPushes(
        f"worker {worker}: {in_flight} pushes in flight, limit {limit}; wait until a step is applied, or send the same push id again",
        facts={"worker": str(worker), "in_flight": str(in_flight), "limit": str(limit)},
    )
