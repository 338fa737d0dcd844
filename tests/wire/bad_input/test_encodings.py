"""Encoded gradients that no client of ours would send: a parameter server refuses them and keeps serving."""

import contextlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, frame, push_stream
from tests.support.parameter_servers.shards import MIXED, Trainer, open_server

HALVED = encoded_nbytes(MIXED, FloatEncoding.BFLOAT16)
INT8 = encoded_nbytes(MIXED, FloatEncoding.INT8_BLOCKS)
INT4 = encoded_nbytes(MIXED, FloatEncoding.INT4_BLOCKS)
BFLOAT16, INT8_BLOCKS, TOP_K, INT4_BLOCKS = 1, 3, 4, 5
DOUBLES = bytes(128)  # the range of float64, which travels as it is
SIZE = next(arena.stop - arena.start for arena in MIXED.arenas) // 4


CHUNK = 4096
THREE = 3 * CHUNK // SIZE  # of a whole chunk, which is three of the arena's elements


def top_k(count: int, positions: list[int], rest: bytes = DOUBLES) -> bytes:
    """The top k of the arena, whose one chunk is a shorter one."""
    return np.array([count], "<u8").tobytes() + np.ones(1, "<f4").tobytes() + np.array(positions, "<u2").tobytes() + rest


def nbytes(count: int) -> int:
    """Of an arena of which the share count/4096 is sent."""
    return 8 + 4 + 2 * -(-count * SIZE // CHUNK) + len(DOUBLES)


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    """A real parameter server with a model."""
    with open_server(ParameterServerConfig(index=0)) as running, contextlib.closing(CommandedShard(running.address)) as shard:
        trainer = Trainer(shard)
        trainer.create()
        trainer.train(0)
        yield trainer


def push(trainer: Trainer, encoding: int, encoded_bytes: int, content: bytes, **changes: object) -> Outcome:
    """Pushes bytes under a header that says that."""
    step = trainer.shard.call(ShardStatusRequest()).step
    assert step is not None and isinstance(trainer.shard, CommandedShard)
    header = codec.encode(trainer.header(step=step))
    header.MergeFrom(pb.PushHeader(encoding=encoding, encoded_bytes=encoded_bytes, **changes))  # type: ignore[arg-type]
    with RawShard(trainer.shard.address) as raw:
        return raw.push(*push_stream(header, frame(0, content)))


BAD = {
    "no such encoding": (99, 0, b"", "INVALID_SPEC", "encoding: got 99"),
    "as it is, but another length": (0, MIXED.nbytes - 4, bytes(MIXED.nbytes - 4), "MALFORMED_MESSAGE", "encoded_bytes"),
    "halves without a length": (BFLOAT16, 0, bytes(HALVED), "MALFORMED_MESSAGE", f"takes {HALVED}"),
    "halves as long as what they stand for": (BFLOAT16, MIXED.nbytes, bytes(MIXED.nbytes), "MALFORMED_MESSAGE", f"takes {HALVED}"),
    "halves of more bytes than there are anywhere": (BFLOAT16, (1 << 64) - 1, b"", "MALFORMED_MESSAGE", f"takes {HALVED}"),
    "halves that end early": (BFLOAT16, HALVED, bytes(HALVED - 1), "TRUNCATED_STREAM", "received"),
    "halves that do not end": (BFLOAT16, HALVED, bytes(HALVED + 1), "FRAME_OUT_OF_ORDER", "beyond"),
    "int8 of another length": (INT8_BLOCKS, INT8 + 1, bytes(INT8 + 1), "MALFORMED_MESSAGE", f"takes {INT8}"),
    "int8 that ends early": (INT8_BLOCKS, INT8, bytes(INT8 - 1), "TRUNCATED_STREAM", "received"),
    "int8 that does not end": (INT8_BLOCKS, INT8, bytes(INT8 + 1), "FRAME_OUT_OF_ORDER", "beyond"),
    "int4 of int8's length": (INT4_BLOCKS, INT8, bytes(INT8), "MALFORMED_MESSAGE", f"takes {INT4}"),
    "int4 that ends early": (INT4_BLOCKS, INT4, bytes(INT4 - 1), "TRUNCATED_STREAM", "received"),
    "int4 that does not end": (INT4_BLOCKS, INT4, bytes(INT4 + 1), "FRAME_OUT_OF_ORDER", "beyond"),
    "top k without a length": (TOP_K, 0, top_k(1, [0]), "MALFORMED_MESSAGE", "in steps of 2"),
    "top k of more than all": (TOP_K, 1 << 40, b"", "MALFORMED_MESSAGE", "in steps of 2"),
    "top k of a broken length": (TOP_K, nbytes(1) + 1, top_k(1, [0], bytes(129)), "MALFORMED_MESSAGE", "in steps of 2"),
    "top k that end early": (TOP_K, nbytes(THREE), top_k(THREE, [1, 2, 3])[:100], "TRUNCATED_STREAM", "received"),
    "top k that are more than they say": (TOP_K, nbytes(THREE), top_k(1, [1, 2, 3]), "MALFORMED_MESSAGE", "do not fit"),
    "top k that are fewer than they say": (TOP_K, nbytes(THREE), top_k(CHUNK, [1, 2, 3]), "MALFORMED_MESSAGE", "do"),
    "top k of a number that overflows": (TOP_K, nbytes(THREE), top_k(2**63, [1, 2, 3]), "MALFORMED_MESSAGE", "at most once"),
    "top k out of range": (TOP_K, nbytes(THREE), top_k(THREE, [1, 2, SIZE]), "INDEX_OUT_OF_RANGE", f"has {SIZE} elements"),
    "top k far out of range": (TOP_K, nbytes(THREE), top_k(THREE, [1, 2, CHUNK - 1]), "INDEX_OUT_OF_RANGE", "elements"),
    "top k that go down": (TOP_K, nbytes(THREE), top_k(THREE, [1, 9, 2]), "MALFORMED_MESSAGE", "ascend"),
    "top k twice": (TOP_K, nbytes(THREE), top_k(THREE, [1, 2, 2]), "MALFORMED_MESSAGE", "ascend"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_encoded_gradients_get_a_reason_and_harm_nobody(trainer: Trainer, case: str) -> None:
    encoding, encoded_bytes, content, reason, text = BAD[case]
    outcome = push(trainer, encoding, encoded_bytes, content)
    assert (outcome.code, outcome.reason) != (grpc.StatusCode.OK, "")
    assert outcome.reason == reason and text in outcome.text
    status = trainer.shard.call(ShardStatusRequest())
    assert status.report.num_staged == 0 and status.step is not None
    assert trainer.train(status.step).step == status.step + 1


def test_an_arena_that_is_left_out_has_no_length(trainer: Trainer) -> None:
    everything = range(len(MIXED.slices))
    outcome = push(trainer, BFLOAT16, HALVED, bytes(HALVED), absent=everything)
    assert outcome.reason == "MALFORMED_MESSAGE" and "left out" in outcome.text


def test_bad_gradients_in_great_number_do_not_make_the_server_grow(trainer: Trainer) -> None:
    def push_all() -> int:
        for encoding, encoded_bytes, content, *_ in BAD.values():
            push(trainer, encoding, encoded_bytes, content)
        for count in range(1, 20):  # each of another length, and each right
            push(trainer, TOP_K, nbytes(count * CHUNK // SIZE), top_k(count * CHUNK // SIZE, [5] * count))
        return trainer.shard.call(ShardStatusRequest()).report.allocated_bytes

    first = push_all()
    # Which few lengths are kept depends on what came last.
    assert max(push_all() for _ in range(2)) <= first + 4 * nbytes(20)
