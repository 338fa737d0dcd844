"""The runner on an event loop with shards that fail as they are told to: it repeats, reports, gives up in time, and forgets no caller."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from chief import events as ev
from chief.coordination import CoordinationConfig
from chief.runner import Runner
from ps_protocol.chief import (
    ClusterState,
    ModelReply,
    Participant,
    ParticipantKind,
    PushCommit,
    RegisterRequest,
    Registration,
    SettingsReply,
    TokenReply,
    TokenResult,
)
from ps_protocol.clipping import ClipSpec
from ps_protocol.errors import ContributionMissing, InvalidSpec, PsError, TrainingFailed, Unavailable, WrongCluster
from ps_protocol.handshake import HandshakeReply, Identity, Role
from ps_protocol.model import ModelSpec
from ps_protocol.policy_spec import PolicyName, PolicySpec
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    CheckpointFile,
    PushId,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    ShardSettings,
    ShardStatus,
)
from ps_protocol.version import PROTOCOL_VERSION
from tests.wire.running_chief import MODEL


class FakeLink:
    """A shard that answers at once, unless `errors` has one for the next call of a method."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.address = f"host-p:{5000 + index}"
        self.errors: dict[str, list[PsError]] = {}
        self.always: dict[str, PsError] = {}
        self.process_incarnation = 7
        self.step: int | None = None
        self.epoch = self.chief_incarnation = 0
        self.chief_address = ""
        self.num_looks = 0
        self.chief_heard_ago_s: float | None = None
        self.adoption = Adoption(step=None, layout_hash="")
        self.records: dict[int, bytes] = {}
        self.saved: list[SaveRequest] = []
        self.restored: list[RestoreRequest] = []
        self.applied: list[ApplyRequest] = []
        self.configured: list[ShardSettings] = []
        self.sums: tuple[float, ...] = ()
        self.ended_because = ""
        self.is_closed = False
        self.never = asyncio.Event()
        self.hangs: set[str] = set()

    async def _answer(self, method: str) -> None:
        if method in self.hangs:
            await self.never.wait()
        if method in self.always:
            raise self.always[method]
        if self.errors.get(method):
            raise self.errors[method].pop(0)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        await self._answer("handshake")
        identity = Identity(cluster="lockstep", role=Role.PARAMETER_SERVER, index=self.index, process_incarnation=self.process_incarnation)
        return HandshakeReply(identity=identity, version=PROTOCOL_VERSION, epoch=0, warning="")

    async def status(self, *, timeout_s: float, chief_incarnation: int = 0) -> ShardStatus:
        await self._answer("status")
        self.num_looks += 1
        fields: dict[str, Any] = dict.fromkeys(ShardStatus.__dataclass_fields__, 0)
        fields.update(shard=self.index, process_incarnation=self.process_incarnation, step=self.step, epoch=self.epoch)
        fields.update(chief_address=self.chief_address, chief_heard_ago_s=self.chief_heard_ago_s)
        return ShardStatus(**{**fields, "chief_incarnation": self.chief_incarnation})

    async def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", timeout_s: float) -> Adoption:
        await self._answer("adopt")
        self.epoch, self.chief_incarnation, self.chief_address = epoch, chief_incarnation, chief_address
        return self.adoption

    async def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes, timeout_s: float) -> None:
        await self._answer("keep_record")
        self.records[version] = record

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        await self._answer("save" if max_wait_s else "begin_save")
        self.saved.append(request)
        if not max_wait_s:
            return SaveProgress(state=SaveState.WRITING)
        return SaveProgress(state=SaveState.DONE, file=CheckpointFile(name=f"ps-{self.index}", shard=self.index, num_bytes=1, sha256="ab"))

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        await self._answer("restore")
        self.restored.append(request)
        self.step = request.spec.initial_step
        return RestoreProgress(is_done=True)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        await self._answer("configure")
        self.configured.append(settings)

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        await self._answer("prepare_step")
        return self.sums

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        await self._answer("apply_step")
        self.applied.append(request)
        return ApplyReply(step=request.step + 1, repeated_request=False)

    async def shutdown(self, *, epoch: int, reason: str, timeout_s: float) -> None:
        await self._answer("shutdown")
        self.ended_because = reason

    async def close(self) -> None:
        self.is_closed = True


class Scene:
    """A runner with fake shards, and one worker."""

    def __init__(self, *, num_ps: int = 1, **coordination: Any) -> None:
        self.links = [FakeLink(index) for index in range(num_ps)]
        self.states: list[ClusterState] = []
        self.runner = Runner(self.links, config=CoordinationConfig(**coordination), on_state=self.states.append)
        self.running = asyncio.get_running_loop().create_task(self.runner.run())
        self.sequence = 0

    async def join(self) -> Participant:
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=1, request_id=1)
        registration = await self.runner.call(Registration, lambda call: ev.RegisterWorker(call=call, request=request))
        self.participant = registration.participant
        return self.participant

    async def initialise(self, model: ModelSpec = MODEL) -> None:
        participant = await self.join()
        reply = await self.runner.call(
            ModelReply, lambda call: ev.RegisterModel(call=call, participant=participant, model=model, max_wait_s=10.0)
        )
        await self.runner.call(
            type(None), lambda call: ev.CompleteInitialization(call=call, participant=participant, attempt=reply.attempt)
        )

    async def take_step(self) -> TokenReply:
        self.sequence += 1
        step = self.runner.status(max_ledger_entries=0).global_step
        push_id = PushId(worker=self.participant.index, incarnation=self.participant.incarnation, sequence=self.sequence)
        return await self.runner.call(
            TokenReply,
            lambda call: ev.DequeueToken(
                call=call,
                participant=self.participant,
                local_step=step,
                request_id=self.sequence,
                max_wait_s=10.0,
                commit=PushCommit(push_id=push_id, step=step, staged=True),
            ),
        )

    def status(self) -> str:
        return self.runner.status(max_ledger_entries=0).waiting_for

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.runner.close()
        assert all(link.is_closed for link in self.links)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        scene = Scene(**options)
        try:
            async with asyncio.timeout(20):
                await act(scene)
        finally:
            await scene.close()

    asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_step_is_repeated_at_a_shard_that_cannot_be_reached_until_it_answers() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[1].errors["apply_step"] = [Unavailable("cannot reach ps 1 at host-p:5001: gone")] * 3
        waiting = asyncio.create_task(scene.take_step())
        await until(lambda: "has not answered" in scene.status())
        assert scene.status().startswith("ps 1 at host-p:5001 has not answered for 0.")
        assert scene.status().endswith("(gone); if it is gone its variables are lost and the cluster must be started again; step 0 waits")
        reply = await waiting
        assert (reply.result, reply.step) == (TokenResult.TOKEN, 1)
        assert [len(link.applied) for link in scene.links] == [1, 1]
        assert scene.links[0].applied == scene.links[1].applied

    play(act, num_ps=2)


def test_norms_of_all_shards_make_one_factor_before_any_of_them_applies() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise(dataclasses.replace(MODEL, clip=ClipSpec(global_norm=2.5)))
        scene.links[0].sums, scene.links[1].sums = (9.0,), (16.0,)
        scene.links[1].errors["prepare_step"] = [Unavailable("gone")]
        await scene.take_step()
        # The norm of all is 5.
        assert [request.scales for link in scene.links for request in link.applied] == [(0.5,), (0.5,)]

    play(act, num_ps=2)


def test_settings_reach_every_shard_before_contributions_are_taken_otherwise() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[1].errors["configure"] = [Unavailable("gone")] * 2
        policy = PolicySpec(name=PolicyName.ASYNC)
        reply = await scene.runner.call(SettingsReply, lambda call: ev.SetPolicy(call=call, policy=policy, request_id=1, max_wait_s=10.0))
        told = [(link.configured[-1].version, link.configured[-1].accepts_stale) for link in scene.links]
        assert told == [(reply.version, True)] * 2
        assert (await scene.take_step()).reads_latest

    play(act, num_ps=2)


def test_refused_settings_fail_the_training_with_the_shards_words() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].errors["configure"] = [InvalidSpec("not so")]
        policy = PolicySpec(name=PolicyName.ASYNC, use_locking=False)
        with pytest.raises(TrainingFailed, match="ps 0 at host-p:5000: not so"):
            await scene.runner.call(SettingsReply, lambda call: ev.SetPolicy(call=call, policy=policy, request_id=1, max_wait_s=10.0))

    play(act)


def test_a_refused_step_fails_the_training_with_the_shards_words() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].errors["apply_step"] = [ContributionMissing("push 0/1/1 is not staged here")]
        with pytest.raises(TrainingFailed, match="ps 0 at host-p:5000: push 0/1/1 is not staged here"):
            await scene.take_step()
        assert scene.states[-1] is ClusterState.FAILED

    play(act)


def test_a_refusal_by_another_process_than_before_is_told_as_a_restart() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].process_incarnation = 8
        scene.links[0].errors["apply_step"] = [PsError("no variables")]
        with pytest.raises(TrainingFailed, match="was restarted and has lost its variables"):
            await scene.take_step()

    play(act)


def test_an_idle_shard_is_watched_and_another_chief_ends_this_one_but_not_the_shards() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].chief_incarnation = 2
        assert await scene.running == 1
        assert not any(link.ended_because for link in scene.links)

    play(act, num_ps=2)


def test_an_idle_shard_that_falls_silent_and_comes_back_is_reported() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].always["status"] = Unavailable("gone")
        await until(lambda: not scene.runner.status(max_ledger_entries=0).shards[0].is_reachable)
        scene.links[0].always.clear()
        await until(lambda: scene.runner.status(max_ledger_entries=0).shards[0].is_reachable)

    play(act)


def test_a_shard_restarted_before_there_is_a_model_is_adopted_again() -> None:
    async def act(scene: Scene) -> None:
        await until(lambda: ClusterState.WAITING_FOR_MODEL in scene.states)
        scene.links[0].process_incarnation, scene.links[0].chief_incarnation = 8, 0
        await until(lambda: scene.states[-2:] == [ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL])
        assert scene.links[0].chief_incarnation == 1
        await scene.initialise()

    play(act)


def test_a_later_chief_gets_a_higher_incarnation_on_all_shards() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].chief_incarnation = 4
        await until(lambda: ClusterState.WAITING_FOR_MODEL in scene.states)
        assert [link.chief_incarnation for link in scene.links] == [5, 5]

    play(act, num_ps=2)


def test_no_shard_is_adopted_before_all_have_been_looked_at() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].hangs.add("handshake")
        async with asyncio.timeout(5):
            while scene.links[1].num_looks == 0:
                await asyncio.sleep(0)
        assert [link.chief_incarnation for link in scene.links] == [0, 0]

    play(act, num_ps=2)


def test_a_shard_of_another_cluster_ends_the_start() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].always["handshake"] = WrongCluster("this is another")
        with pytest.raises(WrongCluster):
            await scene.running

    play(act)


def test_the_end_does_not_wait_for_a_shard_that_hangs() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[1].hangs.add("shutdown")
        scene.runner.stop("told to")
        scene.runner.stop("told again")
        assert await scene.running == 0
        assert scene.links[0].ended_because == "told again"

    play(act, num_ps=2)


def test_a_stop_before_any_shard_was_reached_ends_at_once_and_touches_none() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].hangs.add("handshake")
        await asyncio.sleep(0)
        scene.runner.stop("told to")
        assert await scene.running == 0
        assert scene.links[0].ended_because == ""

    play(act)


def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        waiting = asyncio.create_task(scene.take_step())
        await until(lambda: scene.runner.status(max_ledger_entries=0).participants[0].is_waiting)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not scene.runner.status(max_ledger_entries=0).participants[0].is_waiting
        assert scene.runner._blocked == {}

    play(act, replicas_to_aggregate=2)


def test_a_chief_that_stood_still_hears_its_workers_before_it_ends_their_leases() -> None:
    now = [100.0]

    async def run() -> None:
        runner = Runner([FakeLink(0)], config=CoordinationConfig(lease_s=0.3), on_state=lambda state: None, clock=lambda: now[0])
        running = asyncio.create_task(runner.run())
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=1, request_id=1)
        registration = await runner.call(Registration, lambda call: ev.RegisterWorker(call=call, request=request))
        now[0] += 60.0  # as after a suspend: the lease is long over when the timer fires
        await asyncio.sleep(0.5)
        assert await runner.call(bool, lambda call: ev.Heartbeat(call=call, participant=registration.participant)) is False
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()

    asyncio.run(run())


def test_a_chief_that_stood_still_listens_for_a_while_only_however_much_is_said() -> None:
    slept_s = [0.0]

    def worker(pid: int) -> RegisterRequest:
        return RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=pid, request_id=pid)

    async def run() -> None:
        config = CoordinationConfig(lease_s=0.3)
        runner = Runner([FakeLink(0)], config=config, on_state=lambda state: None, clock=lambda: time.monotonic() + slept_s[0])
        running = asyncio.create_task(runner.run())
        talker = await runner.call(Registration, lambda call: ev.RegisterWorker(call=call, request=worker(1)))
        await runner.call(Registration, lambda call: ev.RegisterWorker(call=call, request=worker(2)))

        async def talk() -> bool:
            await runner.call(bool, lambda call: ev.Heartbeat(call=call, participant=talker.participant))
            states = {one.index: one.state for one in runner.status(max_ledger_entries=0).participants}
            return states[1 - talker.participant.index] == "lapsed"

        slept_s[0] = 60.0
        assert not await talk()
        async with asyncio.timeout(10):
            while not await talk():
                await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()

    asyncio.run(run())
