"""What the launcher says of workers that fail: how many are left at that time, and at the end all that failed by themselves."""

from dataclasses import dataclass

import pytest

from lockstep.launcher.failures import later_failures, left_words, list_words
from lockstep.launcher.watch import StepNeeds


@dataclass
class Worker:
    name: str
    returncode: int | None = 1
    end_text: str = "exit code 1: ValueError: bad data"


@pytest.mark.parametrize(("num_running", "words"), [(0, "no worker is left"), (1, "1 worker is left"), (3, "3 workers are left")])
def test_what_is_said_at_a_failure_counts_the_workers_that_run_at_that_time(num_running: int, words: str) -> None:
    assert left_words(num_running, StepNeeds(num_workers=2, text="a step needs 2")) == f"{words}, a step needs 2"


def test_a_worker_that_fails_later_by_itself_is_in_the_list_and_one_that_was_interrupted_is_not() -> None:
    first, later = Worker("worker 1"), Worker("worker 0")
    interrupted = Worker("worker 2", end_text="exit code 1: lockstep.errors.TrainingInterrupted: training was interrupted at step 3")
    others = [Worker("worker 3", returncode=0), Worker("worker 4", returncode=None), Worker("worker 5", -9, "killed by SIGKILL")]
    found = later_failures([later, first, interrupted, *others], [first])
    assert [one.name for one in found] == ["worker 0", "worker 5"]
    assert list_words([first, *found]) == (
        "failed by themselves: worker 1, worker 0: exit code 1: ValueError: bad data\nfailed by itself: worker 5: killed by SIGKILL"
    )
