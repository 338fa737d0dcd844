"""A worker for the tests of Ctrl-C: goes to the wanted phase, tells so on stdout, and stays there until it is interrupted."""

import sys

import numpy as np

import worker_client

# 64 MiB, so that a server that is stopped cannot take all of it into its sockets' buffers.
VALUES = {"w": np.zeros(8 << 20)}


def main(phase: str, chief: str) -> None:
    """Goes to `phase`: connecting or pushing."""
    if phase == "connecting":
        print(phase, flush=True)
    # Over shared memory the transfer would not wait for the server.
    with worker_client.connect(chief, timeout_s=60, transport="grpc") as session:
        session.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))
        print(phase, flush=True)
        # The test stops the parameter server before it says that it has.
        sys.stdin.readline()
        session.push(session.gradient_buffers())


if __name__ == "__main__":
    main(*sys.argv[1:])
