"""The runner on an event loop with shards that fail on request: it repeats, reports, gives up in time, and answers every caller."""

import asyncio
import dataclasses

import pytest

from chief.options import CoordinationConfig
from chief.serving.runner import Runner
from ps_protocol.errors import ContributionMissing, InvalidSpec, PsError, TrainingFailed, Unavailable, WrongCluster
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.spec import ClipSpec
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    ClusterState,
    End,
    FinishTrainingRequest,
    HeartbeatRequest,
    ParticipantKind,
    RegisterRequest,
    TokenResult,
)
from tests.support.chief.chief_runner import FakeLink, Scene, play, until
from tests.support.chief.running_chief import MODEL
from tests.support.sessions import skipping_loop


def test_a_step_is_repeated_at_a_shard_that_cannot_be_reached_until_it_answers() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[1].errors["apply_step"] = [Unavailable("cannot reach ps 1 at host-p:5001: gone")] * 3
        waiting = asyncio.create_task(scene.take_step())
        await until(lambda: scene.status().startswith("Waiting 0 s for ps 1 (gone)"))
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
        scene.links[1].errors["keep_record"] = [Unavailable("gone")] * 2
        policy = PolicySpec(name=PolicyName.ASYNC)
        reply = await scene.runner.call(ChangeSettingsRequest(policy=policy, request_id=1, max_wait_s=10.0))
        assert reply is not None
        told = [(link.configured[-1].version, link.configured[-1].accepts_stale) for link in scene.links]
        assert told == [(reply.version + 1, True)] * 2
        assert (await scene.take_step()).reads_latest

    play(act, num_ps=2)


def test_refused_settings_fail_the_training_with_the_shards_reason() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].errors["keep_record"] = [InvalidSpec("not so")]
        policy = PolicySpec(name=PolicyName.ASYNC)
        with pytest.raises(TrainingFailed, match="ps 0 at host-p:5000: not so"):
            await scene.runner.call(ChangeSettingsRequest(policy=policy, request_id=1, max_wait_s=10.0))

    play(act)


def test_a_refused_step_fails_the_training_with_the_shards_reason() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].errors["apply_step"] = [ContributionMissing("push 0/1/1 is not staged here")]
        with pytest.raises(TrainingFailed, match="ps 0 at host-p:5000: push 0/1/1 is not staged here"):
            await scene.take_step()
        assert scene.states[-1] is ClusterState.FAILED

    play(act)


def test_a_refusal_by_another_process_than_before_is_reported_as_a_restart() -> None:
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


def test_a_shard_restarted_before_there_is_a_model_is_adopted_again_in_another_life() -> None:
    async def act(scene: Scene) -> None:
        await until(lambda: ClusterState.WAITING_FOR_MODEL in scene.states)
        scene.links[0].process_incarnation, scene.links[0].chief_incarnation = 8, 0
        await until(lambda: scene.states[-2:] == [ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL])
        assert scene.links[0].chief_incarnation == 2
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
        await scene.runner.call(FinishTrainingRequest(reason="enough"))
        scene.runner.stop("told to")
        scene.runner.stop("told again")
        assert await scene.running == 0
        assert scene.links[0].ended_because == "enough"

    play(act, num_ps=2)


def test_a_stop_before_any_shard_was_reached_ends_at_once_and_touches_none() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].hangs.add("handshake")
        await asyncio.sleep(0)
        scene.runner.stop("told to")
        assert await scene.running == 0
        assert scene.links[0].ended_because == ""

    play(act)


def test_a_stop_leaves_the_shards_and_sends_blocked_callers_to_the_next_chief() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        waiting = asyncio.create_task(scene.take_step())
        await until(lambda: scene.runner.status(max_ledger_entries=0).participants[0].is_waiting)
        scene.runner.stop("SIGTERM")
        for call in (waiting, scene.runner.call(HeartbeatRequest(participant=scene.participant))):
            with pytest.raises(Unavailable, match=r"the chief has ended .* waiting for the next one"):
                await call
        assert await scene.running == 0
        assert scene.links[0].ended_because == ""
        assert not scene.runner.has_ended_training

    play(act, replicas_to_aggregate=2)


def test_a_chief_that_ends_with_a_defect_leaves_the_shards_to_the_next_one() -> None:
    async def act(scene: Scene) -> None:
        await scene.initialise()
        scene.links[0].always["apply_step"] = ValueError("a defect")  # type: ignore[assignment]
        with pytest.raises(Unavailable):
            await scene.take_step()
        assert await scene.running == 1
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
        registration = await runner.call(request)
        now[0] += 60.0  # as after a suspend: the lease is long over when the timer fires
        await asyncio.sleep(0.5)
        assert await runner.call(HeartbeatRequest(participant=registration.participant)) is End.NOT_YET
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.close()

    skipping_loop.run(run())


def test_a_chief_that_was_stopped_listens_for_a_bounded_time_before_it_ends_leases() -> None:
    slept_s = [0.0]

    def worker(pid: int) -> RegisterRequest:
        return RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=pid, request_id=pid)

    async def run() -> None:
        loop, config = asyncio.get_running_loop(), CoordinationConfig(lease_s=0.3)
        runner = Runner([FakeLink(0)], config=config, on_state=lambda state: None, clock=lambda: loop.time() + slept_s[0])
        running = asyncio.create_task(runner.run())
        talker = await runner.call(worker(1))
        await runner.call(worker(2))

        async def talk() -> bool:
            await runner.call(HeartbeatRequest(participant=talker.participant))
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

    skipping_loop.run(run())
