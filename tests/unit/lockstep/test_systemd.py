"""`lockstep systemd`: units that systemd takes, with each role's own flags and secrets, and a sentence for what makes no cluster."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes.commands import Ended, lockstep_here
from tests.support.repository import printed

FLAGS = ("--address", "h1:5000", "--ps", "h1:5001,[::1]:5002", "--workers", "2:4", "--certs-dir", "/etc/job", "--cluster", "job")


def systemd(directory: Path, *flags: str) -> Ended:
    return lockstep_here("systemd", "--out", str(directory), *flags)


def settings_of(path: Path) -> dict[str, list[str]]:
    """The settings of a unit, by name."""
    found: dict[str, list[str]] = {}
    for name, equals, text in (line.partition("=") for line in path.read_text().splitlines()):
        if equals:
            found.setdefault(name, []).append(text)
    return found


def environment_of(path: Path) -> dict[str, str]:
    words = (text.strip('"').partition("=") for text in settings_of(path)["Environment"])
    return {name: text for name, _, text in words}


def test_each_role_has_a_unit_with_its_own_place_flags_and_secrets(tmp_path: Path) -> None:
    ended = systemd(
        tmp_path, *FLAGS, "--max-steps", "50", "--checkpoint-dir", "/shared/job", "--", "/opt/job/python", "train.py", "50%", "$x"
    )
    assert ended.returncode == 0, ended.stderr
    units = {path.name: path for path in tmp_path.iterdir()}
    assert sorted(units) == [f"lockstep-job-{name}.service" for name in ("chief", "ps-0", "ps-1", "worker@")]
    chief, server, worker = (units[f"lockstep-job-{name}.service"] for name in ("chief", "ps-1", "worker@"))
    told = environment_of(chief)
    assert told["LOCKSTEP_PS"] == "h1:5001,[::1]:5002" and told["LOCKSTEP_MAX_STEPS"] == "50"
    assert (told["LOCKSTEP_NUM_WORKERS"], told["LOCKSTEP_MIN_REPLICAS"]) == ("4", "2")
    assert (told["LOCKSTEP_ADDRESS"], told["LOCKSTEP_ADVERTISE"]) == ("0.0.0.0:5000", "h1:5000")
    assert settings_of(chief)["ExecStart"][0].endswith('"-P" "-m" "chief" "--takeover"')
    assert settings_of(chief)["LoadCredential"] == [f"{name}:/etc/job/{name}" for name in ("tokens", "ca.pem", "chief.pem", "chief.key")]
    told = environment_of(server)
    assert (told["LOCKSTEP_PS_INDEX"], told["LOCKSTEP_ADDRESS"], told["LOCKSTEP_TLS_KEY"]) == ("1", "0.0.0.0:5002", "%d/ps.key")
    assert "LOCKSTEP_MAX_STEPS" not in told and settings_of(server)["ReadWritePaths"] == ["/shared/job"]
    told = environment_of(worker)
    assert (
        told["LOCKSTEP_WORKER_INDEX"] == "%i" and told["LOCKSTEP_CHIEF"] == "h1:5000" and told["LOCKSTEP_TOKEN_FILE"] == "%d/worker.token"
    )
    assert settings_of(worker)["LoadCredential"] == ["worker.token:/etc/job/worker.token", "ca.pem:/etc/job/ca.pem"], "no key"
    assert settings_of(worker)["ExecStart"] == ['"/opt/job/python" "train.py" "50%%" "$$x"']


def test_the_documented_command_writes_a_unit_for_each_role(tmp_path: Path) -> None:
    _, command, *flags = shlex.split(printed("lockstep systemd"))
    assert lockstep_here(command, "--out", str(tmp_path), *flags).returncode == 0
    assert len([*tmp_path.iterdir()]) == 4


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze in PATH; Debian has it in systemd")
    assert systemd(tmp_path, *FLAGS, "--worker-dir", "/", "--", shutil.which("true") or "/bin/true", 'a "b" \\c').returncode == 0
    (tmp_path / "lockstep-job-worker@.service").rename(tmp_path / "lockstep-job-worker@3.service")
    names = sorted(str(path) for path in tmp_path.iterdir())
    ended = subprocess.run(["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, check=False)
    assert (ended.returncode, [line for line in ended.stderr.splitlines() if "lockstep-job" in line]) == (0, []), ended.stderr


def test_where_everybody_is_trusted_there_are_no_secrets(tmp_path: Path) -> None:
    ended = systemd(tmp_path, "--address", "h1:5000", "--ps", "h1:5001", "--workers", "1", "--allow-insecure-network")
    assert ended.returncode == 0, ended.stderr
    for name in ("chief", "ps-0"):
        path = tmp_path / f"lockstep-lockstep-{name}.service"
        assert environment_of(path)["LOCKSTEP_ALLOW_INSECURE_NETWORK"] == "1" and "LoadCredential" not in settings_of(path)


def test_the_printed_commands_install_each_unit_on_its_host(tmp_path: Path) -> None:
    said = systemd(tmp_path, *FLAGS).stdout
    assert f"scp {tmp_path}/lockstep-job-ps-1.service [::1]:/etc/systemd/system/" in said
    assert "ssh h1 systemctl enable --now lockstep-job-chief.service" in said and "worker" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--address", "h1:5000", "--workers", "1", "--certs-dir", "/c"), "which parameter servers? give --ps"),
        (("--ps", "h1:5001", "--workers", "1", "--certs-dir", "/c"), "--address: got '', want where the other hosts reach it"),
        ((*FLAGS, "--address", "h1:0"), "'h1:0': port 0, want 1 to 65535"),
        ((*FLAGS, "--ps", "h1:5001,h1:5000"), "--ps: h1:5000 (of ps 1) is the chief's; each needs its own address"),
        ((*FLAGS, "--ps", "unix:/s"), "--ps: got 'unix:/s', want where the other hosts reach it"),
        (("--address", "h1:5000", "--ps", "h1:5001", "--workers", "1"), "--certs-dir: give where each host has its files"),
        ((*FLAGS, "--user", "a b"), "--user: got 'a b', want the name of a user"),
        ((*FLAGS, "--certs-dir", "certs"), "--certs-dir: got 'certs', want a path from the root"),
        ((*FLAGS, "--", "python", "train.py"), "-- python: systemd wants the program's path from the root"),
        ((*FLAGS, "--", "/bin/sh", "-c", "a\nb"), "holds one line of printable characters"),
        ((*FLAGS, "--policy", "sinc"), "--policy"),
    ],
)
def test_what_makes_no_cluster_is_refused_in_a_sentence(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    ended = systemd(tmp_path, *flags)
    assert ended.returncode == 2 and words in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
    assert not [*tmp_path.iterdir()]
