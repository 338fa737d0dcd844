"""A parameter server and the chief in one process: they start, are addressed and end as two separate processes do."""

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import lockstep.combined.__main__ as command
from ps_protocol.errors import Unauthenticated
from ps_protocol.process import logs
from ps_protocol.roles.chief import ClusterState, DeregisterRequest
from ps_protocol.roles.shard import ShardStatusRequest, ShutdownRequest
from ps_protocol.rpc.chief import GrpcChief
from tests.support.chief.running_chief import Worker, parameter_server
from tests.support.network.certificates import make
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.processes.commands import TRAIN, run_up
from tests.support.processes.processes import announced, end_of, speaking
from tests.support.waiting import wait_until


def combined(
    directory: Path, *chief_flags: str, index: int = 0, ps_flags: Sequence[str] = ()
) -> AbstractContextManager["subprocess.Popen[str]"]:
    flags = ["--index", str(index), "--announce", str(directory / "ps"), *ps_flags, "--with-chief", "--announce", str(directory / "chief")]
    flags += [] if "--workers" in chief_flags else ["--workers", "1"]
    return speaking("-m", "lockstep", "server", *flags, *chief_flags)


def test_training_with_another_server_runs_to_its_end_and_both_processes_end(tmp_path: Path) -> None:
    with (
        parameter_server(1) as other,
        combined(tmp_path, "--ps", f"self,{other.address}", "--workers", "1", "--max-steps", "3") as process,
    ):
        with contextlib.closing(GrpcChief(announced(process, tmp_path / "chief"))) as client, Worker(client) as worker:
            assert worker.registration.shard_addresses == (announced(process, tmp_path / "ps"), other.address)
            worker.join_model()
            for _ in range(3):
                worker.wait(worker.push(value=1.0))
            assert [round(value, 3) for value in worker.read()["w"]] == [-0.3] * 3
            client.call(DeregisterRequest(participant=worker.participant))
        assert "max_steps 3 reached" in other.wait()
        code, words = end_of(process)
    assert code == 0, words
    assert "Traceback" not in words


def test_a_signal_ends_both_roles_with_zero_and_no_training(tmp_path: Path) -> None:
    with combined(tmp_path) as process:
        with contextlib.closing(GrpcChief(announced(process, tmp_path / "chief"))) as client, Worker(client) as worker:
            worker.join_model()
            process.send_signal(signal.SIGINT)
            code, words = end_of(process)
    assert code == 0, words
    assert "SIGINT: this chief ends, and leaves the training to its successor" in words
    assert "training is finished" not in words
    assert "Traceback" not in words


def test_a_server_that_is_shut_down_ends_with_its_chief(tmp_path: Path) -> None:
    with combined(tmp_path) as process:
        announced(process, tmp_path / "chief")
        with contextlib.closing(CommandedShard(announced(process, tmp_path / "ps"))) as shard:
            wait_until(lambda: shard.call(ShardStatusRequest()).fence.epoch == 1, what="it is adopted")
            shard.call(ShutdownRequest(fence=shard.call(ShardStatusRequest()).fence, reason="an operator"))
        code, words = end_of(process)
    assert code == 0, words
    assert "its parameter server ends: an operator" in words


@pytest.mark.parametrize(
    ("chief_flags", "said"),
    [
        (["--ps", "127.0.0.1:5001"], "want the word self once, at index 0"),
        (["--ps", "127.0.0.1:5001,self"], "want the word self once, at index 0"),
        (["--ps=127.0.0.1:5001"], "want the word self once, at index 0"),
        (["--ps"], "want the word self once"),
        (["--workers=1", "--cluster=another"], "the chief is of 'another'"),
        (["--workers=1", "--cluster", "another"], "the chief is of 'another'"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_flags_that_make_no_sense_are_reported_in_one_line(
    chief_flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Of the whole process, which is that of all tests here.
    monkeypatch.setattr(command, "keep_freed_memory", lambda *, num_heaps: True)
    monkeypatch.setattr(logs, "allow_many_connections", lambda: None)
    assert command.main(["--index", "0", "--with-chief", *chief_flags]) == 2
    words = capsys.readouterr().err
    assert len(words.splitlines()) == 1, words
    assert said in words


def test_a_combined_process_killed_with_tokens_and_checkpoints_comes_back_at_the_saved_step(tmp_path: Path) -> None:
    """Both roles are gone at once, with all that they had in memory; who has no token gets nowhere before and after."""
    files = make(tmp_path / "certs", cluster="lockstep")
    (tmp_path / "saved").mkdir()
    recovery = ["--checkpoint-dir", str(tmp_path / "saved"), "--token-file", str(files.directory / "tokens")]
    chief_flags = [*recovery, "--durability", "step", "--replicas-to-aggregate", "1"]

    def client() -> GrpcChief:
        return GrpcChief(announced(process, tmp_path / "chief"), access=files.caller(tls=False))

    with combined(tmp_path, *chief_flags, ps_flags=recovery) as process:
        with contextlib.closing(GrpcChief(announced(process, tmp_path / "chief"))) as stranger, pytest.raises(Unauthenticated):
            stranger.status()
        with contextlib.closing(client()) as chief, Worker(chief) as worker:
            worker.shards = [CommandedShard(announced(process, tmp_path / "ps"), access=files.caller(tls=False))]
            worker.join_model()
            for _ in range(3):
                worker.wait(worker.push(value=1.0))
            process.kill()
            process.wait()
    for name in ("chief", "ps"):
        (tmp_path / name).unlink()
    with combined(tmp_path, *chief_flags, ps_flags=recovery) as process:
        with contextlib.closing(client()) as chief:
            wait_until(lambda: chief.status().state is ClusterState.TRAINING, timeout_s=30, what="training continues")
            assert chief.status().global_step == 3


def test_lockstep_up_runs_a_cluster_with_the_chief_in_ps_0(tmp_path: Path) -> None:
    flags = ["--ps", "2", "--workers", "2", "--max-steps", "20", "--chief-in-ps", "--tcp"]
    code, out = run_up(*flags, worker=TRAIN, run_dir=tmp_path / "run")
    assert code == 0, out
    assert out.count("value -10.0") == 2
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log"}
