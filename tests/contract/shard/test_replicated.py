"""A shard that several processes hold, as a worker uses it: all get the same pushes, one is read, and the chief names them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ps_protocol.errors import Cancelled, LeaseExpired, NotInitialized, Unavailable
from ps_protocol.model.layout import Segments
from ps_protocol.roles.chief import Participant, ParticipantKind, Registration
from ps_protocol.roles.shard import AdoptRequest, PushHeader, PushReply, PushResult, ReadRequest, Shard, ShardStatusRequest
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.commanded_shard import ForwardingShard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, open_shard
from worker_client.shards.standbys import ReplicatedShard, ShardPlaces

FIRST, SECOND, THIRD = ADDRESSES = ("host-a:1", "host-b:1", "host-c:1")
STAGED, STALE, DUPLICATE = PushResult.STAGED, PushResult.STALE, PushResult.DUPLICATE


class Moody(ForwardingShard):
    """A replica that can be lost: it refuses, or hangs until its client is closed."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.failure: Exception | None = None
        self.on_push: Callable[[], None] = lambda: None
        self.hangs = False
        self.is_hanging, self.closed = threading.Event(), threading.Event()

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        self._be_moody()
        reply = self._forward.push_gradients(header, gradients, timeout_s=timeout_s)
        self.on_push()
        return reply

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        self._be_moody()
        return self._forward.read(request, into, timeout_s=timeout_s)

    def close(self) -> None:
        """The shard continues: it is the fixture's."""
        self.closed.set()

    def _be_moody(self) -> None:
        if self.hangs:
            self.is_hanging.set()
            assert self.closed.wait(20), "the call was not broken off"
            raise Cancelled("the client was closed")
        if self.failure is not None:
            raise self.failure


class Scene:
    """Three replicas, and a chief that names some of them."""

    def __init__(self, shards: list[Shard]) -> None:
        self.replicas = {address: Moody(shard) for address, shard in zip(ADDRESSES, shards, strict=True)}
        self.trainers = {address: Trainer(shard) for address, shard in zip(ADDRESSES, shards, strict=True)}
        for shard in shards:
            shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF)))
        self.opened: list[str] = []
        self.num_asked = 0
        participant = Participant(era=era(EPOCH), kind=ParticipantKind.WORKER, index=0, incarnation=1)
        self.said = self.known = Registration(
            participant=participant,
            lease_s=10.0,
            shard_addresses=(FIRST,),
            standby_addresses=(SECOND,),
            global_step=0,
            may_contribute=True,
            shards_version=1,
        )
        self.places = ShardPlaces(self.known, ask_again=self._ask)
        self.shard = ReplicatedShard(0, self.places, open_replica=self._open)
        # A worker's half of a shard is all that is used of it.
        self.trainer = Trainer(cast("Shard", self.shard))

    def name(self, first: str, standby: str = "") -> None:
        """The chief counts on these from now on."""
        self.said = replace(self.said, shard_addresses=(first,), standby_addresses=(standby,), shards_version=self.said.shards_version + 1)

    def push(self, worker: int = 0) -> PushResult:
        return self.trainer.push(self.trainer.header(worker, step=0), self.trainer.arena(1.0)).result

    def num_staged(self, address: str) -> int:
        return self.replicas[address].call(ShardStatusRequest()).report.num_staged

    def _ask(self, version: int) -> Registration:
        self.num_asked += 1
        self.known = self.said
        return self.known

    def _open(self, index: int, address: str) -> Shard:
        assert index == 0
        self.opened.append(address)
        return self.replicas[address]


@pytest.fixture(params=["in_process", "grpc_unix"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, socket_dir: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        shards = []
        for number in range(3):
            directory = socket_dir / str(number)
            directory.mkdir()
            shards.append(stack.enter_context(open_shard(request.param, socket_dir=directory)))
        made = Scene(shards)
        stack.callback(made.places.close)
        stack.callback(made.shard.close)
        for address in ADDRESSES:
            made.trainers[address].shard.create_variables(made.trainer.spec(), Segments([made.trainer.arena(2.0)]))
        yield made


def test_the_first_values_and_every_contribution_go_to_all_replicas(scene: Scene) -> None:
    scene.trainer.shard.create_variables(scene.trainer.spec(), Segments([scene.trainer.arena(2.0)]))
    assert scene.push() is STAGED
    assert [scene.num_staged(address) for address in ADDRESSES] == [1, 1, 0]
    assert scene.opened == [FIRST, SECOND]


def test_a_push_that_one_replica_already_has_counts_and_one_too_late_for_a_replica_does_not(scene: Scene) -> None:
    header = scene.trainer.header(0, step=0)
    arena = scene.trainer.arena(1.0)
    assert scene.trainers[FIRST].push(header, arena).result is STAGED
    assert scene.trainer.push(header, arena).result is STAGED
    assert scene.trainer.push(header, arena).result is DUPLICATE
    scene.trainers[SECOND].apply(header.push_id)
    assert scene.push(1) is STALE


def test_a_failure_at_a_replica_that_the_chief_still_names_is_an_error(scene: Scene) -> None:
    scene.replicas[SECOND].failure = Unavailable("cannot reach host-b:1")
    with pytest.raises(Unavailable):
        scene.push()
    assert scene.num_asked == 1
    assert scene.num_staged(FIRST) == 1, "sent again, it is not counted twice"


def test_a_push_continues_without_a_lost_standby_once_the_chief_drops_it(scene: Scene) -> None:
    scene.replicas[SECOND].failure = Unavailable("cannot reach host-b:1")
    scene.name(FIRST)
    assert scene.push() is DUPLICATE, "the first one has had it"
    assert scene.replicas[SECOND].closed.is_set()


def test_reads_come_from_the_standby_once_the_chief_has_made_it_the_primary(scene: Scene) -> None:
    assert scene.trainer.read(0)[0] == 0
    scene.replicas[FIRST].failure = Unavailable("cannot reach host-a:1")
    scene.name(SECOND)
    assert scene.trainer.read(0)[0] == 0
    assert scene.shard.address == SECOND


def test_a_restarted_replica_is_not_the_loss_of_the_shard(scene: Scene) -> None:
    """It is empty; whether the shard is lost, the chief knows."""
    scene.replicas[FIRST].failure = NotInitialized("the variables have no values yet")
    with pytest.raises(Unavailable):
        scene.trainer.read(0)
    scene.name(SECOND)
    assert scene.trainer.read(0)[0] == 0


def test_a_replica_that_does_not_know_the_worker_yet_is_not_the_end_of_its_lease(scene: Scene) -> None:
    scene.replicas[FIRST].failure = LeaseExpired("incarnation 1 of worker 0 is not registered, or not to you")
    with pytest.raises(Unavailable, match="not registered"):  # as long as the chief counts on it
        scene.push()
    scene.name(SECOND)
    assert scene.push() in (STAGED, DUPLICATE)  # it had got it before


def test_a_replica_that_lacks_the_step_that_another_one_has_made_is_left_behind_or_about_to_make_it(scene: Scene) -> None:
    header = scene.trainer.header(0, step=0)
    assert scene.trainers[FIRST].push(header, scene.trainer.arena(1.0)).result is STAGED
    scene.trainers[FIRST].apply(header.push_id)
    later = scene.trainer.header(0, step=1)
    with pytest.raises(Unavailable, match="ahead"):
        scene.trainer.push(later, scene.trainer.arena(1.0))
    assert scene.num_asked == 1
    scene.name(FIRST)
    assert scene.places.hear(scene.places.version, is_urgent=True)
    assert scene.trainer.push(later, scene.trainer.arena(1.0)).result is DUPLICATE, "the first one has had it"


def test_a_call_that_hangs_at_a_replica_ends_when_the_chief_names_others(scene: Scene) -> None:
    scene.replicas[FIRST].hangs = True
    scene.name(SECOND)
    assert scene.push() is DUPLICATE, "the other one has had it meanwhile"
    assert scene.replicas[FIRST].is_hanging.is_set()
    assert scene.replicas[FIRST].closed.is_set()


def test_a_replica_that_comes_back_while_a_contribution_is_sent_gets_it_too(scene: Scene) -> None:
    def come_back() -> None:
        scene.replicas[FIRST].on_push = lambda: None
        scene.name(FIRST, THIRD)
        scene.places.hear(scene.places.version, is_urgent=True)

    scene.replicas[FIRST].on_push = come_back
    assert scene.push() is STAGED
    assert [scene.num_staged(address) for address in ADDRESSES] == [1, 1, 1]


def test_the_chief_is_asked_once_about_one_change(scene: Scene) -> None:
    version = scene.places.version
    scene.name(SECOND)
    assert scene.places.hear(version)
    assert scene.places.hear(version)
    assert scene.num_asked == 1
