"""Encoded parts of a contribution, and the carried-over error when the contribution does not count."""

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, DataType, VariableSpec
from worker_client.model.gradients import ShardPart, ShardParts, Staging
from worker_client.model.memory import ModelMemory
from worker_client.model.wire_format import WireFormat, top_k

MODEL = ModelSpec(
    variables=(
        VariableSpec(name="a", data_type=DataType.FLOAT32, shape=(300,)),
        VariableSpec(name="b", data_type=DataType.FLOAT32, shape=(200,)),
        VariableSpec(name="d", data_type=DataType.FLOAT64, shape=(50,)),
    ),
    optimizer=OptimizerSpec(name="sgd", learning_rate=constant(1.0)),
    placement=PlacementPolicy(pins=(("a", 0), ("b", 0), ("d", 1))),
)
LAYOUTS = layouts(place(MODEL, num_shards=2), num_shards=2)


@pytest.fixture
def staging() -> Staging:
    return Staging(MODEL, ModelMemory(MODEL, layouts=LAYOUTS, is_writable=True))


def gradients(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal(300).astype(np.float32), "b": rng.standard_normal(200).astype(np.float32), "d": np.ones(50)}


def content(part: ShardPart) -> bytes:
    return b"".join(bytes(data) for _, data in part.segments.chunks(1 << 20))


def test_only_float32_is_encoded_and_only_if_it_travels(staging: Staging) -> None:
    staged = staging.stage(gradients(0), step=0)
    halved, whole = ShardParts(LAYOUTS, wire=WireFormat(gradients="bfloat16")).parts(staged)
    nbytes = encoded_nbytes(LAYOUTS[0], FloatEncoding.BFLOAT16)
    assert (halved.encoding, halved.encoded_bytes, halved.segments.nbytes) == (FloatEncoding.BFLOAT16, nbytes, nbytes)
    assert (whole.encoding, whole.encoded_bytes, whole.segments.nbytes) == (FloatEncoding.AS_IS, 0, LAYOUTS[1].nbytes)
    here = ShardParts(LAYOUTS, wire=WireFormat(gradients="bfloat16"), travels=lambda index: False).parts(staged)
    lent = staging.memory.on([np.zeros(layout.nbytes, np.uint8) for layout in LAYOUTS])
    shared = ShardParts(LAYOUTS, wire=WireFormat(gradients="bfloat16")).parts(Staging(MODEL, lent).stage(gradients(0), step=0))
    assert {part.encoding for part in (*here, *shared)} == {FloatEncoding.AS_IS}


def test_an_arena_that_is_left_out_is_not_encoded(staging: Staging) -> None:
    part = ShardParts(LAYOUTS, wire=WireFormat(gradients="int8")).parts(staging.stage({**gradients(0), "a": None, "b": None}, step=0))[0]
    assert (part.encoding, part.encoded_bytes, part.segments.nbytes, part.absent) == (FloatEncoding.AS_IS, 0, 0, (0, 1))


@pytest.mark.parametrize("wire", [WireFormat(gradients="int8"), WireFormat(gradients=top_k(0.1))])
def test_a_refused_contribution_leaves_the_carried_over_error_unchanged(staging: Staging, wire: WireFormat) -> None:
    one, other = ShardParts(LAYOUTS, wire=wire), ShardParts(LAYOUTS, wire=wire)
    for shard_parts in (one, other):
        shard_parts.parts(staging.stage(gradients(0), step=0))
    other.parts(staging.stage(gradients(7), step=1))
    expected = content(one.parts(staging.stage(gradients(1), step=1))[0])
    assert content(other.parts(staging.stage(gradients(1), step=1), is_last_counted=False)[0]) == expected


def test_the_carried_over_error_waits_while_a_shard_has_no_gradients(staging: Staging) -> None:
    wire = WireFormat(gradients=top_k(0.1))
    one, other = ShardParts(LAYOUTS, wire=wire), ShardParts(LAYOUTS, wire=wire)
    for shard_parts in (one, other):
        shard_parts.parts(staging.stage(gradients(0), step=0))
    nothing = {**gradients(0), "a": None, "b": None}
    other.parts(staging.stage(nothing, step=1))
    # That this one did not count says nothing of the one before, which had been sent.
    found = content(other.parts(staging.stage(gradients(1), step=2), is_last_counted=False)[0])
    assert found == content(one.parts(staging.stage(gradients(1), step=1))[0])
