"""Encoded gradients at every `Shard`."""

from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.errors import NonFiniteGradient
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.spec import ClipSpec
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.shard import PrepareRequest, PushHeader, PushResult, Shard, ShardStatusRequest, SparsePart
from tests.support.parameter_servers.shards import EACH_WAY, Trainer, layout_of, shard_over, table, variable, views
from tests.unit.ps_protocol.encodings.test_gradient_encoder import decoded

shard = shard_over(EACH_WAY)

LOSSY = tuple(encoding for encoding in FloatEncoding if encoding is not FloatEncoding.AS_IS)
# Padding, a range that travels as it is, one block of int8 and a part, and a table.
WIDE = layout_of(variable("w", (40, 7)), variable("b", (3,)), variable("d", (9,), DataType.FLOAT64), table("emb", (6, 2)))


@pytest.fixture
def wide(shard: Shard) -> Trainer:
    """Three dense variables and a table, all 0."""
    trainer = Trainer(shard, WIDE)
    trainer.create()
    return trainer


class Encoded:
    """Gradients of a layout, as they travel and as they arrive."""

    def __init__(self, layout: Layout, encoding: FloatEncoding, gradients: Array, *, absent: tuple[int, ...] = ()) -> None:
        self.encoding, self.absent = encoding, absent
        self.bytes = GradientEncoder(layout, encoding, fraction=0.1).encode(Segments([gradients]), absent=absent)
        self.arrived = decoded(layout, encoding, self.bytes)

    def header(self, trainer: Trainer, worker: int = 0, *, sparse: tuple[SparsePart, ...] = ()) -> PushHeader:
        header = trainer.header(worker, absent=self.absent, sparse=sparse)
        return replace(header, encoding=self.encoding, encoded_bytes=self.bytes.nbytes)


def as_float32(layout: Layout, memory: Array, name: str) -> Array:
    return views(layout, memory)[name]


@pytest.mark.parametrize("encoding", LOSSY)
def test_mean_is_that_of_what_arrives_whatever_each_worker_sends(wide: Trainer, encoding: FloatEncoding) -> None:
    one, plain, other = Encoded(WIDE, encoding, wide.random(1)), wide.random(2), Encoded(WIDE, FloatEncoding.BFLOAT16, wide.random(3))
    headers = one.header(wide), wide.header(1), other.header(wide, 2)
    for header, memory in zip(headers, (one.bytes, plain, other.bytes), strict=True):
        assert wide.push(header, memory).result is PushResult.STAGED
    wide.apply(*(header.push_id for header in headers))
    found = wide.read()[1]
    for name in ("w", "b", "d"):
        terms = [as_float32(WIDE, memory, name) for memory in (one.arrived, plain, other.arrived)]
        mean = (terms[0] + terms[1] + terms[2]) / terms[0].dtype.type(3)
        np.testing.assert_array_equal(as_float32(WIDE, found, name), -(terms[0].dtype.type(0.5) * mean))


@pytest.mark.parametrize("encoding", LOSSY)
def test_one_contribution_alone_is_decoded_too_and_a_repeated_one_counts_once(wide: Trainer, encoding: FloatEncoding) -> None:
    one = Encoded(WIDE, encoding, wide.random(1))
    header = one.header(wide)
    assert [wide.push(header, one.bytes).result for _ in range(2)] == [PushResult.STAGED, PushResult.DUPLICATE]
    wide.apply(header.push_id)
    np.testing.assert_array_equal(as_float32(WIDE, wide.read()[1], "w"), -0.5 * as_float32(WIDE, one.arrived, "w"))


@pytest.mark.parametrize("encoding", LOSSY)
def test_rows_follow_as_they_are_and_absent_gradients_do_not_count(wide: Trainer, encoding: FloatEncoding) -> None:
    one = Encoded(WIDE, encoding, wide.random(1), absent=(0,))
    header = one.header(wide, sparse=(SparsePart(table=0, num_rows=2),))
    rows = [np.array([1, 4], "<i8").view(np.uint8), np.full((2, 2), 2.0, np.float32).reshape(-1).view(np.uint8)]
    wide.shard.push_gradients(header, Segments([one.bytes, *rows]))
    wide.apply(header.push_id)
    found = wide.read()[1]
    assert not as_float32(WIDE, found, "w").any()
    np.testing.assert_array_equal(as_float32(WIDE, found, "b"), -0.5 * as_float32(WIDE, one.arrived, "b"))
    np.testing.assert_array_equal(wide.rows([1, 2])[1], [[-1, -1], [0, 0]])


@pytest.mark.parametrize("encoding", LOSSY)
def test_rows_alone_need_no_arena_whatever_the_encoding(wide: Trainer, encoding: FloatEncoding) -> None:
    header, _ = wide.push_rows(rows={0: ([1], 2.0)})
    again = replace(wide.header(1, sparse=header.sparse, absent=header.absent), encoding=encoding)
    rows = [np.array([1], "<i8").view(np.uint8), np.full((1, 2), 4.0, np.float32).reshape(-1).view(np.uint8)]
    wide.shard.push_gradients(again, Segments(rows))
    wide.apply(header.push_id, again.push_id)
    np.testing.assert_array_equal(wide.rows([1])[1], [[-1.5, -1.5]])


@pytest.mark.parametrize("encoding", LOSSY)
def test_norms_are_computed_from_the_decoded_gradients(shard: Shard, encoding: FloatEncoding) -> None:
    trainer = Trainer(shard, WIDE, clip=ClipSpec(norm=1.0))
    trainer.create()
    one = Encoded(WIDE, encoding, trainer.random(1))
    header = one.header(trainer)
    trainer.push(header, one.bytes)
    sums = shard.call(PrepareRequest(of=trainer.request(header.push_id)))
    for position, name in enumerate(("w", "b", "d")):
        expected = np.square(as_float32(WIDE, one.arrived, name).astype(np.float64)).sum()
        np.testing.assert_allclose(sums[position], expected, rtol=1e-12)


@pytest.mark.parametrize("encoding", LOSSY)
def test_encoded_gradients_are_applied_on_arrival(wide: Trainer, encoding: FloatEncoding) -> None:
    wide.configure(1, applies_on_arrival=True)
    one = Encoded(WIDE, encoding, wide.random(1))
    assert wide.push(one.header(wide), one.bytes).result is PushResult.APPLIED
    np.testing.assert_array_equal(as_float32(WIDE, wide.read()[1], "w"), -0.5 * as_float32(WIDE, one.arrived, "w"))


@pytest.mark.parametrize("encoding", LOSSY)
def test_garbage_in_the_padding_changes_no_variable(shard: Shard, encoding: FloatEncoding) -> None:
    trainer = Trainer(shard, WIDE, clip=ClipSpec(norm=1.0))
    trainer.create()
    gradients = trainer.random(1)
    one = Encoded(WIDE, encoding, gradients)
    spoilt = gradients.copy()
    spoilt[WIDE.offsets[1] + 12 : WIDE.offsets[1] + 64].view(np.float32)[:] = 1000.0
    other = Encoded(WIDE, encoding, spoilt)
    header = other.header(trainer)
    trainer.push(header, other.bytes)
    sums = shard.call(PrepareRequest(of=trainer.request(header.push_id)))
    assert sums[1] <= np.square(as_float32(WIDE, gradients, "b")).sum() * 1.5
    assert one.bytes.nbytes == other.bytes.nbytes


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), 3.4e38, -1.0, 0.0, 1e-45])
@pytest.mark.parametrize("encoding", [FloatEncoding.INT8_BLOCKS, FloatEncoding.INT4_BLOCKS])
def test_a_scale_of_integers_that_no_client_sends_harms_its_own_block_only(wide: Trainer, encoding: FloatEncoding, scale: float) -> None:
    one = Encoded(WIDE, encoding, wide.random(1))
    one.bytes[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
    header = one.header(wide)
    wide.push(header, one.bytes)
    wide.apply(header.push_id)
    values = as_float32(WIDE, wide.read()[1], "w").reshape(-1)
    assert np.isfinite(values[256:]).all()
    is_number = bool(np.isfinite(values).all())
    wide.configure(1, rejects_nonfinite=True)
    again = replace(one.header(wide, 1), step=1)
    if is_number:
        assert wide.push(again, one.bytes).result is PushResult.STAGED
    else:
        with pytest.raises(NonFiniteGradient, match="'w' has"):
            wide.push(again, one.bytes)
        assert wide.shard.call(ShardStatusRequest()).report.num_staged == 0
    assert wide.train(1, worker=2).step == 2
