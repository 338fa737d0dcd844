"""Wrong requests for records, saves and restorations: a parameter server refuses them with a reason and keeps serving."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ps_protocol.roles.shard import RestoreRequest, SaveRequest, ShardSettings, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import RawShard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, keeping, open_server, telling

SHA256 = "0" * 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[RawShard, Trainer]]:
    """A parameter server with a model, called wrongly by the one and rightly by the other."""
    config = ParameterServerConfig(index=0, checkpoint_dir=str(tmp_path / "inside" / "checkpoints"))
    with (
        open_server(config) as running,
        contextlib.closing(CommandedShard(running.address, index=0)) as shard,
        RawShard(running.address) as raw,
    ):
        trainer = Trainer(shard)
        trainer.create()
        yield raw, trainer


def _save(**changes: object) -> pb.SaveShardRequest:
    save = SaveRequest(fence=fence(EPOCH, CHIEF), step=0, tag="t", max_wait_s=5.0)
    request: pb.SaveShardRequest = codec.encode(save)
    request.MergeFrom(pb.SaveShardRequest(**changes))  # type: ignore[arg-type]
    return request


def _restore(change: Callable[[pb.RestoreShardRequest], object] = lambda _: None) -> pb.RestoreShardRequest:
    settings = ShardSettings(fence=fence(EPOCH, CHIEF), version=0)
    spec = Trainer(None).spec()  # type: ignore[arg-type]  # its shard is not called
    restore = RestoreRequest(
        fence=fence(EPOCH, CHIEF), spec=spec, tag="never-saved", manifest_sha256=SHA256, settings=settings, max_wait_s=5.0
    )
    request: pb.RestoreShardRequest = codec.encode(restore)
    change(request)
    return request


def _of_epoch_1(request: pb.RestoreShardRequest) -> None:
    request.spec.epoch = request.fence.era.epoch = 1


WRONG: list[tuple[str, Message, str, str]] = [
    ("SaveShard", _save(tag="../outside"), "INVALID_SPEC", "checkpoint tag '../outside'"),
    ("SaveShard", _save(tag="t\0t"), "INVALID_SPEC", "checkpoint tag"),
    ("SaveShard", _save(step=-1), "INVALID_SPEC", "step: got -1"),
    ("SaveShard", _save(step=5), "STEP_MISMATCH", "step 5 cannot be saved, it is at step 0"),
    ("SaveShard", _save(fence=codec.encode(fence(EPOCH + 1, CHIEF))), "EPOCH_MISMATCH", "you have epoch"),
    ("SaveShard", pb.SaveShardRequest(), "INVALID_SPEC", "checkpoint tag ''"),
    ("RestoreShard", pb.RestoreShardRequest(), "MALFORMED_MESSAGE", "spec is missing"),
    ("RestoreShard", _restore(lambda request: request.ClearField("settings")), "MALFORMED_MESSAGE", "settings is missing"),
    ("RestoreShard", _restore(lambda request: setattr(request, "tag", "..")), "INVALID_SPEC", "checkpoint tag '..'"),
    ("RestoreShard", _restore(lambda request: setattr(request, "manifest_sha256", "x")), "MALFORMED_MESSAGE", "want 64 hexadecimal digits"),
    ("RestoreShard", _restore(lambda request: setattr(request.spec, "shard", 7)), "WRONG_ROLE", "this is ps 0, not ps 7"),
    ("RestoreShard", _restore(lambda request: setattr(request.spec, "epoch", 1)), "EPOCH_MISMATCH", "you have epoch 1"),
    ("RestoreShard", _restore(_of_epoch_1), "EPOCH_MISMATCH", "you have epoch 1"),
    ("RestoreShard", _restore(), "CHECKPOINT_NOT_FOUND", "never-saved"),
    (
        "KeepRecord",
        codec.encode(telling(ShardSettings(fence=fence(EPOCH, 1), version=1))),
        "SUPERSEDED",
        "chief incarnation 2 has adopted it",
    ),
    (
        "KeepRecord",
        codec.encode(keeping(1, bytes(13 << 20))),
        "LIMIT_EXCEEDED",
        "at most",
    ),
]


@pytest.mark.parametrize(("method", "request_", "reason", "text"), WRONG)
def test_wrong_request_is_refused_and_changes_nothing(
    server: tuple[RawShard, Trainer], tmp_path: Path, method: str, request_: Message, reason: str, text: str
) -> None:
    raw, trainer = server
    before = trainer.shard.call(ShardStatusRequest()).report.allocated_bytes
    found = raw.call(method, request_.SerializeToString())
    assert (found.reason, text in found.text) == (reason, True), found
    assert trainer.train(0).step == 1
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["inside", "inside/checkpoints"]
    # The contribution of that step had a buffer, which is kept.
    assert trainer.shard.call(ShardStatusRequest()).report.allocated_bytes - before <= trainer.layout.nbytes


def test_the_same_save_again_is_answered_as_the_first(server: tuple[RawShard, Trainer]) -> None:
    raw, _ = server
    for _ in range(2):
        (answer,) = raw.call("SaveShard", _save().SerializeToString()).messages
        assert pb.SaveShardResponse.FromString(answer).state == pb.SAVE_STATE_DONE


def test_wait_beyond_all_measure_is_no_longer_than_any(server: tuple[RawShard, Trainer]) -> None:
    raw, _ = server
    found = raw.call("SaveShard", _save(max_wait=Duration(seconds=1 << 40)).SerializeToString())
    (answer,) = found.messages
    assert pb.SaveShardResponse.FromString(answer).state == pb.SAVE_STATE_DONE
