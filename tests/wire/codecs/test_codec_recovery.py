"""Values for checkpoints, recovery and training data: decoding gives the encoded value."""

import dataclasses
from typing import Any

import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage
from ps_protocol.model.data import DataMarks, DataPass, DataSpec
from ps_protocol.roles import chief
from ps_protocol.roles.checkpoint import ChiefRecord, ChosenPush
from ps_protocol.roles.chief import PushCommit, RegisterRequest
from ps_protocol.roles.contribution import Attachments, StepAttachments, UserState
from ps_protocol.v1 import chief_service_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.special import MAX_RANGES_A_CALL
from tests.support.chief.eras import era, fence
from tests.wire.codecs.examples import ADAM, COMMIT, PIECEWISE, POLICIES, RICH_MODEL, STATUS, WORKER

DATA = DataSpec(name="train", num_samples=100, range_size=32, num_epochs=0, shuffle_seed=0)
RECORD = ChiefRecord(
    model=RICH_MODEL,
    policy=POLICIES[2],
    settings_version=3,
    optimizers=((ADAM, dataclasses.replace(ADAM, learning_rate=PIECEWISE)),),
    num_rollbacks=2,
    last_rollback="ps 1 was restarted",
    rejects_nonfinite=True,
    epoch=2,
    step=7,
    chosen=(ChosenPush(push_id=COMMIT.push_id, step=6, weight=0.5, ranges=(3,), attached=Attachments(user_state='{"n":2}')),),
    attached=StepAttachments(user_states=(UserState(worker=0, json='{"n":1}'), UserState(worker=5, json="{}"))),
    earlier=fence(4, 3, life=2**63 + 7),
)
OF_A_LIFE = dataclasses.replace(WORKER, era=era(1, life=2**64 - 1))

VALUES: list[Any] = [
    RECORD,
    ChiefRecord(model=None, policy=POLICIES[0]),
    DATA,
    dataclasses.replace(DATA, shuffle_seed=None),
    DataPass(epoch=1, done=b"\x05"),
    DataMarks(data=DATA, epoch=1, position=1, passes=(DataPass(epoch=1, done=b"\x05"), DataPass(epoch=2, done=b"\x00"))),
    chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=2, host="h", pid=1, request_id=2, former=OF_A_LIFE),
    chief.Registration(
        participant=OF_A_LIFE,
        lease_s=1.0,
        shard_addresses=("a:1",),
        global_step=4,
        may_contribute=True,
        chief_incarnation=3,
        standby_addresses=("b:1",),
        shards_version=4,
        rejects_nonfinite=True,
    ),
    dataclasses.replace(COMMIT, ranges=(0, 7)),
    dataclasses.replace(
        STATUS,
        state=chief.ClusterState.RECOVERING,
        chief_incarnation=3,
        checkpoint=chief.CheckpointStatus(durability="step", tag="t", step=4, age_s=1.5, saving="u", failure="full"),
        num_rollbacks=2,
        last_rollback="because",
        min_replicas=2,
        data=chief.DataStatus(name="train", epoch=1, num_done=2, num_leased=3, num_ranges=4),
    ),
    dataclasses.replace(STATUS, checkpoint=chief.CheckpointStatus(durability="none")),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_value_comes_back_as_it_was(value: Any) -> None:
    message = codec.encode(value)
    assert codec.decode(type(value), type(message).FromString(message.SerializeToString())) == value


@pytest.mark.parametrize("record", [RECORD, ChiefRecord(model=None, policy=POLICIES[0])])
def test_packed_record_comes_back_as_it_was(record: ChiefRecord) -> None:
    assert codec.unpack_record(codec.RecordPacker().pack(record)) == record


def test_a_record_of_the_same_values_is_the_same_bytes() -> None:
    assert codec.RecordPacker().pack(RECORD) == codec.RecordPacker().pack(dataclasses.replace(RECORD))


def test_bytes_that_are_no_record_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        codec.unpack_record(b"\xff\xff\xff")


def test_impossible_data_specifications_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="range_size"):
        codec.decode(DataSpec, chief_service_pb2.DataSpec(name="train", num_samples=5))


def test_a_worker_that_says_it_has_too_many_ranges_is_refused() -> None:
    message = chief_service_pb2.RegisterWorkerRequest(kind=1, held=range(MAX_RANGES_A_CALL + 1))  # type: ignore[arg-type]
    with pytest.raises(LimitExceeded, match=r"^held_ranges: 10001 in one call, 10000 at most$"):
        codec.decode(RegisterRequest, message)


def test_a_commit_of_too_many_ranges_is_refused() -> None:
    message = codec.encode(dataclasses.replace(COMMIT, ranges=tuple(range(MAX_RANGES_A_CALL + 1))))
    with pytest.raises(LimitExceeded, match="ranges"):
        codec.decode(PushCommit, message)
