"""What all typed errors have. Knows no grpc."""

from collections.abc import Mapping


class PsError(Exception):
    """An error that a user can act on: a text that says what, which and what to do, a stable `reason`, and facts for programs."""

    reason = "INTERNAL"

    def __init__(self, message: str, *, facts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, str] = dict(facts or {})
