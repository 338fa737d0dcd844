"""Has a node of Ray run a shell command, as ssh does: `ray_reach.py SOCKET NODE COMMAND`. A program of its own, stdlib only.

Hands its standard input and outputs to the bridge at SOCKET, and ends when the bridge closes the connection.
"""

import json
import socket
import sys


def main(path: str, node: str, command: str) -> int:
    """Returns 0 if the command has ended, 1 if the node or the bridge is lost."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bridge:
        bridge.connect(path)
        socket.send_fds(bridge, [json.dumps({"node": node, "command": command}).encode()], [0, 1, 2])
        bridge.shutdown(socket.SHUT_WR)
        return 0 if bridge.recv(1) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
