"""Shakes hands with the parameter server of a DNS name, for each line of its input until it answers. Asserts nothing."""

import contextlib
import sys

from ps_protocol.errors import Unavailable
from ps_protocol.process.waiting import call
from ps_protocol.roles.identity import HandshakeReply
from tests.support.parameter_servers.commanded_shard import CommandedShard


def main(address: str) -> None:
    said = set[str]()
    with contextlib.closing(CommandedShard(address, index=0)) as shard:

        def ask(timeout_s: float) -> HandshakeReply:
            try:
                return shard.handshake(timeout_s=min(timeout_s, 5.0))
            except Unavailable as error:
                if error.message not in said:
                    said.add(error.message)
                    print(error.message, flush=True)
                raise

        for _ in sys.stdin:
            print(call(ask, what="asking for the server", timeout_s=40.0).identity.process_incarnation, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
