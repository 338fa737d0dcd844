"""The numbers of a shard in the header of its file: the same bits come back, and what is no such text is refused."""

import math

import pytest

from ps_protocol.errors import DataLoss
from ps_protocol.roles.shard import AppliedPush, HiddenState, MetricCell, OptimizerPowers, WorkerPushes
from ps_server.shard.checkpoints import decode_hidden_state, encode_hidden_state

STATE = HiddenState(
    step=7,
    powers=(OptimizerPowers(key="", powers=(0.9**7, 5e-324)), OptimizerPowers(key="sgd", powers=())),
    phase=2,
    phase_step=5,
    average_product=0.0,
    num_nonfinite=3,
    metrics=(MetricCell(name="loss", worker=1, total=math.inf, weight=0.1, count=2, last=-math.inf),),
    pushes=(WorkerPushes(worker=1, incarnation=2**64 - 1, applied=(AppliedPush(sequence=2**63, step=6),)),),
)


def test_the_same_numbers_come_back() -> None:
    assert decode_hidden_state(encode_hidden_state(STATE), where="f") == STATE


@pytest.mark.parametrize("metadata", [{}, *({"shard": text} for text in ("%", "A", "é", '{"step": 7}', "////", "CAcS"))])
def test_another_text_is_refused_and_its_file_named(metadata: dict[str, str]) -> None:
    with pytest.raises(DataLoss, match="f: the state of the shard in its header cannot be read"):
        decode_hidden_state(metadata, where="f")
