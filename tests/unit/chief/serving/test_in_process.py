"""The chief in this process: a step is applied inside the call that completes it; Ctrl-C or a defect there blocks no later call."""

import dataclasses
import itertools

import numpy as np
import pytest

from chief.options import CoordinationConfig
from chief.serving.in_process import InProcessChief
from ps_protocol.errors import ContributionMissing, InvalidSpec, TrainingFailed
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.spec import ClipSpec, ModelSpec, PlacementPolicy, layouts
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    ClusterState,
    CommitPushRequest,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    RegisterRequest,
    SettingsReply,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import ApplyRequest, KeepRecordRequest, PushHeader, ReadRequest, ShardSpec, ShardStatusRequest
from ps_server.serving.local import InProcessShard
from tests.support.chief.chief_driver import MODEL


class Interrupted(InProcessShard):
    """A shard whose next step, or next change of settings, raises what it is told to."""

    error: BaseException | None = None
    settings_error: BaseException | None = None

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        if isinstance(request, KeepRecordRequest) and self.settings_error is not None:
            raise self.settings_error
        if isinstance(request, ApplyRequest):
            error, self.error = self.error, None
            if error is not None:
                raise error
        return super().call(request, timeout_s=timeout_s)


class Scene:
    def __init__(self, *, model: ModelSpec = MODEL, **coordination: int) -> None:
        self.now = 0.0
        self.shards = [Interrupted(index=index) for index in range(2)]
        self.chief = InProcessChief(self.shards, config=CoordinationConfig(**coordination), clock=lambda: self.now)  # type: ignore[arg-type]
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=1, request_id=1)
        self.worker: Participant = self.chief.call(request).participant
        reply = self.chief.call(RegisterModelRequest(participant=self.worker, model=model, max_wait_s=0.0))
        self.layouts = layouts(reply.placement, num_shards=2)
        for index, (shard, layout) in enumerate(zip(self.shards, self.layouts, strict=True)):
            spec = ShardSpec(
                epoch=1,
                shard=index,
                layout=layout,
                optimizer=model.optimizer,
                attempt=reply.attempt,
                clip=model.clip,
                max_staged_per_worker=reply.max_staged_per_worker,
            )
            shard.create_variables(spec, Segments([aligned_bytes(layout.nbytes)]))
        self.chief.call(CompleteInitializationRequest(participant=self.worker, attempt=reply.attempt))
        self.sequences = itertools.count(1)

    def push(self, step: int, *, gradient: float = 0.0, num_shards: int = 2) -> PushCommit:
        push_id = PushId(worker=0, incarnation=1, sequence=next(self.sequences))
        for shard, layout in list(zip(self.shards, self.layouts, strict=True))[:num_shards]:
            header = PushHeader(era=self.worker.era, push_id=push_id, step=step, layout_hash=layout.hash, secret=self.worker.secret)
            memory = aligned_bytes(layout.nbytes)
            for index in range(len(layout.slices)):
                layout.view(memory, index)[...] = gradient
            shard.push_gradients(header, Segments([memory]))
        return PushCommit(push_id=push_id, step=step, staged=True)

    def wait(self, step: int) -> TokenReply:
        return self.chief.call(DequeueTokenRequest(participant=self.worker, local_step=step, request_id=step + 1, max_wait_s=0.0))


def test_the_step_is_applied_before_the_commit_that_completes_it_returns() -> None:
    scene = Scene()
    assert scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0))).outcome is PushOutcome.ACCEPTED
    assert [shard.call(ShardStatusRequest()).step for shard in scene.shards] == [1, 1]
    assert (scene.wait(0).result, scene.wait(0).step) == (TokenResult.TOKEN, 1)


def test_a_wait_that_has_no_time_says_what_it_waits_for() -> None:
    scene = Scene(total_num_replicas=2)
    scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0)))
    assert "for worker 1 (not joined)" in scene.wait(0).waiting_for


def test_ctrl_c_while_a_step_is_applied_takes_effect_after_it() -> None:
    scene = Scene()
    scene.shards[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0)))
    assert [shard.call(ShardStatusRequest()).step for shard in scene.shards] == [1, 1]
    assert scene.chief.status().state is ClusterState.TRAINING
    assert scene.wait(0).step == 1


@pytest.mark.parametrize("error", [InvalidSpec("not so"), RuntimeError("a defect")])
def test_a_step_that_cannot_be_applied_fails_the_training_for_all(error: Exception) -> None:
    scene = Scene()
    scene.shards[1].error = error
    try:
        scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0)))
    except RuntimeError as raised:
        assert raised is error
    with pytest.raises(TrainingFailed, match=f"ps 1 at in-process:1: .*{error}"):
        scene.wait(0)


def test_a_contribution_that_only_some_shards_have_counts_where_it_is_and_training_continues() -> None:
    scene = Scene()
    forged = scene.push(0, gradient=1.0, num_shards=1)
    with pytest.raises(ContributionMissing, match="worker 0: it committed contribution 0/1/1 to step 0, which ps 1"):
        scene.chief.call(DequeueTokenRequest(participant=scene.worker, local_step=0, request_id=1, max_wait_s=9.0, commit=forged))
    assert [shard.call(ShardStatusRequest()).step for shard in scene.shards] == [1, 1]
    assert scene.chief.status().state is ClusterState.TRAINING


def test_a_lease_ends_by_the_clock_that_was_given() -> None:
    scene = Scene()
    scene.now = 9.9
    assert scene.chief.status().participants[0].state == "live"
    scene.now = 10.0
    assert scene.chief.status().participants[0].state == "lapsed"


def test_a_chief_that_follows_another_continues_with_its_model() -> None:
    scene = Scene()
    scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0)))
    follower = InProcessChief(scene.shards, config=CoordinationConfig(), clock=lambda: 0.0)
    status = follower.status()
    assert (status.state, status.global_step, status.chief_incarnation) == (ClusterState.TRAINING, 1, 2)


def test_a_change_of_policy_reaches_the_shards_and_each_contribution_is_then_a_step() -> None:
    scene = Scene(replicas_to_aggregate=2)
    reply = scene.chief.call(ChangeSettingsRequest(policy=PolicySpec(name=PolicyName.ASYNC), request_id=7, max_wait_s=1.0))
    assert reply == SettingsReply(version=1, step=0)
    assert [shard.call(ShardStatusRequest()).settings_version for shard in scene.shards] == [2, 2]
    for step in range(2):
        result = scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(step)))
        assert (result.outcome, result.applied_step, result.staleness) == (PushOutcome.ACCEPTED, step, 0)
    assert [shard.call(ShardStatusRequest()).step for shard in scene.shards] == [2, 2]
    assert scene.wait(1).reads_latest


def test_a_shard_that_refuses_new_settings_fails_the_training() -> None:
    scene = Scene()
    scene.shards[1].settings_error = ContributionMissing("a refusal")
    with pytest.raises(TrainingFailed, match="ps 1 at in-process:1: a refusal"):
        scene.chief.call(ChangeSettingsRequest(policy=PolicySpec(name=PolicyName.ASYNC), request_id=7, max_wait_s=1.0))


def test_the_mean_of_a_step_is_held_to_its_norm_over_all_shards() -> None:
    spread = PlacementPolicy(strategy="round_robin")
    variables = tuple(dataclasses.replace(MODEL.variables[0], name=name) for name in ("a", "b"))
    scene = Scene(model=dataclasses.replace(MODEL, variables=variables, clip=ClipSpec(global_norm=1.0), placement=spread))
    scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0, gradient=2.0)))
    for shard, layout in zip(scene.shards, scene.layouts, strict=True):
        memory = aligned_bytes(layout.nbytes)
        shard.read(ReadRequest(epoch=1, step=1, layout_hash=layout.hash), Segments([memory]))
        # Six elements of 2 have the norm 24 ** 0.5; the learning rate is 0.1.
        np.testing.assert_allclose(layout.view(memory, 0), -0.1 * 2.0 / 24**0.5, rtol=1e-6)


def test_many_contributions_that_wait_for_their_turn_are_applied_one_after_the_other_not_one_within_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(replicas_to_aggregate=300, total_num_replicas=1)  # so many may be staged
    scene.chief.call(ChangeSettingsRequest(policy=PolicySpec(name=PolicyName.ASYNC), request_id=7, max_wait_s=1.0))
    call = scene.shards[0].call

    def apply_when_others_wait(request: ApplyRequest) -> object:
        monkeypatch.setattr(scene.shards[0], "call", call)
        for _ in range(298):
            assert scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0))).outcome is PushOutcome.ACCEPTED
        return call(request)

    monkeypatch.setattr(scene.shards[0], "call", apply_when_others_wait)
    scene.chief.call(CommitPushRequest(participant=scene.worker, commit=scene.push(0)))
    assert scene.chief.status().global_step == 299
