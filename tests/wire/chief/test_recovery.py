"""A cluster of real servers in this process: steps that stop half-way, rollbacks, saves on demand, and a second chief."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from chief.options import CheckpointConfig
from ps_protocol.checkpoint.catalog import list_checkpoints
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.errors import EpochMismatch, PsError, TrainingFailed, Unavailable
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, ClusterStatus, PushOutcome, SaveCheckpointRequest, TokenResult
from ps_protocol.roles.shard import ApplyRequest, ShardStatusRequest
from ps_protocol.rpc.chief import GrpcChief
from ps_server.model.shard_model import ShardModel
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import RunningChief, Worker, parameter_server
from tests.support.waiting import wait_until

_OPEN = (ClusterState.WAITING_FOR_MODEL, ClusterState.TRAINING)
EACH_STEP = CheckpointConfig(durability=Durability.STEP)


class Servers:
    """Parameter servers, each of which may be killed and started again where it was."""

    def __init__(self, num_ps: int, place: Path, stack: contextlib.ExitStack) -> None:
        self._place, self._stack = str(place), stack
        self._lives = [contextlib.ExitStack() for _ in range(num_ps)]
        self.servers = [self._start(index, "127.0.0.1:0") for index in range(num_ps)]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def kill(self, index: int) -> None:
        self._lives[index].close()

    def restart(self, index: int) -> None:
        self.kill(index)
        self.servers[index] = self._start(index, self.servers[index].address)

    def _start(self, index: int, address: str) -> Any:
        self._lives[index] = contextlib.ExitStack()
        self._stack.push(self._lives[index].__exit__)
        return self._lives[index].enter_context(parameter_server(index, address=address, checkpoint_dir=self._place))


class Scene:
    """A cluster, and one worker that pushes gradients of 1."""

    def __init__(self, place: Path, stack: contextlib.ExitStack, *, num_ps: int = 2, **options: Any) -> None:
        self.place, self._stack = place, stack
        self.servers = Servers(num_ps, place, stack)
        self.chief, self.client = self.start_chief(**options)
        # A worker that registers before the chief has found out that it follows another one must register again.
        wait_until(lambda: self.status().state in _OPEN, timeout_s=20, what="the chief has the servers")
        self.worker = self.join()

    def start_chief(self, **options: Any) -> tuple[RunningChief, GrpcChief]:
        options = {"checkpoint_dir": str(self.place), "checkpoints": EACH_STEP, **options}
        chief = self._stack.enter_context(RunningChief(*self.servers.addresses, **options))
        client = chief.client()
        self._stack.callback(client.close)
        return chief, client

    def join(self, **fields: Any) -> Worker:
        worker = self._stack.enter_context(Worker(self.client, **fields))
        worker.join_model()
        return worker

    def come_back(self) -> None:
        """The worker registers again as who it was, as sessions do when they are told to."""
        former, sequence = self.worker.participant, self.worker._sequence
        wait_until(lambda: self._is_reachable(), timeout_s=20, what="the chief answers")
        self.worker = self.join(index=former.index, former=former)
        self.worker._sequence = sequence
        assert (self.worker.participant.index, self.worker.participant.incarnation) == (former.index, former.incarnation)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            assert self.worker.wait(self.worker.push(value=1.0)).result is TokenResult.TOKEN

    def values(self) -> list[float]:
        return [number for values in self.worker.read().values() for number in values]

    def status(self) -> ClusterStatus:
        return self.client.status()

    def tags(self) -> list[str]:
        return [found.checkpoint.tag for found in list_checkpoints(LocalStorage(self.place))[0]]

    def _is_reachable(self) -> bool:
        try:
            # While a checkpoint is looked for, calls that wait are refused once more, and this client does not retry.
            return self.client.status().state not in (ClusterState.CONNECTING, ClusterState.RECOVERING)
        except Unavailable:
            return False


@pytest.fixture
def open_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: Scene(tmp_path, stack, **options)


def test_a_step_that_a_killed_chief_left_half_applied_is_applied_once_everywhere(open_scene: Callable[..., Scene]) -> None:
    scene = open_scene(checkpoint_dir="", checkpoints=None)
    scene.train(2)
    commit = scene.worker.push(value=1.0)
    scene.chief.kill()
    # What the chief did last: one server has the step, the other one was never asked.
    scene.worker.shards[0].call(ApplyRequest(fence=fence(1, 1), step=2, contributors=(commit.push_id,)))
    scene.chief, scene.client = scene.start_chief(address=scene.chief.address, checkpoint_dir="", checkpoints=None, is_takeover=True)
    scene.come_back()
    assert scene.status().global_step == 3
    result = scene.worker.commit(commit)
    assert PushOutcome.ACCEPTED in (result.outcome, result.first_outcome)
    assert scene.values() == pytest.approx([-0.3] * 6)
    assert [shard.call(ShardStatusRequest()).step for shard in scene.worker.shards] == [3, 3]


@contextlib.contextmanager
def half_applied() -> Iterator[None]:
    """Any step fails half-way within the block."""
    with mock.patch.object(ShardModel, "run_apply", side_effect=MemoryError):
        yield


def test_a_server_that_fails_half_way_through_a_step_is_brought_back_from_the_checkpoint(open_scene: Callable[..., Scene]) -> None:
    scene = open_scene()
    scene.train(2)
    before = scene.values()
    with half_applied():
        commit = scene.worker.push(value=1.0)
        with pytest.raises(EpochMismatch):
            scene.worker.wait(commit)
    scene.come_back()
    assert (scene.worker.local_step, scene.values()) == (2, before)
    assert "failed half-way through step 2" in scene.status().last_rollback
    scene.train(1)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_chief_that_finds_a_server_half_way_through_a_step_goes_back_or_says_why_not(
    open_scene: Callable[..., Scene], is_saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {} if is_saved else {"checkpoint_dir": "", "checkpoints": None}
    scene = open_scene(**options)
    scene.train(2)
    commit = scene.worker.push(value=1.0)
    scene.chief.kill()
    with half_applied(), pytest.raises(PsError):
        scene.worker.shards[0].call(ApplyRequest(fence=fence(1, 1), step=2, contributors=(commit.push_id,)))
    scene.chief, scene.client = scene.start_chief(address=scene.chief.address, is_takeover=True, **options)
    if is_saved:
        wait_until(lambda: scene._is_reachable() and scene.status().epoch == 2, timeout_s=20, what="the next chief goes back")
        scene.come_back()
        assert scene.worker.local_step == 2
    else:
        assert scene.chief.ended() == 1
        assert re.search(r"ps 0 at \S+ has lost the variables, and there is no whole checkpoint to go back to", caplog.text)


def test_a_chief_does_not_take_servers_from_one_that_lives(open_scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chief.shards.work._GIVE_UP_S", 0.5)
    scene = open_scene()
    second, _ = scene.start_chief()
    outcome = second.ended()
    assert isinstance(outcome, TrainingFailed)
    assert f"another chief at {scene.chief.address} (incarnation 1)" in outcome.message
    scene.train(1)


def test_a_checkpoint_is_saved_on_demand(open_scene: Callable[..., Scene]) -> None:
    scene = open_scene(checkpoints=CheckpointConfig(durability=Durability.NONE))
    scene.train(2)
    saved = scene.client.call(SaveCheckpointRequest(request_id=5, max_wait_s=20.0))
    assert (saved.tag, saved.step) == ("step-000000002", 2)
    assert scene.client.call(SaveCheckpointRequest(request_id=5, max_wait_s=20.0)) == saved
    assert scene.tags() == [saved.tag]


def test_contributions_of_a_rolled_back_worker_are_in_no_step(open_scene: Callable[..., Scene]) -> None:
    scene = open_scene()
    scene.train(2)
    before = scene.values()
    lost = scene.worker.push(value=1.0)
    scene.servers.restart(0)
    wait_until(lambda: scene.status().epoch == 2, timeout_s=20, what="the cluster is brought back")
    scene.come_back()
    assert scene.values() == before
    request = ApplyRequest(fence=fence(1, 1), step=2, contributors=(lost.push_id,))
    with pytest.raises(PsError):
        scene.worker.shards[0].call(request)
    assert scene.values() == before
