"""`python -m ps_server`: one parameter server until a signal or its chief ends it. Sets up log and signals; knows no RPC."""

import logging
import os
import signal
import sys
from types import FrameType

from ps_protocol.errors import PsError
from ps_server.config import parse_config
from ps_server.server import ParameterServer

_EXIT_USAGE = 2


def main() -> int:
    """Returns the exit code: 0 after an orderly end, 2 if it could not start, with one line that says why."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        server = ParameterServer(parse_config(sys.argv[1:], environment=os.environ))
    except PsError as error:
        return _refuse(error)

    def end(number: int, frame: FrameType | None) -> None:
        server.request_stop(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        server.start()
    except PsError as error:
        server.stop(0.0, reason="could not start")
        return _refuse(error)
    server.stop(reason=server.wait())
    return 0


def _refuse(error: PsError) -> int:
    sys.stderr.write(f"ps_server: {error.message}\n")
    return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
