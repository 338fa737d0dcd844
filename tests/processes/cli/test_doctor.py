"""`lockstep doctor` as a user runs it: without a peer, and with the roles of a cluster."""

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.network.servers import unused_address
from tests.support.processes.commands import lockstep, lockstep_here
from tests.support.processes.processes import speaking
from tests.support.waiting import wait_until


def found_by(*words: str) -> tuple[int, list[dict[str, Any]]]:
    ended = lockstep_here("doctor", "--json", *words)
    return ended.returncode, json.loads(ended.stdout)["findings"]


def test_report_of_a_machine_ends_with_a_sum_and_zero() -> None:
    ended = lockstep("doctor", timeout_s=50.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, last = ended.stdout.splitlines()
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail", last)
    assert "\x1b" not in ended.stdout


def test_absent_peer_fails_and_says_what_to_do() -> None:
    code, findings = found_by(unused_address())
    assert code == 1
    # On a busy machine the time is up before the refusal comes.
    assert findings[-1]["severity"] == "fail" and "cannot reach" in findings[-1]["text"] and "firewall" in findings[-1]["advice"]


def test_an_invalid_address_is_refused() -> None:
    assert lockstep_here("doctor", "somewhere").returncode == 2


def test_the_doctor_checks_all_roles_of_a_cluster(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2), stack, directory=socket_dir)
        session = cluster.session()
        session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1), timeout_s=20)
        code, findings = found_by(cluster.chief_address)
        only_one, of_server = found_by(cluster.ps_addresses[0])
    assert code == only_one == 0, findings
    roles = [one["text"].partition(" of cluster")[0] for one in findings if one["check"] == "role"]
    assert roles == ["the chief", "ps 0", "ps 1"]
    assert [one["text"] for one in findings if one["check"] == "checkpoints"] == ["no role has a --checkpoint-dir"]
    assert "1 workers live" in next(one["text"] for one in findings if one["check"] == "cluster")
    assert [one["check"] for one in of_server].count("role") == 1


def checkpoints_of(socket_dir: Path, *, places: Sequence[Path], of_chief: Path, broken: Path | None = None) -> list[dict[str, str]]:
    """What the doctor finds about checkpoints of a chief and servers, each with a place of its own."""
    with ExitStack() as stack:
        servers = [
            start_role(stack, "server", "--index", str(index), "--checkpoint-dir", str(place), announce=socket_dir / f"a{index}")
            for index, place in enumerate(places)
        ]
        words = ("--workers", "1", "--ps", ",".join(servers), "--checkpoint-dir", str(of_chief))
        chief = start_role(stack, "chief", *words, announce=socket_dir / "chief")
        if broken is not None:
            broken.rmdir()
            broken.write_text("a file")
        return [one for one in found_by(chief)[1] if one["check"] == "checkpoints"]


def start_role(stack: ExitStack, role: str, *words: str, announce: Path) -> str:
    stack.enter_context(speaking("-m", "lockstep", role, *words, "--announce", str(announce)))
    wait_until(announce.exists, timeout_s=30, what="it serves")
    return announce.read_text().strip()


def test_every_role_writes_to_the_place_for_checkpoints_and_nothing_is_left(socket_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    (found,) = checkpoints_of(socket_dir, places=[place, place], of_chief=place)
    assert (found["severity"], found["text"]) == ("ok", f"{place}: 3 of 3 roles can write and read there, and share it")
    assert [*place.iterdir()] == []


def test_places_that_are_not_shared_are_named(socket_dir: Path, tmp_path: Path) -> None:
    (found,) = checkpoints_of(socket_dir, places=[tmp_path / "a", tmp_path / "b"], of_chief=tmp_path / "a")
    assert found["severity"] == "fail" and "cannot see what the other roles write there" in found["text"]
    assert str(tmp_path / "a") in found["text"] and str(tmp_path / "b") in found["text"]


def test_the_role_that_cannot_write_its_checkpoints_is_named(socket_dir: Path, tmp_path: Path) -> None:
    own, common = tmp_path / "own", tmp_path / "common"
    first, *rest = checkpoints_of(socket_dir, places=[own, common], of_chief=common, broken=own)
    assert first["severity"] == "fail" and first["text"].startswith("ps 0: ") and str(own) in first["text"]
    assert "every checkpoint fails" in first["advice"]
    assert not [one for one in rest if one["severity"] == "fail"]


@pytest.mark.parametrize(
    ("minor", "can", "failed"),
    [
        ("36", "yes", []),
        ("28+", "yes", []),
        ("20", "yes", ["v1.x: manifests of `lockstep k8s render` need 1.27 or newer"]),
        ("36", "no", ["you may not create services, jobs.batch: choose another namespace or user of kubectl, or ask for the right"]),
    ],
)
def test_the_doctor_asks_a_kubernetes_what_it_takes(
    minor: str, can: str, failed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = json.dumps({"major": "1", "minor": minor, "gitVersion": "v1.x"})
    known = "batch/v1 jobset.x-k8s.io/v1alpha2"
    answers = f"*version) echo '{version}';; *api-versions) echo {known};; *services | *jobs.batch) [ {can} = yes ];;"
    write_program(tmp_path / "kubectl", f'case "$*" in {answers} esac', monkeypatch)
    code, findings = found_by("--engine", "kubernetes")
    assert code == len(failed)
    assert [f"{one['text']}: {one['advice']}" for one in findings if one["severity"] == "fail"] == failed
    assert findings[-1]["text"] == "--as jobset works, --as trainjob does not, --cert-manager does not"


@pytest.mark.parametrize(
    ("engine", "program", "script", "words"),
    [
        ("kubernetes", "kubectl", "echo 'connection refused' >&2; exit 1", "kubectl: connection refused"),
        ("kubernetes", "kubectl", "echo '<html>'", "kubectl: its cluster answers as no Kubernetes does: '<html>'"),
        ("kubernetes", "kubectl", "echo '{}'", "kubectl: its cluster answers as no Kubernetes does: '{}'"),
        ("kubernetes", "", "", "kubectl: is not in PATH"),
        ("systemd", "", "", "systemctl: is not in PATH"),
        ("systemd", "systemctl", "", ""),
        ("mpi", "", "", "mpirun: is not in PATH"),
        ("mpi", "mpirun", "echo HYDRA build details:", "mpirun: is of another MPI: HYDRA build details:"),
        ("mpi", "mpirun", "echo 'mpirun (Open MPI) 4.1.4'", ""),
        ("torchrun", "", "", "torchrun: is not in PATH"),
        ("slurm", "", "", "srun: is not in PATH"),
        ("skypilot", "ssh", "", "hosts: --engine skypilot: this is no task of SkyPilot, in whose `run:` this command belongs"),
        ("slrm", "", "", "engine: there is no 'slrm'"),
    ],
)
def test_the_doctor_says_before_a_start_what_an_engine_lacks_here(
    engine: str, program: str, script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography", reason="several hosts need certificates, which the package cryptography makes")
    write_program(tmp_path / (program or "other"), script, monkeypatch)
    assert [f"{one['check']}: {one['text']}" for one in found_by("--engine", engine)[1] if one["severity"] == "fail"] == [
        *filter(None, [words])
    ]


def write_program(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes one that answers so, and leaves no other in PATH."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
