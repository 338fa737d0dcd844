"""What the launcher makes of the chief's reports, and how it has training finished: the chief is fake, and no thread asks it."""

from threading import Condition, Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.launcher import watch
from lockstep.launcher.watch import ChiefPoller
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, FinishTrainingRequest
from tests.support.chief.cluster_status import cluster_status

WAITING, TRAINING, FINISHED = ClusterState.WAITING_FOR_MODEL, ClusterState.TRAINING, ClusterState.FINISHED


class Scene:
    """A poller, its chief, and the time."""

    def __init__(self) -> None:
        self.now, self.report, self.asked = 100.0, cluster_status(), list[FinishTrainingRequest]()
        self.poller = ChiefPoller(cast(Any, None))

    def ask(self, state: ClusterState, **fields: Any) -> None:
        """The poller asks once, and the chief reports that."""
        self.report = cluster_status(state=state, **fields)
        self.poller._ask(cast(Any, SimpleNamespace(status=lambda: self.report, call=self._finish)))

    def _finish(self, request: FinishTrainingRequest) -> int:
        self.asked.append(request)
        return self.report.global_step


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    no_thread = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None), Condition=Condition, Event=Event)
    monkeypatch.setattr(watch, "threading", no_thread)
    found = Scene()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_training_is_finished_once_and_is_finishing_until_the_chief_reports_its_end(scene: Scene, interrupts: bool) -> None:
    assert not scene.poller.is_finishing
    scene.poller.finish("enough", interrupts=interrupts)
    assert scene.poller.is_finishing and scene.poller.finished_at is None and not scene.poller.has_interrupted
    for _ in range(2):
        scene.ask(TRAINING, global_step=7)
    assert scene.asked == [FinishTrainingRequest(reason="enough", interrupts=interrupts)]
    assert (scene.poller.finished_at, scene.poller.is_finishing, scene.poller.has_interrupted) == (7, True, interrupts)
    scene.ask(FINISHED, global_step=7)
    assert not scene.poller.is_finishing


def test_a_training_that_is_over_is_not_finished_again(scene: Scene) -> None:
    scene.poller.finish("enough")
    scene.ask(FINISHED)
    assert not scene.asked and not scene.poller.is_finishing


def test_a_training_has_begun_once_there_is_a_model_but_not_by_being_finished(scene: Scene) -> None:
    assert scene.poller.has_begun, "a chief that never answered counts as having trained"
    scene.ask(WAITING)
    assert not scene.poller.has_begun
    scene.poller.finish("nobody came")
    scene.ask(WAITING)
    scene.ask(FINISHED)
    assert not scene.poller.has_begun
    trains = Scene()
    trains.ask(TRAINING)
    assert trains.poller.has_begun


def test_a_last_checkpoint_is_waited_for_while_the_chief_answers_after_the_end(scene: Scene) -> None:
    saves = CheckpointStatus(durability="interval", saving="step-000000007")
    scene.ask(TRAINING, checkpoint=saves)
    assert scene.poller.saving == ""
    scene.ask(FINISHED)
    assert scene.poller.saving == ""
    scene.ask(FINISHED, checkpoint=saves)
    assert scene.poller.saving == "step-000000007"
    scene.now += 11.0
    assert scene.poller.saving == ""


def test_a_report_of_a_model_is_one_that_was_asked_for_since_or_the_doubt_has_lasted_too_long(scene: Scene) -> None:
    def knows(since: float) -> bool:
        return scene.poller.knows(since=since, max_wait_s=0.0)

    since = scene.now
    assert not knows(since)
    scene.ask(WAITING)
    assert not knows(since), "the program sets its policy before it makes the model"
    scene.ask(TRAINING)
    assert knows(since) and not knows(since + 1.0)
    scene.now += 4.0
    assert knows(since + 1.0)
    scene.ask(FINISHED)
    assert knows(scene.now + 1.0)
