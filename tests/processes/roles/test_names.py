"""A parameter server with a DNS name: the name may be unknown for a while, and may later belong to another machine."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from ps_server.config import ParameterServerConfig
from tests.support.parameter_servers.shards import open_server
from tests.support.processes.processes import talking

NAME = "ps0.lockstep.test"
# In a mount namespace of its own a process has its own file of names, which the test writes.
WITH_NAMES = ("unshare", "-rm", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


def answer(lines: IO[bytes]) -> int:
    """Returns which process has answered; until one has, the lines say why not."""
    return next(int(line) for line in lines if line.strip().isdigit())


@pytest.mark.shows("F34")
def test_a_name_that_is_unknown_and_then_means_another_address_is_asked_for_again(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    try:
        probe = subprocess.run([*WITH_NAMES, hosts, "true"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("no `unshare` on this machine")
    if probe.returncode:
        pytest.skip(f"this system permits no mount namespace: {probe.stderr.strip()}")

    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        address = first.enter_context(open_server(ParameterServerConfig(index=0, address="127.0.0.1:0"))).address
        port = address.rpartition(":")[2]
        words = (sys.executable, "-m", "tests.support.processes.named_server", f"{NAME}:{port}")
        client = talking(stack, *WITH_NAMES, hosts, *words)
        assert client.stdin and client.stdout
        client.stdin.write(b"\n")
        client.stdin.flush()
        assert NAME.encode() in client.stdout.readline(), "it says whom it cannot reach"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {NAME}\n")
        before = answer(client.stdout)

        first.close()
        stack.enter_context(open_server(ParameterServerConfig(index=0, address=f"127.0.0.2:{port}")))
        hosts.write_text(f"127.0.0.1 localhost\n127.0.0.2 {NAME}\n")
        client.stdin.write(b"\n")
        client.stdin.flush()
        assert answer(client.stdout) != before
