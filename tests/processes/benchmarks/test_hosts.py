"""Hosts in network namespaces, and the links between them. Needs root."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.harness.hosts import Hosts

_SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 20):
    pass
connection.sendall(b"x")
"""
_CLIENT = """
import socket, sys, time
begin = time.monotonic()
connection = socket.create_connection((sys.argv[1], 5000))
connected = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(connected - begin, time.monotonic() - connected)
"""


@pytest.mark.timeout(120)
def test_a_link_has_its_rate_and_its_delay() -> None:
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter"))) or not os.path.exists("/dev/net/tun"):
        pytest.skip("network namespaces need root, `ip`, `nsenter` and /dev/net/tun")
    with Hosts(2, rate=4e6, delay_s=0.05) as hosts:
        address = hosts.address(0)
        server = subprocess.Popen(hosts.on(0, [sys.executable, "-c", _SERVER, address]), stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            command = hosts.on(1, [sys.executable, "-c", _CLIENT, address, str(2 << 20)])
            found = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
            server.communicate(timeout=20)
        finally:
            server.kill()
            server.communicate()
    connect_s, send_s = map(float, found.stdout.split())
    assert connect_s >= 0.1, "a connection takes a round trip"
    assert send_s >= (2 << 20) / 4e6 + 0.1, "bytes take their time, and the answer a round trip"
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True, text=True).stdout
    assert f"lockstep-{os.getpid()}-" not in names, "the hosts are gone"
