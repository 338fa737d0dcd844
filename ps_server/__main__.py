"""`python -m ps_server`: one parameter server until a signal or its chief ends it. Sets up memory, log and signals; knows no RPC."""

import importlib.util
import os
import signal
import sys
from typing import TYPE_CHECKING

from ps_protocol.process import polling
from ps_protocol.process.ending import EndSignals
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.memory import importing_for_good

if TYPE_CHECKING:
    from ps_server.server import ParameterServer


def main() -> int:
    """Returns the exit code: 0 after an orderly end, 2 if it could not start, with one line that says why."""
    _leave_out_openssl(
        are_files_hashed=_is_given("--checkpoint-dir", "LOCKSTEP_CHECKPOINT_DIR"), serves_http=_is_given("--metrics", "LOCKSTEP_METRICS")
    )
    # Each worker has some, and the server does not know how many workers there will be.
    polling.expect_many_connections()
    # Not before: what they import looks for OpenSSL, and imports grpc.
    with importing_for_good():
        from ps_protocol.process.failpoints import enable_failpoints
        from ps_protocol.process.logs import run_role
        from ps_protocol.process.memory import keep_freed_memory
        from ps_server.config import parse_config
        from ps_server.server import ParameterServer

    keep_freed_memory(num_heaps=1)

    def run() -> int:
        config = parse_config(sys.argv[1:], environment=os.environ)
        enable_failpoints(os.environ, is_enabled=config.enable_failpoints)
        _serve(ParameterServer(config))
        return ExitCode.DONE

    return run_role("lockstep server", sys.argv[1:], run)


def _serve(server: "ParameterServer") -> None:
    from ps_protocol.errors import PsError

    end = EndSignals(server.request_stop)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    try:
        server.start()
    except PsError:
        server.stop(0.0, reason="could not start")
        raise
    server.stop(reason=server.wait())


def _is_given(flag: str, variable: str) -> bool:
    """Whether the process is given an option: needed before the flags can be parsed."""
    return bool(os.environ.get(variable)) or any(argument.startswith(flag) for argument in sys.argv)


def _leave_out_openssl(*, are_files_hashed: bool, serves_http: bool) -> None:
    """Spares this process OpenSSL, 4.5 MiB: asyncio and hashlib do without if it is not there, and gRPC has a TLS of its own.

    Where checkpoints are hashed, its SHA-256 stays: Python's own takes several times as long, and holds all other threads up meanwhile.
    """
    if not serves_http:
        sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # None: importing it raises ImportError
    has_hashes = importlib.util.find_spec("_md5") and (importlib.util.find_spec("_sha2") or importlib.util.find_spec("_sha256"))
    if has_hashes and not are_files_hashed:
        sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
