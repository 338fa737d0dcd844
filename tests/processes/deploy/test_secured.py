"""Whole clusters of real processes with authentication: tokens of the launcher, TLS with certificates, and every command against them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import worker_client
from ps_protocol.errors import PermissionDenied, Unauthenticated
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.tokens import parse_tokens
from tests.support.network.certificates import Files, make
from tests.support.processes.commands import TRAIN, lockstep_here, read_until, up
from tests.support.processes.processes import announced, start_role


@dataclass(frozen=True)
class Cluster:
    """Where the chief is, and the files of its cluster."""

    chief: str
    files: Files

    def proofs(self, role: str = "worker") -> dict[str, Any]:
        directory = self.files.directory
        proof = {"tls_ca": directory / "ca.pem", "tls_cert": directory / f"{role}.pem", "tls_key": directory / f"{role}.key"}
        return {"token_file": directory / f"{role}.token", **proof}

    def flags(self, role: str) -> list[str]:
        return [word for name, path in self.proofs(role).items() for word in (f"--{name.replace('_', '-')}", str(path))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two parameter servers and a chief over TCP that want TLS, a token and a certificate."""
    directory = tmp_path_factory.mktemp("secured")
    files = make(directory / "certs", cluster="job")

    def start(stack: contextlib.ExitStack, name: str, role: str, *words: str) -> str:
        certs = files.directory
        flags = ["--tls-ca", certs / "ca.pem", "--tls-cert", certs / f"{role}.pem", "--tls-key", certs / f"{role}.key", "--verify-clients"]
        place = ["--cluster", "job", "--token-file", certs / "tokens", "--address", "127.0.0.1:0"]
        module = "ps_server" if role == "ps" else "chief"
        return announced(start_role(stack, module, *place, *flags, *words, announce=directory / name), directory / name)

    with contextlib.ExitStack() as stack:
        servers = [start(stack, f"ps{index}", "ps", "--index", str(index)) for index in range(2)]
        cluster = Cluster(start(stack, "chief", "chief", "--ps", ",".join(servers), "--workers", "1"), files)
        # The processes stay as long as somebody looks on.
        security = worker_client.Security(**cluster.proofs("observer"))
        stack.enter_context(worker_client.observe(cluster.chief, timeout_s=20, security=security))
        yield cluster


def test_training_continues_under_tls_tokens_and_certificates(cluster: Cluster) -> None:
    with worker_client.connect(cluster.chief, timeout_s=20, security=worker_client.Security(**cluster.proofs())) as session:
        halves = worker_client.fixed_size_partitioner(2)
        values = {"w": np.zeros((64, 8), np.float32), "rows": worker_client.EmbeddingTable((30, 2), partitioner=halves)}
        session.create_or_join(values, optimizer=worker_client.sgd(1.0))
        for _ in range(5):
            session.step({"w": np.ones((64, 8), np.float32), "rows": np.ones((30, 2), np.float32)}, timeout_s=20)
        assert (session.read()["w"] == -5.0).all()
        with worker_client.observe(cluster.chief, timeout_s=20, security=worker_client.Security(**cluster.proofs("observer"))) as observer:
            assert (observer.read()["w"] == -5.0).all()
            assert (observer.read_rows("rows", [3]) == -5.0).all()
            with pytest.raises(PermissionDenied, match="ChangeSettings needs role admin or worker, token has role observer"):
                observer.set_policy(worker_client.async_policy())


def test_status_and_health_reach_a_secured_cluster(cluster: Cluster) -> None:
    for words in (["status", "--chief", cluster.chief, *cluster.flags("admin")], ["health", "--address", cluster.chief]):
        flags = cluster.flags("admin")[2:] if words[0] == "health" else []
        result = lockstep_here(*words, *flags)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "server speaks TLS; pass tls=True or --tls-ca"),
        (["--tls-ca"], "pass --tls-cert and --tls-key"),
        (["--tls-ca", "--tls-cert", "--tls-key"], "missing token. Set LOCKSTEP_TOKEN_FILE or pass token="),
    ],
)
def test_command_without_its_proofs_says_what_to_pass(cluster: Cluster, flags: list[str], words: str) -> None:
    own = cluster.flags("admin")
    given = [word for flag in flags for word in own[own.index(flag) : own.index(flag) + 2]]
    begin = time.monotonic()
    result = lockstep_here("status", "--chief", cluster.chief, *given)
    assert result.returncode != 0
    assert words in result.stderr
    assert time.monotonic() - begin < 20


def test_worker_without_its_proofs_is_refused_at_once(cluster: Cluster) -> None:
    files = {**cluster.proofs(), "token_file": None}
    with pytest.raises(Unauthenticated, match=r"^missing token"):
        worker_client.connect(cluster.chief, timeout_s=20, security=worker_client.Security(**files))
    with pytest.raises(Unauthenticated, match=r"^invalid token$"):
        worker_client.connect(cluster.chief, timeout_s=20, security=worker_client.Security(token="0" * 64, **files))


@pytest.mark.parametrize("network", [[], ["--tcp"]], ids=["unix", "tcp"])
def test_cluster_of_the_launcher_has_tokens_without_any_option(tmp_path: Path, network: list[str]) -> None:
    # The shell speaks of another cluster; that must not matter.
    shell = {"LOCKSTEP_TLS_CA": "/nowhere", "LOCKSTEP_TOKEN": "of another cluster"}
    with up("--workers", "1", *network, worker=TRAIN, run_dir=tmp_path / "run", **shell) as process:
        lines = read_until(process, "step 3")
        words = next(line for line in lines if "lockstep status --chief" in line).partition("lockstep status ")[2].split()
        chief = words[words.index("--chief") + 1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        result = subprocess.run(
            [sys.executable, "-m", "lockstep", "status", *words], capture_output=True, text=True, timeout=30, env=environment
        )
        assert result.returncode == 0, result.stderr
        assert_secrets_are_nowhere(psutil.Process(process.pid), logs=tmp_path / "run" / "logs")
        if network:
            with contextlib.closing(GrpcChief(chief)) as client, pytest.raises(Unauthenticated, match=r"^missing token"):
                client.handshake()
        process.terminate()
        process.communicate(timeout=30)


def assert_secrets_are_nowhere(launcher: psutil.Process, *, logs: Path) -> None:
    """Neither on a command line nor in a log: where others look, and what people send around."""
    family = launcher.children(recursive=True)
    (path,) = {one.environ()["LOCKSTEP_TOKEN_FILE"] for one in family if "LOCKSTEP_TOKEN_FILE" in one.environ()}
    tokens = parse_tokens(Path(path).read_text(), name="tokens")
    assert Path(path).stat().st_mode & 0o77 == 0 and Path(path).parent.stat().st_mode & 0o77 == 0
    said = [" ".join(one.cmdline()) for one in (launcher, *family)] + [log.read_text() for log in logs.iterdir()]
    assert len(said) > 5
    assert not [token for token in tokens for text in said if token in text]
