"""The chief in this process: a step is applied inside the call that completes it, and Ctrl-C or a defect there stops nobody for ever."""

import itertools

import pytest

from chief.coordination import CoordinationConfig
from chief.in_process_chief import InProcessChief
from ps_protocol.chief import ClusterState, Participant, ParticipantKind, PushCommit, PushOutcome, RegisterRequest, TokenReply, TokenResult
from ps_protocol.errors import ContributionMissing, TrainingFailed
from ps_protocol.layout import aligned_bytes
from ps_protocol.placement import layouts
from ps_protocol.segments import Segments
from ps_protocol.shard import ApplyReply, ApplyRequest, PushHeader, PushId, ShardSpec
from ps_server.in_process_shard import InProcessShard
from tests.core.chief_driver import MODEL


class Interrupted(InProcessShard):
    """A shard whose next step raises what it is told to."""

    error: BaseException | None = None

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().apply_step(request)


class Scene:
    def __init__(self, **coordination: int) -> None:
        self.now = 0.0
        self.shards = [Interrupted(index=index) for index in range(2)]
        self.chief = InProcessChief(self.shards, config=CoordinationConfig(**coordination), clock=lambda: self.now)  # type: ignore[arg-type]
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=1, request_id=1)
        self.worker: Participant = self.chief.register_worker(request).participant
        reply = self.chief.register_model(self.worker, MODEL, max_wait_s=0.0)
        self.layouts = layouts(reply.placement, num_shards=2)
        for index, (shard, layout) in enumerate(zip(self.shards, self.layouts, strict=True)):
            spec = ShardSpec(epoch=1, shard=index, layout=layout, optimizer=MODEL.optimizer, attempt=reply.attempt)
            shard.create_variables(spec, Segments([aligned_bytes(layout.nbytes)]))
        self.chief.complete_initialization(self.worker, attempt=reply.attempt)
        self.sequences = itertools.count(1)

    def push(self, step: int) -> PushCommit:
        push_id = PushId(worker=0, incarnation=1, sequence=next(self.sequences))
        for shard, layout in zip(self.shards, self.layouts, strict=True):
            header = PushHeader(epoch=1, push_id=push_id, step=step, layout_hash=layout.hash)
            shard.push_gradients(header, Segments([aligned_bytes(layout.nbytes)]))
        return PushCommit(push_id=push_id, step=step, staged=True)

    def wait(self, step: int) -> TokenReply:
        return self.chief.dequeue_token(self.worker, local_step=step, request_id=step + 1, max_wait_s=0.0)


def test_the_step_is_applied_before_the_commit_that_completes_it_returns() -> None:
    scene = Scene()
    assert scene.chief.commit_push(scene.worker, scene.push(0)).outcome is PushOutcome.ACCEPTED
    assert [shard.status().step for shard in scene.shards] == [1, 1]
    assert (scene.wait(0).result, scene.wait(0).step) == (TokenResult.TOKEN, 1)


def test_a_wait_that_has_no_time_says_what_it_waits_for() -> None:
    scene = Scene(total_num_replicas=2)
    scene.chief.commit_push(scene.worker, scene.push(0))
    assert "missing: worker 1 (never joined)" in scene.wait(0).waiting_for


def test_ctrl_c_while_a_step_is_applied_takes_effect_after_it() -> None:
    scene = Scene()
    scene.shards[0].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        scene.chief.commit_push(scene.worker, scene.push(0))
    assert [shard.status().step for shard in scene.shards] == [1, 1]
    assert scene.chief.status().state is ClusterState.TRAINING
    assert scene.wait(0).step == 1


@pytest.mark.parametrize("error", [ContributionMissing("not staged"), RuntimeError("a defect")])
def test_a_step_that_cannot_be_applied_fails_the_training_for_all(error: Exception) -> None:
    scene = Scene()
    scene.shards[1].error = error
    try:
        scene.chief.commit_push(scene.worker, scene.push(0))
    except RuntimeError as raised:
        assert raised is error
    with pytest.raises(TrainingFailed, match=f"ps 1 at in-process:1: .*{error}"):
        scene.wait(0)


def test_a_lease_ends_by_the_clock_that_was_given() -> None:
    scene = Scene()
    scene.now = 9.9
    assert scene.chief.status().participants[0].state == "live"
    scene.now = 10.0
    assert scene.chief.status().participants[0].state == "lapsed"


def test_shards_that_hold_a_model_are_not_taken_over() -> None:
    scene = Scene()
    with pytest.raises(TrainingFailed, match="in-process:0 holds variables at step 0 already"):
        InProcessChief(scene.shards, config=CoordinationConfig(), clock=lambda: 0.0)
