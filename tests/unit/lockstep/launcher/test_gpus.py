"""Each worker has GPUs of its machine for itself, also where workers move to another one."""

from pathlib import Path

import pytest

from lockstep.launcher import agent, gpus
from lockstep.launcher.gpus import VISIBLE, Gpus, gpus_here
from lockstep.launcher.looks import Refused
from lockstep.launcher.supervisor import LaunchFailed


def test_workers_of_a_machine_share_no_gpu_and_those_of_two_have_the_same_numbers() -> None:
    given = Gpus(2, here=None)
    found = [given.of(worker, host="ab"[worker % 2])[VISIBLE] for worker in range(4)]
    assert found == ["0,1", "0,1", "2,3", "2,3"]


def test_a_worker_that_moves_gets_gpus_that_are_free_there_and_one_that_stays_keeps_its_own() -> None:
    given = Gpus(1, here=None)
    assert [given.of(worker, host="ab"[worker % 2])[VISIBLE] for worker in range(3)] == ["0", "0", "1"]
    assert given.of(1, host="a") == {VISIBLE: "2"}
    assert [given.of(worker, host="a")[VISIBLE] for worker in range(3)] == ["0", "2", "1"]
    assert given.of(3, host="b") == {VISIBLE: "0"}


def test_on_this_machine_they_are_those_that_the_launcher_may_use() -> None:
    given = Gpus(1, here=("4", "7"))
    assert [given.of(worker, host="")[VISIBLE] for worker in range(2)] == ["4", "7"]
    with pytest.raises(LaunchFailed, match="--worker-gpus 1: worker 2 needs 3 GPUs here with those before it, and there are 2"):
        given.of(2, host="")


def test_a_host_names_its_gpus_and_refuses_a_worker_that_needs_more() -> None:
    assert agent._gpus("worker 1", ["1", "GPU-5b"], ("4", "5")) == "5,GPU-5b"
    with pytest.raises(Refused, match="worker 2 needs 4 GPUs here with the workers before it, and there are 2"):
        agent._gpus("worker 2", ["2", "3"], ("4", "5"))


def test_without_the_flag_nothing_is_set() -> None:
    assert Gpus(0, here=()).of(0, host="") == {}


def test_the_gpus_here_are_those_of_the_variable_or_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "gpus")
    assert gpus_here({}) == ()
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert gpus_here({}) == ("0", "1")
    assert gpus_here({VISIBLE: "3, GPU-5b"}) == ("3", "GPU-5b")
    assert gpus_here({VISIBLE: ""}) == ()
