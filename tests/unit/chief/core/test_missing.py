"""Contributions that were committed and that shards do not have: the step is applied without them, and their workers are expelled."""

import dataclasses

import pytest

from chief.core import messages as ev
from ps_protocol.errors import ContributionMissing, TrainingFailed
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.spec import ClipSpec, ModelSpec
from ps_protocol.roles.chief import ClusterState, CommitPushRequest, HeartbeatRequest, LeaseRangesRequest, LeaseReply, PushOutcome
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import MODEL, Driver, Worker

ASYNC = PolicySpec(name=PolicyName.ASYNC)


class Scene:
    """An honest worker 0, and worker 1, which commits what it has not pushed; both wait for the next step."""

    def __init__(self, *, num_shards: int = 2, model: ModelSpec = MODEL, has_successors: bool = False) -> None:
        self.driver = Driver(num_shards=num_shards, has_successors=has_successors, total_num_replicas=2, applies_at_once=False)
        self.honest = Worker(self.driver, 0)
        self.forger = Worker(self.driver, 1)
        call = self.driver.ask_model(self.honest, model)
        self.honest.complete(self.driver.answers[call].attempt)
        while self.driver.to_configure:
            self.driver.configure()
        self.forged = PushId(worker=1, incarnation=self.forger.participant.incarnation, sequence=1)

    def step(self) -> tuple[int, int]:
        """Both commit; returns the calls with which they wait."""
        return self.honest.ask(commit=self.honest.next_commit()), self.forger.ask(commit=self.forger.next_commit())

    def lack(self, *shards: int, push_id: PushId | None = None) -> None:
        """These shards do not have the forged contribution."""
        driver = self.driver
        works: list[ev.Work] = [*driver.applied, *driver.to_apply, *driver.to_prepare]
        driver.to_apply.clear()
        driver.to_prepare.clear()
        driver.done(works[-1], ev.Lacking(missing=tuple((shard, push_id or self.forged) for shard in shards)))


def test_a_shard_that_lacks_a_contribution_applies_the_step_without_it_and_the_others_with_it() -> None:
    scene = Scene()
    honest, _ = scene.step()
    scene.lack(1)
    (told,) = scene.driver.to_apply
    assert told.without == ((), (scene.forged,))
    assert len(told.request.contributors) == 2
    scene.driver.apply()
    assert scene.honest.has_token(honest)
    assert scene.driver.coordinator.cluster.state is ClusterState.TRAINING
    assert scene.driver.step == 1


def test_each_shard_that_reports_a_missing_contribution_applies_the_step_without_it() -> None:
    scene = Scene()
    scene.step()
    scene.lack(1)
    scene.lack(0)
    assert scene.driver.to_apply[0].without == ((scene.forged,), (scene.forged,))


def test_the_worker_of_a_missing_contribution_is_told_which_shard_lacks_it_and_is_expelled() -> None:
    scene = Scene()
    _, forger = scene.step()
    scene.lack(1)
    error = scene.forger.error(forger)
    assert isinstance(error, ContributionMissing)
    assert f"worker 1: it committed contribution {scene.forged} to step 0, which ps 1 at host-p:5001 never received" in error.message
    with pytest.raises(ContributionMissing, match=r"was expelled 0\.0 s ago: it committed contribution"):
        scene.driver.ask(HeartbeatRequest(participant=scene.forger.participant))
    with pytest.raises(ContributionMissing):
        scene.driver.ask(CommitPushRequest(participant=scene.forger.participant, commit=scene.forger.next_commit()))
    (status,) = [one for one in scene.driver.coordinator.status(scene.driver.now).participants if one.index == 1]
    assert status.state == "expelled"
    assert str(scene.forged) in status.failure


def test_of_two_whose_answers_wait_for_the_step_only_the_one_whose_contribution_is_missing_is_refused() -> None:
    scene = Scene(has_successors=True)
    honest, forger = scene.honest.send_commit(), scene.forger.send_commit()
    scene.lack(1)
    assert isinstance(scene.forger.error(forger), ContributionMissing)
    assert honest not in scene.driver.answers
    scene.driver.apply()
    assert scene.driver.answers[honest].outcome is PushOutcome.ACCEPTED


def test_the_place_of_an_expelled_worker_is_free_for_another_incarnation() -> None:
    scene = Scene()
    honest, _ = scene.step()
    scene.lack(0, 1)
    scene.driver.apply()
    assert scene.honest.has_token(honest)
    another = Worker(scene.driver, 1)
    assert another.participant.incarnation > scene.forger.participant.incarnation
    assert another.commit().outcome is PushOutcome.ACCEPTED


def test_a_step_waits_for_the_place_of_an_expelled_worker_and_says_why_the_worker_was_expelled() -> None:
    scene = Scene()
    honest, _ = scene.step()
    scene.lack(0, 1)
    scene.driver.apply()
    assert scene.honest.has_token(honest)
    scene.honest.commit()
    assert f"for worker 1 (program failed). It said: It committed contribution {scene.forged}" in scene.driver.coordinator.cluster.explain(
        scene.driver.now
    )


def test_a_step_with_a_limited_norm_is_prepared_again_without_the_missing_contribution() -> None:
    scene = Scene(model=dataclasses.replace(MODEL, clip=ClipSpec(global_norm=1.0)))
    scene.step()
    (prepared,) = scene.driver.to_prepare
    assert not prepared.of.without
    scene.lack(1)
    (prepared,) = scene.driver.to_prepare
    assert prepared.of.without == ((), (scene.forged,))
    sums = tuple((1.0,) * len(layout.slices) for layout in scene.driver.coordinator.cluster.model.layouts)
    scene.driver.sums = sums
    scene.driver.prepare()
    (told,) = scene.driver.to_apply
    assert told.without == ((), (scene.forged,))


def test_a_missing_contribution_reported_for_an_applied_step_changes_nothing() -> None:
    scene = Scene()
    scene.step()
    scene.driver.apply()
    scene.lack(1)
    assert scene.forger.heartbeat() is False


def test_a_missing_contribution_reported_of_another_instruction_changes_nothing() -> None:
    scene = Scene()
    scene.step()
    scene.driver.done(dataclasses.replace(scene.driver.to_apply[0]), ev.Lacking(missing=((0, scene.forged),)))
    assert scene.forger.heartbeat() is False


@pytest.mark.parametrize("push_id", [None, PushId(worker=5, incarnation=5, sequence=5)])
def test_a_shard_that_keeps_lacking_contributions_fails_the_training_and_not_the_chief(push_id: PushId | None) -> None:
    scene = Scene()
    scene.step()
    scene.lack(1, push_id=push_id)
    if push_id is None:
        scene.lack(1)  # it was told to do without
    with pytest.raises(TrainingFailed, match="parameter servers lack other contributions"):
        scene.honest.heartbeat()


def test_a_missing_contribution_of_an_older_incarnation_does_not_expel_the_present_one() -> None:
    scene = Scene()
    scene.step()
    another = Worker(scene.driver, 1, takeover=True)
    scene.lack(0, 1)
    assert another.heartbeat() is False


def test_the_training_data_of_a_contribution_that_no_shard_has_goes_to_others() -> None:
    scene, data = Scene(), DataSpec(name="d", num_samples=2, range_size=1)

    def lease(worker: Worker, request_id: int) -> list[int]:
        request = LeaseRangesRequest(participant=worker.participant, data=data, max_ranges=1, request_id=request_id, max_wait_s=0.0)
        reply = scene.driver.answers[scene.driver.ask(request)]
        assert isinstance(reply, LeaseReply)
        return [given.id for given in reply.ranges]

    honest, forged = lease(scene.honest, 1), lease(scene.forger, 1)
    scene.honest.ask(commit=scene.honest.next_commit(ranges=tuple(honest)))
    scene.forger.ask(commit=scene.forger.next_commit(ranges=tuple(forged)))
    scene.lack(0)
    assert lease(scene.honest, 2) == []
    scene.lack(1)
    scene.driver.apply()
    assert lease(scene.honest, 3) == forged


def test_under_async_a_missing_contribution_leaves_the_numbers_of_steps_unchanged() -> None:
    scene = Scene()
    scene.driver.set_policy(ASYNC)
    scene.driver.configure()
    scene.forger.ask(commit=scene.forger.next_commit())
    result = scene.honest.commit()
    scene.lack(0, 1)
    scene.driver.apply()
    assert (result.applied_step, scene.driver.to_apply[0].request.step) == (1, 1)
    scene.driver.apply()
    assert scene.driver.step == 2
