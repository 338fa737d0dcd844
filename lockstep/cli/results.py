"""What a command answers, and how it fails. Prints nothing: `lockstep/__main__.py` does. Knows no chief and no gRPC."""

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.exit_codes import ExitCode


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command: as text, and as a value for --json."""

    words: str
    fields: object
    exit_code: int = ExitCode.DONE


class CommandFailed(Exception):
    """A command failed; the text is for the user."""

    def __init__(self, message: str, *, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
