"""Calls that last, and the tokens they began with: a call ends when its token is no longer good. Knows contexts and tokens; no method."""

import logging
import threading
import time

import grpc

from ps_protocol import credentials
from ps_protocol.authorization import CallerRole
from ps_protocol.credentials import TokenTable, authorization_in

log = logging.getLogger("lockstep.rpc")

_Seen = tuple[int, CallerRole]  # the table's version, and the role that the caller's token had by it


class StandingCalls:
    """The calls under way that last. Thread-safe; a thread of its own looks at the tokens for as long as there are such calls."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, _Seen] = {}
        self._is_watched = False

    def watch(self, context: grpc.ServicerContext) -> CallerRole:
        """Returns whose token the call has, and has it cancelled when the token is not of that role any more. Raises Unauthenticated."""
        version = self._tokens.version
        role = self._tokens.role_of(authorization_in(context.invocation_metadata()))
        with self._lock:
            self._calls[context] = version, role
            begins, self._is_watched = not self._is_watched, True
        if not context.add_callback(lambda: self._forget(context)):
            self._forget(context)
        if begins:
            threading.Thread(target=self._look, name="standing-calls", daemon=True).start()
        return role

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._calls.pop(context, None)

    def _look(self) -> None:
        while True:
            time.sleep(credentials.LOOK_INTERVAL_S or 0.01)
            self._tokens.renew()
            with self._lock:
                if not self._calls:
                    self._is_watched = False
                    return
                outdated = [(context, role) for context, (version, role) in self._calls.items() if version != self._tokens.version]
            for context, role in outdated:
                self._check(context, role)

    def _check(self, context: grpc.ServicerContext, role: CallerRole) -> None:
        version = self._tokens.version
        if self._tokens.is_token_of(role, authorization_in(context.invocation_metadata())):
            with self._lock:
                if context in self._calls:
                    self._calls[context] = version, role
            return
        log.warning("ended a standing call, since its token was removed role=%s peer=%s", role.value, context.peer())
        self._forget(context)
        # The caller begins it again, and is then told that its token is not good.
        context.cancel()
