"""Two chiefs of one number: the first to arrive keeps a server while it is alive. After that the other one may have it, if it is empty."""

import pytest

from ps_protocol.errors import NotInitialized, Superseded
from ps_protocol.model.layout import Segments
from ps_protocol.roles.fence import KEY_BYTES, LIVING_CHIEF_S
from ps_protocol.roles.shard import AdoptRequest, KeepRecordRequest, ReplicaState, RestoreRequest, ShardSettings, ShardStatusRequest
from ps_server.serving.local import InProcessShard
from tests.support.chief.eras import LIFE, fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer

MINE, OTHER = "chief:1", "chief:2"
LEFT_OUT = ReplicaState(version=1, forgets=True)


class Scene:
    """A server that the other chief has adopted; time passes when the test says so."""

    def __init__(self, *, life: int) -> None:
        self.now = 100.0
        self.shard = InProcessShard(index=0, clock=lambda: self.now)
        self.trainer = Trainer(self.shard)
        self.rival = fence(EPOCH, CHIEF, life=life)
        self.shard.call(
            AdoptRequest(fence=self.rival, chief_address=OTHER, session_keys=(b"o" * KEY_BYTES,), replica=ReplicaState(version=50))
        )

    def adopt(self, *, epoch: int = EPOCH, replica: ReplicaState = LEFT_OUT) -> None:
        """This chief, of the same number, wants the server."""
        self.shard.call(AdoptRequest(fence=fence(epoch, CHIEF), chief_address=MINE, session_keys=(b"m" * KEY_BYTES,), replica=replica))

    def assert_refused(self, *, epoch: int = EPOCH, replica: ReplicaState = LEFT_OUT) -> None:
        with pytest.raises(Superseded, match=r"another life|the chief at chief:2"):
            self.adopt(epoch=epoch, replica=replica)
        assert self.shard.call(ShardStatusRequest()).fence == self.rival


@pytest.fixture(params=[LIFE, LIFE + 1], ids=["same life", "other life"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(life=request.param)


def test_a_chief_that_is_heard_keeps_an_empty_server(scene: Scene) -> None:
    scene.now += LIVING_CHIEF_S - 0.1
    scene.assert_refused()
    scene.shard.call(ShardStatusRequest(fence=scene.rival))
    scene.now += LIVING_CHIEF_S - 0.1
    scene.assert_refused()


@pytest.mark.shows("F38")
def test_an_empty_server_of_a_silent_chief_accepts_a_rival_chief(scene: Scene) -> None:
    settings = ShardSettings(fence=scene.rival, version=1)
    scene.shard.call(KeepRecordRequest(fence=scene.rival, version=9, settings=settings, record=b"of the other one"))
    scene.now += LIVING_CHIEF_S
    scene.adopt()
    status = scene.shard.call(ShardStatusRequest())
    assert (status.fence, status.chief_address, status.chief_heard_ago_s) == (fence(EPOCH, CHIEF), MINE, 0.0)
    adoption = scene.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF), chief_address=MINE))
    assert (adoption.record, adoption.session_keys) == (b"", (b"m" * KEY_BYTES,)), "nothing of the other chief's is left"


def test_the_replica_state_of_a_rival_chief_is_discarded(scene: Scene) -> None:
    """It had counted further: the number of what this one says would be old."""
    scene.now += LIVING_CHIEF_S
    scene.adopt(replica=ReplicaState(version=1, is_alone=True))
    assert scene.shard.call(ShardStatusRequest()).is_alone


def test_a_server_with_a_model_accepts_a_rival_chief_only_in_the_same_life_and_if_it_is_not_counted_on() -> None:
    same, other = Scene(life=LIFE), Scene(life=LIFE + 1)
    for scene in (same, other):
        assert scene.shard.create_variables(scene.trainer.spec(), Segments([scene.trainer.arena()]))
        scene.now += 10 * LIVING_CHIEF_S
        scene.assert_refused(replica=ReplicaState(version=1))
    other.assert_refused()
    same.adopt()
    assert same.shard.call(ShardStatusRequest()).step is None
    with pytest.raises(NotInitialized):
        same.trainer.read(0)


def test_a_server_that_was_rolled_back_accepts_no_rival_chief_of_an_earlier_epoch() -> None:
    scene = Scene(life=LIFE)
    scene.rival = fence(EPOCH + 1, CHIEF)
    scene.shard.call(AdoptRequest(fence=scene.rival, chief_address=OTHER))
    scene.now += 10 * LIVING_CHIEF_S
    scene.assert_refused()
    scene.adopt(epoch=EPOCH + 1)


def test_a_chief_that_only_restores_takes_no_server() -> None:
    """What it says may be late, and it may be gone."""
    scene = Scene(life=LIFE + 1)
    scene.now += 10 * LIVING_CHIEF_S
    late = fence(EPOCH + 1, CHIEF)
    settings = ShardSettings(fence=late, version=0)
    request = RestoreRequest(fence=late, spec=scene.trainer.spec(epoch=EPOCH + 1), tag="step-1", manifest_sha256="", settings=settings)
    with pytest.raises(Superseded):
        scene.shard.call(request)
    assert scene.shard.call(ShardStatusRequest()).fence == scene.rival
