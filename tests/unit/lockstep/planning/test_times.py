"""Files of computing times: their two forms, errors in a line, and computing times from a cluster's ledger."""

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
    """A cluster whose workers contribute at given times."""

    def __init__(self, num_workers: int) -> None:
        self.driver = Driver(total_num_replicas=num_workers, lease_s=1000.0)
        self.workers = self.driver.train(*range(num_workers))
        self.calls: dict[Worker, int] = {}
        self.recorder = TimesRecorder()
        self.begin = self.driver.now

    def contribute(self, second: float, worker: Worker) -> None:
        self.driver.now = self.begin + second
        assert worker not in self.calls or worker.has_token(self.calls[worker])
        self.calls[worker] = worker.ask(commit=worker.next_commit())

    def rows(self) -> list[tuple[int, int, float]]:
        status = self.driver.coordinator.status(self.driver.now, max_ledger_entries=100)
        return [(row.worker, row.step, round(row.seconds, 3)) for row in self.recorder.observe(status)]


def test_a_recorder_has_the_times_of_a_running_cluster_from_its_ledger_each_once() -> None:
    seen = Observed(2)
    first, second = seen.workers
    assert seen.rows() == []
    for at, worker in ((0.1, first), (0.2, second), (0.5, second), (1.0, first)):
        seen.contribute(at, worker)
    assert sorted(seen.rows()) == [(0, 1, 0.8), (1, 1, 0.3)]
    seen.contribute(1.25, first)
    assert seen.rows() == []
    seen.contribute(1.5, second)
    assert sorted(seen.rows()) == [(0, 2, 0.25), (1, 2, 0.5)]
    assert seen.rows() == []


def test_steps_from_before_the_recording_show_only_who_was_there() -> None:
    seen = Observed(2)
    first, second = seen.workers
    for at, worker in ((0.1, first), (0.2, second), (0.5, second), (1.0, first)):
        seen.contribute(at, worker)
    assert seen.rows() == []
    for at, worker in ((1.25, first), (1.5, second)):
        seen.contribute(at, worker)
    assert sorted(seen.rows()) == [(0, 2, 0.25), (1, 2, 0.5)]


def test_the_first_contribution_of_an_incarnation_is_left_out_for_it_has_the_start_of_the_worker_in_it() -> None:
    seen = Observed(2)
    first, second = seen.workers
    assert seen.rows() == []
    seen.contribute(0.05, first)
    seen.contribute(0.1, second)
    first.leave()
    again = Worker(seen.driver, 0)
    seen.contribute(0.3, second)
    seen.contribute(0.4, again)
    assert seen.rows() == [(1, 1, 0.2)]


def test_times_can_be_recorded_under_sync_without_backup_workers_only() -> None:
    driver = Driver(total_num_replicas=1, policy=PolicySpec(name=PolicyName.ASYNC))
    with pytest.raises(InvalidSpec, match="under sync only"):
        TimesRecorder().observe(driver.coordinator.status(driver.now))
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=3)
    with pytest.raises(InvalidSpec, match="2 contributions of 3 workers, so that not all times are known"):
        TimesRecorder().observe(driver.coordinator.status(driver.now))
