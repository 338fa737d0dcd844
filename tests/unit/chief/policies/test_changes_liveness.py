"""Workers as they are, shards that learn of changes one by one, and policies that change: no worker hangs, no contribution is lost."""

import random

import pytest

from chief.core import messages as ev
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode
from ps_protocol.roles.chief import ClusterState, PushCommit, SettingsReply, TokenReply, TokenResult
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushResult
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.examples import examples

NUM_WORKERS, NUM_SHARDS = 3, 2
POLICIES = (
    PolicySpec(),
    PolicySpec(replicas_to_aggregate=2),
    PolicySpec(tokens=TokenMode.FIFO),
    PolicySpec(tokens=TokenMode.FIFO, num_tokens=0),
    PolicySpec(name=PolicyName.SSP, staleness=1),
    PolicySpec(name=PolicyName.ASYNC),
    PolicySpec(name=PolicyName.ASYNC, max_staleness=1),
)


class Shard:
    """What a parameter server does with contributions, without their bytes."""

    def __init__(self) -> None:
        self.step, self.accepts_stale = 0, False
        self.staged: dict[PushId, int] = {}

    def push(self, push_id: PushId, step: int) -> PushResult:
        if step < self.step and not self.accepts_stale:
            return PushResult.STALE
        self.staged[push_id] = step
        return PushResult.STAGED

    def carry_out(self, work: ev.ConfigureShards | ev.ApplyStep) -> None:
        if isinstance(work, ev.ConfigureShards):
            self.accepts_stale = work.settings.accepts_stale
        else:
            assert work.step == self.step
            for push_id in work.contributors:
                assert push_id in self.staged, f"{push_id} is not staged here"
                del self.staged[push_id]
            for push_id in work.discards:
                self.staged.pop(push_id, None)
            self.step += 1
        if not self.accepts_stale:
            self.staged = {push_id: step for push_id, step in self.staged.items() if step >= self.step}


class Scene(Driver):
    """Shards that are told one after the other, in any order, with anything in between."""

    def __init__(self, rng: random.Random, policy: PolicySpec) -> None:
        self.rng, self.servers = rng, [Shard() for _ in range(NUM_SHARDS)]
        self.waiting_shards: list[Shard] = []
        super().__init__(num_shards=NUM_SHARDS, total_num_replicas=NUM_WORKERS, policy=policy, applies_at_once=False, lease_s=1e9)

    def tell_shard(self) -> bool:
        """Has one more shard do what is under way; False if nothing is."""
        under_way: list[ev.ConfigureShards | ev.ApplyStep] = [*self.to_configure, *self.to_apply]
        if not under_way:
            return False
        if not self.waiting_shards:
            self.waiting_shards = self.rng.sample(self.servers, NUM_SHARDS)
        self.waiting_shards.pop().carry_out(under_way[0])
        if not self.waiting_shards:
            self.configure() if self.to_configure else self.apply()
        return True


class Participant:
    """A worker that pushes to one shard after the other, commits, waits for its token, reads, and begins again."""

    def __init__(self, scene: Scene, worker: Worker) -> None:
        self.scene, self.worker = scene, worker
        self.results: list[PushResult] = []
        self.push_id: PushId | None = None
        self.call: int | None = None
        self.num_done = 0

    def act(self) -> None:
        scene, worker = self.scene, self.worker
        if self.call is not None:
            self.hear(scene.answers.get(self.call))
        elif len(self.results) < NUM_SHARDS:
            self.push_id = self.push_id or worker.next_push()
            self.results.append(scene.servers[len(self.results)].push(self.push_id, worker.local_step))
        else:
            found, push_id = set(self.results), self.push_id
            assert push_id is not None
            self.call = worker.ask(commit=PushCommit(push_id=push_id, step=worker.local_step, staged=found == {PushResult.STAGED}))

    def hear(self, reply: object) -> None:
        if reply is None:
            return
        assert isinstance(reply, TokenReply)
        assert reply.result is TokenResult.TOKEN
        # Under fifo the token is the step; otherwise what was read, which may be of a later step than the token by now.
        is_token = self.scene.coordinator.status(self.scene.now).policy.text == "sync, fifo tokens"
        self.worker.local_step = reply.step if is_token else max(reply.step, self.scene.step)
        self.results, self.push_id, self.call, self.num_done = [], None, None, self.num_done + 1


@pytest.mark.parametrize("seed", range(examples(150)))
def test_under_all_policies_every_worker_continues_and_every_contribution_is_there_when_it_is_applied(seed: int) -> None:
    rng = random.Random(seed)
    scene = Scene(rng, rng.choice(POLICIES))
    joined = scene.train(*range(NUM_WORKERS))
    while scene.tell_shard():
        pass
    workers = [Participant(scene, worker) for worker in joined]
    changes: list[int] = []
    for _ in range(rng.choice([60, 300])):
        if rng.random() < 0.05:
            changes.append(scene.set_policy(rng.choice(POLICIES), max_wait_s=20.0))
        elif rng.random() < 0.4:
            scene.tell_shard()
        else:
            rng.choice(workers).act()
    done = [worker.num_done for worker in workers]
    for _ in range(400):
        rng.choice(workers).act()
        while scene.tell_shard():
            pass
    assert scene.coordinator.state is ClusterState.TRAINING
    assert all(worker.num_done > before for worker, before in zip(workers, done, strict=True)), scene.coordinator.explain(scene.now)
    assert all(isinstance(scene.answers[call], SettingsReply) for call in changes)
