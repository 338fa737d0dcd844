"""Policies and optimizers are changed on a running cluster, over the wire: real chief, real servers, workers that speak the protocol."""

import itertools
from collections.abc import Iterator

import pytest

from ps_protocol import errors
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    HyperparameterChange,
    ModelState,
    PushOutcome,
    RegisterModelRequest,
    SettingsReply,
    TokenResult,
)
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.rpc.chief import GrpcChief
from tests.support.chief.running_chief import MODEL, Worker, client_of, cluster

ASYNC = PolicySpec(name=PolicyName.ASYNC)
UNLOCKED = PolicySpec(name=PolicyName.ASYNC, use_locking=False)
FIFO = PolicySpec(tokens=TokenMode.FIFO)
RATE = 0.1  # of MODEL

_request_ids = itertools.count(1)


@pytest.fixture
def chief() -> Iterator[GrpcChief]:
    with cluster(num_ps=2, replicas_to_aggregate=2) as running, client_of(running) as client:
        yield client


def set_policy(chief: GrpcChief, policy: PolicySpec) -> SettingsReply:
    reply = chief.call(ChangeSettingsRequest(policy=policy, request_id=next(_request_ids), max_wait_s=10.0))
    assert reply is not None
    return reply


def change(chief: GrpcChief, change: HyperparameterChange, *, request_id: int | None = None) -> SettingsReply:
    reply = chief.call(ChangeSettingsRequest(hyperparameters=change, request_id=request_id or next(_request_ids), max_wait_s=10.0))
    assert reply is not None
    return reply


def joined(chief: GrpcChief) -> Worker:
    worker = Worker(chief)
    worker.join_model()
    return worker


def values(worker: Worker) -> float:
    """The one number that all elements of both variables are."""
    numbers = {number for row in worker.read().values() for number in row}
    assert len(numbers) == 1
    return numbers.pop()


def test_contribution_counted_under_sync_is_applied_when_the_policy_becomes_async(chief: GrpcChief) -> None:
    with joined(chief) as first, joined(chief) as second:
        assert first.commit(first.push(value=1.0)).outcome is PushOutcome.ACCEPTED
        assert chief.status().global_step == 0
        set_policy(chief, ASYNC)
        token = first.wait()
        assert (token.result, token.reads_latest) == (TokenResult.TOKEN, True)
        assert chief.status().policy.text == "async"
        late = second.wait(second.push(value=1.0)).commit
        assert late is not None
        assert late.outcome is PushOutcome.STALE, "the step that it is for has been made"
        assert values(second) == pytest.approx(-RATE)


def test_staleness_is_reported_bounded_and_weighed(chief: GrpcChief) -> None:
    with joined(chief) as fast, joined(chief) as slow:
        set_policy(chief, PolicySpec(name=PolicyName.SSP, staleness=5, max_staleness=1, too_stale=TooStale.SCALE))
        for step in range(3):
            done = fast.wait(fast.push(value=0.0)).commit
            assert done is not None and (done.applied_step, done.staleness) == (step, 0)
            fast.local_step = step + 1
        done = slow.wait(slow.push(value=1.0)).commit
        assert done is not None
        assert (done.applied_step, done.staleness) == (3, 3)
        assert done.weight == pytest.approx(1 / 3)
        assert values(slow) == pytest.approx(-RATE / 3)
        assert chief.status().max_observed_staleness == 3


def test_contribution_that_is_too_stale_is_dropped_on_every_shard(chief: GrpcChief) -> None:
    with joined(chief) as fast, joined(chief) as slow:
        set_policy(chief, PolicySpec(name=PolicyName.ASYNC, max_staleness=0))
        fast.wait(fast.push())
        done = slow.wait(slow.push(value=1.0)).commit
        assert done is not None and done.outcome is PushOutcome.STALE
        fast.local_step = 1
        fast.wait(fast.push())
        assert values(slow) == 0.0
        assert [shard.call(ShardStatusRequest()).report.num_staged for shard in slow.shards] == [0, 0]


def test_without_a_lock_shards_apply_and_the_chief_counts(chief: GrpcChief) -> None:
    set_policy(chief, UNLOCKED)
    with joined(chief) as worker:
        for step in range(3):
            commit = worker.push(value=1.0)
            assert commit.is_applied
            assert values(worker) == pytest.approx(-RATE * (step + 1)), "before anybody has counted it"
            worker.wait(commit)
        assert chief.status().global_step == 3
        with pytest.raises(errors.InvalidSpec, match="cannot change once there is a model"):
            set_policy(chief, PolicySpec())
        assert worker.push().is_applied


def test_fifo_tokens_come_with_their_own_step_and_read_the_newest() -> None:
    with cluster(replicas_to_aggregate=1, total_num_replicas=2, policy=FIFO) as running, client_of(running) as chief:
        with joined(chief) as worker:
            tokens = [worker.wait(), worker.wait(worker.push()), worker.wait(worker.push()), worker.wait(), worker.wait()]
            assert [(token.step, token.global_step) for token in tokens] == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
            assert all(token.reads_latest for token in tokens)


def test_optimizer_changes_between_two_steps_on_all_shards(chief: GrpcChief) -> None:
    set_policy(chief, ASYNC)
    with joined(chief) as worker:
        worker.wait(worker.push(value=1.0))
        reply = change(chief, HyperparameterChange(learning_rate=constant(1.0)), request_id=77)
        assert reply.step == 1
        assert change(chief, HyperparameterChange(learning_rate=constant(9.0)), request_id=77) == reply, "a repetition changes nothing"
        worker.wait(worker.push(value=1.0))
        assert values(worker) == pytest.approx(-RATE - 1.0)
        status = chief.status()
        assert status.hyperparameters_version == reply.version
        assert {shard.call(ShardStatusRequest()).settings_version for shard in worker.shards} == {reply.version}
        assert status.optimizer == "sgd (learning_rate 1)"


def test_a_worker_that_only_joins_is_never_told_to_initialise(chief: GrpcChief) -> None:
    with Worker(chief) as guest, Worker(chief) as host:
        reply = guest.chief.call(RegisterModelRequest(participant=guest.participant, model=MODEL, max_wait_s=0.05, joins_only=True))
        assert reply.state in (ModelState.ABSENT, ModelState.WAIT)
        set_policy(chief, ASYNC)
        assert host.join_model().state is ModelState.INITIALIZE
        reply = guest.chief.call(RegisterModelRequest(participant=guest.participant, model=MODEL, max_wait_s=10.0, joins_only=True))
        assert (reply.state, reply.policy) == (ModelState.READY, ASYNC)


def test_settings_that_cannot_be_right_are_refused_and_change_nothing(chief: GrpcChief) -> None:
    with pytest.raises(errors.NotInitialized):
        change(chief, HyperparameterChange(learning_rate=constant(1.0)))
    with joined(chief) as worker:
        with pytest.raises(errors.VariableNotFound, match="'W'"):
            change(chief, HyperparameterChange(variable="W", learning_rate=constant(1.0)))
        with pytest.raises(errors.InvalidSpec, match="momentun"):
            change(chief, HyperparameterChange(hyperparameters={"momentun": 0.5}))
        too_few = PolicySpec(tokens=TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=3, total_num_replicas=1)
        with pytest.raises(errors.InvalidSpec, match=r"Too few tokens to finish the first step: 0 \(given\) vs 2 \(needed\)"):
            set_policy(chief, too_few)
        status = chief.status()
        assert (status.policy.text, status.hyperparameters_version) == ("sync", 0)
        assert worker.commit(worker.push()).outcome is PushOutcome.ACCEPTED
