"""What the launcher says for all workers while training stands, from reports that the test makes up."""

from dataclasses import replace

from lockstep.launcher.watch import WaitWords
from ps_protocol.roles.chief import ClusterState, Condition, Level
from tests.support.chief.cluster_status import cluster_status, worker_status

SILENT = Condition(
    name="worker silent",
    level=Level.AMBER,
    line="Waiting 2 s for worker 1 (silent)",
    advice="See whether its process is stopped.",
    commands=("kill -CONT 7",),
    is_standstill=True,
)
COMPUTES = replace(SILENT, name="waiting", level=Level.GREEN, line="Waiting 3 s for worker 1", commands=())
UNSAVED = Condition(name="nothing kept", level=Level.AMBER, line="No checkpoints")
TRAINING = Condition(name="training", level=Level.GREEN, line="Training. Nothing is waited for")


def said(*reports: tuple[float, tuple[Condition, ...]], state: ClusterState = ClusterState.TRAINING, is_waiting: bool = True) -> list[str]:
    lines: list[str] = []
    words = WaitWords(lines.append, runs_all=lambda: False)
    for now, conditions in reports:
        worker = worker_status(0, is_waiting=is_waiting)
        words.see(cluster_status(worker, state=state, conditions=conditions), now=now)
    return lines


def test_a_standstill_is_said_once_for_all_workers_with_its_remedy_and_its_end() -> None:
    (first, last) = said((1.0, (SILENT,)), (1.5, (SILENT,)), (2.0, (SILENT,)), (2.5, (UNSAVED, TRAINING)))
    assert first == "Waiting 2 s for worker 1 (silent). See whether its process is stopped.\n    kill -CONT 7"
    assert last == "training continues at step 41"


def test_a_standstill_of_one_report_is_not_worth_a_line() -> None:
    assert said((1.0, (SILENT,)), (1.5, (TRAINING,)), (2.0, (SILENT,)), (2.5, (TRAINING,))) == []


def test_the_same_standstill_is_said_again_after_10_s_then_after_20_and_40() -> None:
    lines: list[str] = []
    at: list[float] = []
    words = WaitWords(lines.append, runs_all=lambda: False)
    for tick in range(200):
        words.see(cluster_status(worker_status(0, is_waiting=True), conditions=(SILENT,)), now=tick / 2)
        at += [tick / 2] * (len(lines) - len(at))
    assert at == [0.5, 10.5, 30.5, 70.5]


def test_what_holds_nothing_up_is_not_said() -> None:
    assert said(*((now, (UNSAVED, TRAINING)) for now in (1.0, 1.5, 2.0))) == []


def test_a_step_for_which_nobody_waits_yet_is_not_said() -> None:
    reports = [(now, (UNSAVED, COMPUTES)) for now in (1.0, 1.5, 2.0)]
    assert said(*reports, is_waiting=False) == []
    assert said(*reports) == ["Waiting 3 s for worker 1. See whether its process is stopped."]


def test_before_training_no_remedy_is_named_that_the_launcher_has_seen_to() -> None:
    first = replace(SILENT, name="nobody joined", line="Waiting 2 s for the first worker", advice="Start one.")
    reports = [(now, (first,)) for now in (1.0, 1.5, 2.5, 3.0, 3.5)]
    assert said(*reports[:3], state=ClusterState.WAITING_FOR_MODEL) == []
    assert said(*reports, state=ClusterState.WAITING_FOR_MODEL) == ["Waiting 2 s for the first worker"]


def test_nobody_is_told_to_start_a_worker_that_the_launcher_has_started_again() -> None:
    failed = replace(SILENT, name="program failed", line="Waiting 2 s for worker 1 (program failed)")
    assert said_of(failed, runs_all=True) == [failed.line]
    assert said_of(failed, runs_all=False) == [f"{failed.line}. {failed.advice}\n    kill -CONT 7"]


def said_of(condition: Condition, *, runs_all: bool) -> list[str]:
    lines: list[str] = []
    words = WaitWords(lines.append, runs_all=lambda: runs_all)
    for now in (1.0, 1.5):
        words.see(cluster_status(worker_status(0, is_waiting=True), conditions=(condition,)), now=now)
    return lines
