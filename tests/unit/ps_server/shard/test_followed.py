"""The copy that a shard keeps for those who follow it: how long it stays. The test is the clock."""

from dataclasses import replace

import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import StepNotReady
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_server.serving.local import InProcessShard
from ps_server.shard.followed import UNUSED_S
from tests.support.chief.eras import era
from tests.support.parameter_servers.shards import EPOCH, MIXED, Trainer

REQUEST = FetchRequest(era=era(EPOCH), layout_hash=MIXED.hash, encoding=FloatEncoding.BFLOAT16)


class Scene:
    """A shard with values, whose time passes when the test says so, and somebody who had them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.shard = InProcessShard(index=0, clock=lambda: self.now)
        self.trainer = Trainer(self.shard)
        self.trainer.create(1.0)
        self.own_bytes = self.allocated_bytes()
        self.fetch(held_step=None)

    def fetch(self, *, held_step: int | None) -> FetchReply:
        return self.shard.call(replace(REQUEST, held_step=held_step))

    def step(self, number: int) -> None:
        header = self.trainer.header(step=number)
        self.trainer.push(header, self.trainer.arena(0.0))
        self.trainer.apply(header.push_id, step=number)

    def allocated_bytes(self) -> int:
        return self.shard.call(ShardStatusRequest()).report.allocated_bytes


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_who_waits_for_a_step_that_takes_long_gets_a_patch(scene: Scene) -> None:
    for _ in range(3):
        scene.now += UNUSED_S - 1
        with pytest.raises(StepNotReady):
            scene.fetch(held_step=0)
    scene.now += UNUSED_S - 1
    scene.step(0)
    assert scene.fetch(held_step=0).is_patch


def test_what_nobody_asks_for_any_more_goes_back_also_where_no_step_is_made(scene: Scene) -> None:
    scene.now += UNUSED_S - 1
    assert scene.allocated_bytes() > scene.own_bytes
    scene.now += 1
    assert scene.allocated_bytes() == scene.own_bytes
