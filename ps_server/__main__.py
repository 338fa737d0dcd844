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
    """Returns the exit code: 0 after an orderly end, 2 if it could not start, with one line that says why.

    Ends the process with 1 if the system refuses it memory or a thread.
    """
    _leave_out_openssl(
        are_files_hashed=_is_given("--checkpoint-dir", "LOCKSTEP_CHECKPOINT_DIR"), serves_http=_is_given("--metrics", "LOCKSTEP_METRICS")
    )
    # Each worker has some, and the server does not know how many workers there will be.
    polling.expect_many_connections()
    # Not before: what they import looks for OpenSSL, and imports grpc.
    with importing_for_good():
        from ps_protocol.errors import PsError
        from ps_protocol.process.exhaustion import end_if_exhausted, ending_without_memory
        from ps_protocol.process.failpoints import enable_failpoints
        from ps_protocol.process.listening import allow_many_connections
        from ps_protocol.process.logs import log_format_of, logging_to_stderr, write_last_words
        from ps_protocol.process.memory import keep_freed_memory
        from ps_protocol.process.options import LOG_FORMAT
        from ps_server.config import parse_config
        from ps_server.server import ParameterServer

    keep_freed_memory(num_heaps=1)
    allow_many_connections()
    log_format = LOG_FORMAT.default
    try:
        log_format = log_format_of(sys.argv[1:], os.environ)
        with logging_to_stderr(log_format), ending_without_memory():
            config = parse_config(sys.argv[1:], environment=os.environ)
            enable_failpoints(os.environ, is_enabled=config.enable_failpoints)
            _serve(ParameterServer(config))
    except PsError as error:
        write_last_words("lockstep server", error.message, log_format)
        return ExitCode.USAGE
    except (MemoryError, OSError, RuntimeError) as error:
        end_if_exhausted(error, lambda words: write_last_words("lockstep server", words, log_format))
        raise
    return 0


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
