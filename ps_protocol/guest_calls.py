"""Calls of those who only look, or operate: only so many at once, so that they keep nobody from training. Knows roles and contexts."""

import threading
from collections import Counter
from collections.abc import Set as AbstractSet

import grpc

from ps_protocol.authorization import CallerRole
from ps_protocol.errors import LimitExceeded

# Of each of these roles at one server. A call may hold a thread, and a message of up to 16 MiB.
MAX_GUEST_CALLS = 256
_GUESTS = frozenset({CallerRole.OBSERVER, CallerRole.ADMIN, CallerRole.PS})


def are_guests(roles: AbstractSet[CallerRole]) -> bool:
    """Whether who has these roles takes no part in training."""
    return bool(roles) and roles <= _GUESTS


class GuestCalls:
    """Counts the calls under way of each such role. Thread-safe."""

    def __init__(self) -> None:
        self._limit = MAX_GUEST_CALLS
        self._lock = threading.Lock()
        self._num: Counter[CallerRole] = Counter()

    def enter(self, role: CallerRole, context: grpc.ServicerContext) -> None:
        """Counts a call until it ends. Raises LimitExceeded."""
        with self._lock:
            if self._num[role] >= self._limit:
                raise LimitExceeded(f"{self._limit} calls with the role {role.value} are under way at this server; end some of them")
            self._num[role] += 1
        if not context.add_callback(lambda: self._leave(role)):
            self._leave(role)

    def _leave(self, role: CallerRole) -> None:
        with self._lock:
            self._num[role] -= 1
