"""Admits or refuses calls before a method sees them, and ends calls whose token is no longer valid. Knows no handler and no message."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import grpc

from ps_protocol.errors import LimitExceeded, PermissionDenied, PsError, Unimplemented
from ps_protocol.process.logs import SeldomWarning
from ps_protocol.roles.identity import Identity, Role
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.server_stream import Begin, Call, Handler, Peer, Received
from ps_protocol.rpc.status import ending_with
from ps_protocol.rpc.strangers import StrangerGuard
from ps_protocol.security import tokens as credentials
from ps_protocol.security.certificates import certified_roles
from ps_protocol.security.options import Security
from ps_protocol.security.permissions import check_allowed, is_long_lived, is_open
from ps_protocol.security.tokens import TokenTable, authorization_in

# Calls of observers and operators: only so many at once, so that they do not keep workers from training.


# Of each of these roles at one server. A call may hold a thread, and a message of up to 16 MiB.
MAX_GUEST_CALLS = 256
_GUESTS = frozenset({CallerRole.OBSERVER, CallerRole.ADMIN, CallerRole.PS})
# Who takes no part in what a server is there for: a relay is there for observers.
_GUESTS_AT: Mapping[Role, AbstractSet[CallerRole]] = {
    Role.CHIEF: _GUESTS,
    Role.PARAMETER_SERVER: _GUESTS,
    Role.RELAY: frozenset(),
}


class GuestCalls:
    """Counts the calls under way of each role of guests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num: Counter[CallerRole] = Counter()

    def enter(self, role: CallerRole, call: Call) -> None:
        """Counts a call until it ends. Raises LimitExceeded."""
        with self._lock:
            if self._num[role] >= MAX_GUEST_CALLS:
                raise LimitExceeded(f"{MAX_GUEST_CALLS} calls with the role {role.value} are under way at this server; end some of them")
            self._num[role] += 1
        if not call.add_callback(lambda: self._leave(role)):
            self._leave(role)

    def _leave(self, role: CallerRole) -> None:
        with self._lock:
            self._num[role] -= 1


# Calls that last, and the tokens they began with: a call ends when its token is no longer good.


log = logging.getLogger("lockstep.rpc")

_Seen = tuple[int, CallerRole]  # the table's version, and the role that the caller's token had by it


class LongLivedCalls:
    """The long-lived calls under way. Thread-safe; its own thread checks their tokens while there are such calls, until `close`."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._calls: dict[Call, _Seen] = {}
        self._is_watched = False
        self._closed = threading.Event()

    def watch(self, call: Call, seen: _Seen) -> None:
        """Has the call cancelled when its token is not of that role any more."""
        with self._lock:
            self._calls[call] = seen
            begins, self._is_watched = not self._is_watched, True
        if not call.add_callback(lambda: self._forget(call)):
            self._forget(call)
        if begins:
            threading.Thread(target=self._look, name="long-lived-calls", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def _forget(self, call: Call) -> None:
        with self._lock:
            self._calls.pop(call, None)

    def _look(self) -> None:
        while not self._closed.wait(credentials.LOOK_INTERVAL_S):
            self._tokens.renew()
            with self._lock:
                if not self._calls:
                    self._is_watched = False
                    return
                outdated = [(call, role) for call, (version, role) in self._calls.items() if version != self._tokens.version]
            for call, role in outdated:
                self._check(call, role)

    def _check(self, call: Call, role: CallerRole) -> None:
        version = self._tokens.version
        if self._tokens.is_token_of(role, authorization_in(call.invocation_metadata())):
            with self._lock:
                if call in self._calls:
                    self._calls[call] = version, role
            return
        log.warning("ended a long-lived call, since its token was removed role=%s peer=%s", role.value, call.peer())
        self._forget(call)
        # The caller opens the stream again, and is then refused for its token.
        call.cancel()


# Calls that need no token: only so many at once.


# Of strangers, all together: what they may have a server remember, up to a message of 16 MiB each. One more ends the oldest, so that they
# refuse no one: a health check arrives with its request, and is answered in a moment.
MAX_OPEN_CALLS = 8


class OpenCalls:
    """Begins the calls of a method that need no admission. Thread-safe."""

    def __init__(self, begin: Begin, *, limit: int = MAX_OPEN_CALLS) -> None:
        self._begin, self._limit = begin, limit
        self._lock = threading.Lock()
        self._peers: dict[Peer, None] = {}

    def __call__(self, peer: Peer, call: Call) -> Handler:
        """Begins a call. Ends the oldest if there are too many."""
        with self._lock:
            self._peers[peer] = None
            oldest = next(iter(self._peers)) if len(self._peers) > self._limit else None
        if not call.add_callback(lambda: self._forget(peer)):
            self._forget(peer)
        if oldest is not None:
            self._forget(oldest)
            oldest.end(LimitExceeded(f"over {self._limit} calls without a token are under way; call again"))
        return self._begin(peer, call)

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._peers.pop(peer, None)


# Lets calls in or not, before any method sees them: for every service of a server at once.


class Admission:
    """Refuses calls without a token or certificate of a role that may make them. Thread-safe, never waits.

    `strangers` is told whose calls are let in, and whose are not. `tokens` None: tokens are not asked for. `checks_certificates`: the port
    asks callers for certificates; then these count too, and a caller needs both. `guests`: roles whose calls are limited in number.
    """

    def __init__(
        self,
        *,
        cluster: str = "",
        tokens: TokenTable | None = None,
        checks_certificates: bool = False,
        strangers: StrangerGuard | None = None,
        guests: AbstractSet[CallerRole] = frozenset(),
    ) -> None:
        self._cluster, self._tokens, self._checks_certificates, self._strangers = cluster, tokens, checks_certificates, strangers
        self._long_lived = LongLivedCalls(tokens) if tokens is not None else None
        self._guests, self._guest_calls = guests, GuestCalls()
        self._refusals: dict[str, Callable[[grpc.ServicerContext], None]] = {}
        self._warning, self._num_refused = SeldomWarning(log), 0

    def admit(self, method: str | None, call: Call) -> Received:
        """Lets a call in, and returns what its messages count for. `method` None: one that the server has not.

        Raises Unauthenticated, Unimplemented, PermissionDenied, LimitExceeded.
        """
        if method is not None and is_open(method):
            self._charge(call)
            return Received()
        self._check(method, call)
        return self._strangers.admit(call.peer()) if self._strangers is not None else Received()

    def refuse(self, error: PsError, context: grpc.ServicerContext) -> None:
        """Has a call that is not let in end with the error."""
        # Made once for each text: a refused caller may call thousands of times in a second.
        message = error.message
        if message not in self._refusals:
            self._refusals[message] = ending_with(error)
        self._refusals[message](context)
        self._charge(context)
        self._num_refused += 1
        self._warning.warn("refused a call: %s peer=%s refused_so_far=%d", lambda: (message, context.peer(), self._num_refused))

    def may_act_as(self, role: CallerRole, call: Call) -> bool:
        """Whether the admitted caller has this role by all its credentials. Raises Unauthenticated, PermissionDenied."""
        if self._tokens is not None and self._tokens.role_of(authorization_in(call.invocation_metadata())) is not role:
            return False
        return not self._checks_certificates or role in self._certified(call)

    def close(self) -> None:
        """Ends the thread that checks tokens, once the server's calls have ended."""
        if self._long_lived is not None:
            self._long_lived.close()

    def _check(self, method: str | None, call: Call) -> None:
        version, role = 0, None
        if self._tokens is not None:
            version, role = self._tokens.version, self._tokens.role_of(authorization_in(call.invocation_metadata()))
        # Only now: outsiders must not learn which methods there are.
        if method is None:
            raise Unimplemented("there is no such method here: it is an older version or has another role; check the address")
        guest = None
        if role is not None:
            check_allowed(method, role)
            guest = role if role in self._guests else None
        if self._checks_certificates:
            roles = self._check_certificate(method, call)
            guest = guest or (min(roles, key=lambda role: role.value) if roles <= self._guests else None)
        if guest is not None:
            self._guest_calls.enter(guest, call)
        if self._long_lived is not None and role is not None and is_long_lived(method):
            self._long_lived.watch(call, (version, role))

    def _charge(self, call: Call) -> None:
        if self._strangers is not None:
            self._strangers.charge(call.peer(), num_headers=len(call.invocation_metadata()))

    def _certified(self, call: Call) -> frozenset[CallerRole]:
        return certified_roles(call.auth_context(), cluster=self._cluster)

    def _check_certificate(self, method: str, call: Call) -> frozenset[CallerRole]:
        """Returns the roles that the caller has by its certificate. Raises PermissionDenied unless one of them may call the method."""
        roles = self._certified(call)
        refusals: list[PermissionDenied] = []
        for role in sorted(roles, key=lambda role: role.value):
            try:
                check_allowed(method, role, proof="certificate")
                return roles
            except PermissionDenied as error:
                refusals.append(error)
        raise refusals[0]


def admission_at(address: str, security: Security, *, identity: Identity, strangers: StrangerGuard) -> Admission:
    """Returns the admission of a server with this identity at `address`; on a Unix socket it asks for tokens only. Raises InvalidSpec.

    `strangers` is told of calls on a port that strangers can reach.
    """
    tokens = TokenTable(security.token_file) if security.token_file is not None else None
    is_unix = address.startswith("unix:")
    return Admission(
        cluster=identity.cluster,
        tokens=tokens,
        checks_certificates=security.verify_clients and not is_unix,
        strangers=None if is_unix else strangers,
        guests=_GUESTS_AT[identity.role],
    )
