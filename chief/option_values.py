"""Options of a command as flags or LOCKSTEP_* have them, read and checked one by one. Knows texts; no option."""

import enum
import math
from collections.abc import Mapping
from typing import TypeVar

from ps_protocol.errors import InvalidSpec

Choice = TypeVar("Choice", bound=enum.Enum)


def option_text(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name and the text of an option: the flag's, else the variable's."""
    return (flag, given) if given is not None else (variable, environment.get(variable, "").strip())


def integer(flag: str, given: str | None, variable: str, environment: Mapping[str, str], *, least: int = 1) -> int | None:
    """Returns a whole number; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = int(text) if len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or value < least:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a whole number >= {least}")
    return value


def choice(kind: type[Choice], flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> Choice | None:
    """Returns the member of this word; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    by_word = {member.name.lower(): member for member in kind}
    if text.strip().lower() not in by_word:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want {' or '.join(by_word)}")
    return by_word[text.strip().lower()]


def number(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> float | None:
    """Returns a number > 0; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a number of seconds > 0")
    return value


def truth(variable: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a variable says yes. Raises InvalidSpec."""
    text = environment.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise InvalidSpec(f"{variable}: got {text!r}, want 1 or 0")
