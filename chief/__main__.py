"""`python -m chief`: the chief of a cluster until training is over. Sets up log and signals; knows no RPC."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from ps_protocol.process.memory import importing_for_good

with importing_for_good():
    from chief.config import ChiefConfig, parse_config
    from ps_protocol.process import polling
    from ps_protocol.process.ending import EndSignals
    from ps_protocol.process.failpoints import enable_failpoints
    from ps_protocol.process.logs import run_role


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after training, 1 if it failed, 2 if it could not start, with one line that says why."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        config = parse_config(words, environment=os.environ)
        enable_failpoints(os.environ, is_enabled=config.enable_failpoints)
        return asyncio.run(_serve(config))

    return run_role("lockstep chief", words, run)


async def _serve(config: ChiefConfig) -> int:
    polling.expect_workers(config.coordination.num_workers)
    # Not before: it imports grpc.
    with importing_for_good():
        from chief.serving.server import ChiefServer

    server = ChiefServer(config)
    loop = asyncio.get_running_loop()
    end = EndSignals(server.request_stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        await server.start()
        return await server.wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
