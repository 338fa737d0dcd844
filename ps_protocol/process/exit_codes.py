"""The exit codes of every command and role. Ends nothing itself; docs/reference/cli.md has the table, made from here."""

import enum


class ExitCode(enum.IntEnum):
    """How a command or a role ended. A shell adds 128 to the number of a signal: see `of_signal`."""

    DONE = 0
    FAILED = 1
    USAGE = 2


MEANINGS: dict[str, str] = {
    "0": "it ended as it should: training finished (`lockstep up`: or no worker ever joined), or a signal asked a role to end",
    "1": "it failed, and the text says how: no chief answers, a check has failed, training ended early, a checkpoint is damaged",
    "2": "it did nothing, and one line says what to do: wrong flags, addresses or variables, no command or action, a port in use,"
    " a directory that cannot be written, an address that needs `--allow-insecure-network`",
    "128 + N": "signal N ended it: 130 after Ctrl-C, 143 after SIGTERM, 141 if nobody reads its output any more",
    "other": "`lockstep up`: that of the first worker or role that failed",
}


def of_signal(number: int) -> int:
    """Returns the exit code of a program that a signal ended."""
    return 128 + number
