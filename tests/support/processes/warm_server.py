"""The process that `warm` forks others from: it imports what they will need, and waits. Has no thread, and calls nothing of gRPC.

`python -m tests.support.processes.warm_server SOCKET`: each request is a length, a JSON list of the words and the environment of
a new process, and its three standard streams; the answer is its number. It ends when the socket does.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys

# What most roles, commands and programs for workers import.
_IMPORTED = ("numpy", "chief.serving.server", "ps_server.server", "worker_client.session.session", "lockstep.cli.clusters.up")


def main(number: int) -> list[str]:
    """Serves until the socket ends; returns in each new process, with its words."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # or the first collection of each process would copy the pages of all that
    with socket.socket(fileno=number) as requests:
        while True:
            head, streams, _, _ = socket.recv_fds(requests, 4, 3)
            if not head:
                sys.exit()
            body = bytearray()
            while len(body) < int.from_bytes(head, "big"):
                body += requests.recv(1 << 20)
            words, environment = json.loads(body)
            if _is_new(requests):
                break
            for stream in streams:
                os.close(stream)
    _become(words, environment, streams)
    return list(words)


def _is_new(requests: socket.socket) -> bool:
    """Returns twice: True in the new process, whose parent is the tests' process by then, and False here, when its number is sent."""
    number, tell = os.pipe()
    gate, hold = os.pipe()  # ends with the process between, which alone holds it
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            os.close(hold)
            os.read(gate, 1)
            for end in (number, tell, gate):
                os.close(end)
            return True
        os.write(tell, str(child).encode())
        os._exit(0)
    for end in (tell, gate, hold):
        os.close(end)
    os.waitpid(between, 0)
    requests.sendall(os.read(number, 16))
    os.close(number)
    return False


def _become(words: list[str], environment: dict[str, str], streams: list[int]) -> None:
    """Gives this process what an executed one would have."""
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.orig_argv = [sys.executable, "-m", *words]


if __name__ == "__main__":
    module, *rest = main(int(sys.argv[1]))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
