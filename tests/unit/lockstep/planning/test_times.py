"""Files of computing times: their two forms, errors in a line, and computing times derived from a cluster's status."""

import json

import pytest

from lockstep.planning.times import HEADER, ComputingTime, TimesRecorder, parse_times, times_by_worker
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from tests.support.chief.chief_driver import Driver, Worker

ROWS = [
    ComputingTime(worker=0, step=0, seconds=1.5),
    ComputingTime(worker=3, step=0, seconds=0.25),
    ComputingTime(worker=0, step=1, seconds=2.0),
]


def parse(text: str) -> list[ComputingTime]:
    return list(parse_times(text.splitlines(), name="times"))


def test_times_are_read_back_as_written() -> None:
    assert parse("\n".join([HEADER, *(row.text for row in ROWS)])) == ROWS


def test_csv_may_have_other_columns_and_another_order() -> None:
    assert parse("host,seconds,worker,step\n\nb,0.5,2,7\n") == [ComputingTime(worker=2, step=7, seconds=0.5)]


def test_json_lines_are_read() -> None:
    lines = [json.dumps({"worker": row.worker, "step": row.step, "seconds": row.seconds, "host": "b"}) for row in ROWS]
    assert parse("\n".join(lines)) == ROWS


def test_times_are_gathered_by_worker() -> None:
    assert times_by_worker(ROWS) == {0: [1.5, 2.0], 3: [0.25]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        (HEADER, "a heading and no rows"),
        ("worker,seconds\n0,1", "no column 'step'"),
        (f"{HEADER}\n0,0,1\n0,1", "line 3: 2 values, want 3"),
        (f"{HEADER}\n0,0,fast", "line 2: seconds: got 'fast'"),
        (f"{HEADER}\n0,0,0", "line 2: seconds: got '0'"),
        (f"{HEADER}\n0,0,nan", "line 2: seconds: got 'nan'"),
        (f"{HEADER}\n-1,0,1", "line 2: worker: got '-1'"),
        (f"{HEADER}\n1.5,0,1", "line 2: worker: got '1.5'"),
        (f"{HEADER}\n0,inf,1", "line 2: step: got 'inf'"),
        (f"{HEADER}\n10000,0,1", "line 2: worker: got '10000', want a whole number from 0 to 9999"),
        ('{"worker": 0, "step": 0}', "line 1: seconds: got 'None'"),
        ('{"worker": true, "step": 0, "seconds": 1}', "line 1: worker: got 'True'"),
        ('{"worker": 0, "step": 0, "seconds": 1}\n[1]', "line 2: want an object"),
        ('{"worker": 0', "line 1: not JSON"),
    ],
)
def test_a_wrong_line_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(text)
    assert words in caught.value.message


class Observed:
    """A cluster whose status is looked at every 10 ms."""

    def __init__(self, *, num_required: int, num_workers: int) -> None:
        self.driver = Driver(replicas_to_aggregate=num_required, total_num_replicas=num_workers, lease_s=1000.0)
        self.workers = self.driver.train(*range(num_workers))
        self.calls: dict[int, int] = {}
        self.recorder = TimesRecorder()
        self.rows: list[ComputingTime] = []
        self.begin = self.driver.now

    def until(self, second: float) -> None:
        while self.driver.now < self.begin + second - 0.005:
            self.driver.now += 0.01
            # Looks fall between what happens, which is at whole hundredths.
            self.rows += self.recorder.observe(self.driver.coordinator.status(self.driver.now - 0.005), at=self.driver.now - 0.005 + 700)

    def contribute(self, worker: Worker) -> None:
        call = self.calls.get(worker.index)
        assert call is None or worker.has_token(call)
        self.calls[worker.index] = worker.ask(commit=worker.next_commit())


def test_a_recorder_observes_the_times_of_a_running_cluster() -> None:
    seen = Observed(num_required=2, num_workers=2)
    first, second = seen.workers
    seen.until(0.1)
    seen.contribute(first)
    seen.until(0.2)
    seen.contribute(second)  # opens step 1 at 0.2
    seen.until(0.5)
    seen.contribute(second)
    seen.until(1.0)
    seen.contribute(first)  # opens step 2 at 1.0
    seen.until(1.25)
    seen.contribute(first)
    seen.until(1.5)
    assert [(row.worker, row.step) for row in seen.rows] == [(1, 1), (0, 1), (0, 2)]
    assert [row.seconds for row in seen.rows] == pytest.approx([0.3, 0.8, 0.25], abs=0.02)


def test_a_straggler_is_timed_over_several_steps_and_starts_its_next_one_at_once() -> None:
    seen = Observed(num_required=2, num_workers=3)
    a, b, slow = seen.workers
    for second, who in (
        (0.1, (a, slow)),  # opens step 1
        (0.2, (b,)),  # from the variables of step 0: stale, and continues with those of step 1
        (0.3, (a,)),
        (0.4, (b,)),  # opens step 2
        (0.6, (a, b)),  # opens step 3
        (0.75, (slow,)),  # from the variables of step 1
        (0.9, (slow,)),
        (1.0, ()),
    ):
        seen.until(second)
        for worker in who:
            seen.contribute(worker)
    found = {(row.worker, row.step): row.seconds for row in seen.rows}
    assert found.keys() == {(a.index, 1), (b.index, 1), (a.index, 2), (b.index, 2), (slow.index, 1), (slow.index, 3)}
    assert [found[slow.index, step] for step in (1, 3)] == pytest.approx([0.65, 0.15], abs=0.02)
    assert [found[b.index, step] for step in (1, 2)] == pytest.approx([0.2, 0.2], abs=0.02)


def test_a_new_incarnation_is_not_taken_for_the_old_one() -> None:
    seen = Observed(num_required=2, num_workers=2)
    first, second = seen.workers
    seen.until(0.05)
    seen.contribute(first)
    seen.contribute(second)
    seen.until(0.1)
    first.leave()
    again = Worker(seen.driver, 0)
    seen.until(0.3)
    seen.contribute(second)
    again.ask(commit=again.next_commit())
    seen.until(0.4)
    assert [row.worker for row in seen.rows] == [1]


def test_times_can_be_recorded_under_sync_only() -> None:
    driver = Driver(total_num_replicas=1, policy=PolicySpec(name=PolicyName.ASYNC))
    with pytest.raises(InvalidSpec, match="under sync only"):
        TimesRecorder().observe(driver.coordinator.status(driver.now), at=0.0)
    driver = Driver(replicas_to_aggregate=3, total_num_replicas=2)
    with pytest.raises(InvalidSpec, match="3 contributions of 2 workers"):
        TimesRecorder().observe(driver.coordinator.status(driver.now), at=0.0)
