"""`lockstep store` over a real cluster: killed in the middle of its writing again and again, it never shows a reader a wrong bit."""

import signal
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import worker_client
from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.model.variables import Array
from tests.chaos.conftest import filled
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.processes.processes import end_of, speaking
from tests.support.waiting import wait_until
from worker_client import Follower, Session

VALUES: dict[str, Array] = {"w": np.linspace(-1, 1, 3_000, dtype=np.float32).reshape(30, 100), "d": np.array(2.5)}
# In the middle of the first anchor's first file, of its second, of a patch's; files that are there but not named; not there yet.
KILLED_AT = ["ps.save.mid_file=kill@1", "ps.save.mid_file=kill@2", "ps.save.mid_file=kill@7"]
KILLED_AT += ["chief.manifest.before_rename=kill@3", "chief.manifest.after_rename=kill@2"]


class Trainer:
    """A worker that knows the values of each step that it made."""

    def __init__(self, session: Session) -> None:
        self.session, self.rng = session, np.random.default_rng(0)
        session.create_or_join(VALUES, optimizer=worker_client.adam(1e-5))
        self.values: dict[int, dict[str, Array]] = {}
        self._keep()

    def step(self) -> int:
        self.session.step({name: self.rng.normal(size=value.shape).astype(value.dtype) for name, value in VALUES.items()}, timeout_s=30)
        self._keep()
        return self.session.global_step

    def _keep(self) -> None:
        self.values[self.session.global_step] = {
            name: value.astype(ml_dtypes.bfloat16).astype(np.float32) if value.dtype == np.float32 else value.copy()
            for name, value in self.session.read().items()
        }

    def check(self, weights: Follower) -> None:
        weights.wait(timeout_s=30)
        arrays, step = weights.arrays, weights.step
        assert step is not None
        for name, value in self.values[step].items():
            np.testing.assert_array_equal(arrays[name], value, err_msg=f"{name} at step {step}")


@pytest.mark.shows("F39")
def test_one_that_is_killed_while_it_writes_never_shows_a_wrong_bit(socket_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "weights"
    with ExitStack() as stack:
        cluster = ProcessCluster(Plan(num_ps=2, num_workers=1), stack, directory=socket_dir).start()
        trainer = Trainer(cluster.session())
        words = ["-m", "lockstep", "store", "--chief", cluster.chief_address, "--to", place, "--wire", "bfloat16"]
        words += ["--anchor-steps", "3", "--keep-s", "1"]
        weights = stack.enter_context(closing(worker_client.follow(place, interval_s=0.02)))
        for point in KILLED_AT:
            failpoints = {"LOCKSTEP_ENABLE_FAILPOINTS": "1", "LOCKSTEP_FAILPOINTS": point}
            with speaking(*words, environment=failpoints) as process:
                while process.poll() is None:
                    trainer.step()
                    if weights.shapes:
                        trainer.check(weights)
                assert process.returncode == -signal.SIGKILL, end_of(process)
        with speaking(*words, stdout=subprocess.PIPE) as process:
            trainer.step()
            newest = trainer.session.global_step
            assert weights.wait(step=newest, timeout_s=60) == newest
            trainer.check(weights)
            late = stack.enter_context(closing(worker_client.follow(place)))
            assert late.wait(step=newest, timeout_s=30) == newest
            trainer.check(late)
            wait_until(lambda: all(one.is_whole for one in open_storage(str(place)).stored()), what="leftovers are removed")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        with speaking(*words, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert "keeping the weights in" in process.stdout.readline(), "after an orderly end nobody waits"
            trainer.step()
            newest = trainer.session.global_step
            assert weights.wait(step=newest, timeout_s=30) == newest
            trainer.check(weights)
            trainer.session.finish("done")
            assert process.wait(30) == 0, end_of(process)
        wait_until(lambda: weights.wait() == newest and weights.is_over, what="the reader hears of the end")


@pytest.mark.shows("F19", "F39")
def test_on_a_full_disk_readers_keep_what_they_have_and_go_on_once_there_is_room(disk: Path, socket_dir: Path) -> None:
    """Also where the writer is killed meanwhile, and started again while there is no room."""
    with ExitStack() as stack:
        cluster = ProcessCluster(Plan(num_ps=2, num_workers=1), stack, directory=socket_dir).start()
        trainer = Trainer(cluster.session())
        words = ["-m", "lockstep", "store", "--chief", cluster.chief_address, "--to", disk, "--wire", "bfloat16"]
        keeping = stack.enter_context(speaking(*words))
        readers = [stack.enter_context(closing(worker_client.follow(disk, interval_s=0.02)))]
        held = readers[0].wait(step=trainer.step(), timeout_s=30)
        filler = filled(disk)
        trainer.step()
        await_words(keeping, "the weights are not written: ")
        keeping.kill()
        keeping.wait()
        keeping = stack.enter_context(speaking(*words))
        trainer.step()
        await_words(keeping, "the weights are not written: ")
        readers.append(stack.enter_context(closing(worker_client.follow(disk, interval_s=0.02))))
        for weights in readers:
            trainer.check(weights)
            assert weights.step == held
        filler.unlink()
        newest = trainer.step()
        for weights in readers:
            assert weights.wait(step=newest, timeout_s=30) == newest
            trainer.check(weights)
        assert keeping.poll() is None


def await_words(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return
    pytest.fail(f"it ended without saying {words!r}: {said}")
