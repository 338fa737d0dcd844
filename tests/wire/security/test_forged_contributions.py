"""Forged commits, pushes and numbers by a holder of a worker's token, beside a training over gRPC."""

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ps_protocol.errors import ContributionMissing, LeaseExpired, WorkerIndexTaken
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.model.spec import layouts
from ps_protocol.roles.chief import (
    ClusterState,
    CommitPushRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    HeartbeatRequest,
    Participant,
    PushCommit,
    TokenResult,
)
from ps_protocol.roles.contribution import Attachments, PushId
from ps_protocol.roles.shard import PushHeader
from tests.support.chief.running_chief import RunningChief, Worker, client_of, cluster

# Where everything that a stranger to a worker knows of it is in the status.


@pytest.fixture
def chief() -> Iterator[RunningChief]:
    with cluster(num_ps=2, total_num_replicas=2, lease_s=60.0) as running:
        yield running


@contextlib.contextmanager
def trained(chief: RunningChief, *indices: int) -> Iterator[list[Worker]]:
    """Workers that have the model."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(stack.enter_context(client_of(chief)), index)) for index in indices]
        for worker in workers:
            worker.join_model()
        yield workers


def both_wait(honest: Worker, forger: Worker, commits: tuple[PushCommit, PushCommit]) -> tuple[TokenResult, BaseException | None]:
    """Both commit and wait for a token; returns what the honest one gets, and the error that the other gets."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(honest.wait, commits[0]), threads.submit(forger.wait, commits[1])
        return first.result(20).result, second.exception(20)


def stranger_to(worker: Worker) -> Participant:
    return dataclasses.replace(worker.participant, secret=0)


@pytest.mark.parametrize("num_given", [0, 1])
def test_a_commit_of_a_contribution_that_a_shard_lacks_expels_its_worker_and_no_other(chief: RunningChief, num_given: int) -> None:
    with trained(chief, 0, 1) as (honest, forger):
        forged = forger.push(value=3.0, num_shards=num_given)
        result, error = both_wait(honest, forger, (honest.push(value=1.0), forged))
        assert result is TokenResult.TOKEN
        assert isinstance(error, ContributionMissing)
        assert f"worker 1: it committed contribution {forged.push_id} to step 0, which ps {num_given}" in error.message
        # Where it was given, it counts; the mean of the others is what counts elsewhere.
        assert honest.read() == {"w": pytest.approx([-0.2 if num_given else -0.1] * 3), "b": pytest.approx([-0.1] * 3)}
        with pytest.raises(ContributionMissing, match="was expelled"):
            forger.chief.call(HeartbeatRequest(participant=forger.participant))
        with trained(chief, 1) as (another,):
            assert both_wait(honest, another, (honest.push(), another.push())) == (TokenResult.TOKEN, None)
        assert honest.chief.status().state is ClusterState.TRAINING


@pytest.mark.parametrize("num_given", [0, 1])
def test_numbers_of_a_commit_count_only_where_its_contribution_lies(chief: RunningChief, num_given: int) -> None:
    """Of several workers' numbers those of the lowest hold: here the forger's."""
    with trained(chief, 0, 1) as (forger, honest):
        numbers = (StepHyperparameter(group="", name="learning_rate", value=1.0),)
        forged = dataclasses.replace(forger.push(value=3.0, num_shards=num_given), attached=Attachments(hyperparameters=numbers))
        result, error = both_wait(honest, forger, (honest.push(value=1.0), forged))
        assert result is TokenResult.TOKEN and isinstance(error, ContributionMissing)
        assert honest.read() == {"w": pytest.approx([-2.0 if num_given else -0.1] * 3), "b": pytest.approx([-0.1] * 3)}


def test_no_caller_commits_or_leaves_in_another_workers_name(chief: RunningChief) -> None:
    with trained(chief, 0, 1) as (honest, other), client_of(chief) as attacker:
        them = stranger_to(honest)
        push_id = PushId(worker=0, incarnation=them.incarnation, sequence=1 << 63)
        for attempt in (
            lambda: attacker.call(CommitPushRequest(participant=them, commit=PushCommit(push_id=push_id, step=0, staged=True))),
            lambda: attacker.call(DequeueTokenRequest(participant=them, local_step=0, request_id=1, max_wait_s=0.0)),
            lambda: attacker.call(HeartbeatRequest(participant=them)),
            lambda: attacker.call(DeregisterRequest(participant=them)),
        ):
            with pytest.raises(LeaseExpired, match=r"worker 0 .* is registered to another caller"):
                attempt()
        assert both_wait(honest, other, (honest.push(), other.push())) == (TokenResult.TOKEN, None)


def test_no_process_comes_back_as_another_worker(chief: RunningChief) -> None:
    with trained(chief, 0, 1) as (honest, other), client_of(chief) as attacker:
        with pytest.raises(WorkerIndexTaken):
            Worker(attacker, 0, former=stranger_to(honest))
        assert both_wait(honest, other, (honest.push(), other.push())) == (TokenResult.TOKEN, None)


def test_an_incarnation_from_nowhere_locks_no_later_process_out(chief: RunningChief) -> None:
    with trained(chief, 0, 1) as (honest, other):
        reply = honest.join_model()
        for shard, layout in zip(honest.shards, layouts(reply.placement, num_shards=2), strict=True):
            for worker, incarnation in ((0, 2**64 - 1), (0, honest.participant.incarnation), (1, 1 << 62)):
                push_id = PushId(worker=worker, incarnation=incarnation, sequence=1)
                header = PushHeader(era=honest.participant.era, push_id=push_id, step=0, layout_hash=layout.hash, secret=1)
                with pytest.raises(LeaseExpired, match="is not registered, or not to you"):
                    shard.push_gradients(header, Segments([aligned_bytes(layout.nbytes)]))
                with pytest.raises(LeaseExpired):
                    shard.share(epoch=header.era.epoch, worker=worker, incarnation=incarnation, layout=layout, secret=1)
        assert both_wait(honest, other, (honest.push(), other.push())) == (TokenResult.TOKEN, None)
        with client_of(chief) as client, Worker(client, 0, takeover=True) as successor:
            successor.join_model()
            assert both_wait(successor, other, (successor.push(), other.push())) == (TokenResult.TOKEN, None)
