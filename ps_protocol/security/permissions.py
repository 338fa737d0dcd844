"""Which role may call which method: what requests declare of themselves, and a table of the rest. Knows no token and no certificate."""

from collections.abc import Iterable, Mapping

from ps_protocol.errors import PermissionDenied

# Read for what they declare.
from ps_protocol.roles import accumulators, chief, identity, shard  # noqa: F401
from ps_protocol.roles.request import EVERYBODY, READERS, RPCS, WORKER, CallerRole

_PACKAGE = "ps_protocol.v1"
HEALTH = "grpc.health.v1.Health"


def _rows(service: str, roles: frozenset[CallerRole], methods: str) -> dict[str, frozenset[CallerRole]]:
    return {f"/{_PACKAGE}.{service}/{method}": roles for method in methods.split()}


# Every RPC has a row; a method without one is refused to every caller. What changes a shard's model as a whole is the chief's. Observers
# are participants, too: they have a lease, so that the processes stay until they have read.
ALLOWED: Mapping[str, frozenset[CallerRole]] = {
    **{rpc.path: rpc.callers for rpc in RPCS.values()},
    **_rows("ParameterService", WORKER, "CreateVariables Push ShareMemory"),
    **_rows("ParameterService", READERS, "Read ReadRows"),
    **_rows("AccumulatorService", WORKER, "ApplyGradient TakeGradient"),
    **_rows("BoardService", WORKER, "PostOnBoard"),
    **_rows("BoardService", READERS, "ReadBoard"),
    # As long as the caller likes: not for strangers, as the question for the health is.
    f"/{HEALTH}/Watch": EVERYBODY,
}

# Says only whether the process is alive; its callers, kubelet and load balancers, have no token.
_OPEN = frozenset({f"/{HEALTH}/Check"})
# Those that last as long as the caller likes: it sends one message after the other, or takes its time to receive them.
_LONG_LIVED = frozenset(
    {f"/{_PACKAGE}.ParameterService/{method}" for method in ["Push", "Read", "ShareMemory", "Command"]}
    | {f"/{_PACKAGE}.ParameterService/{method}" for method in ["CreateVariables", "ReadRows"]}
    | {f"/{_PACKAGE}.AccumulatorService/{method}" for method in ["ApplyGradient", "TakeGradient"]}
    | {f"/{_PACKAGE}.BoardService/{method}" for method in ["PostOnBoard", "ReadBoard"]}
    | {f"/{_PACKAGE}.ChiefService/Converse", f"/{HEALTH}/Watch"}
)


def is_open(method: str) -> bool:
    """Whether any caller may call the method, "/service/method"."""
    return method in _OPEN


def is_long_lived(method: str) -> bool:
    """Whether a call of the method may last: then its token must stay good, too."""
    return method in _LONG_LIVED


def check_allowed(method: str, role: CallerRole, *, proof: str = "token") -> None:
    """Raises PermissionDenied unless `role` may call the method; `proof` is what says that it has the role: "token" or "certificate"."""
    roles = ALLOWED.get(method)
    if roles is None or role not in roles:
        raise denied(method.rpartition("/")[2], roles or (), role, proof=proof)


def denied(action: str, roles: Iterable[CallerRole], role: CallerRole, *, proof: str = "token") -> PermissionDenied:
    """Returns the error for a caller of another role than the action needs."""
    wanted = " or ".join(sorted(allowed.value for allowed in roles))
    words = (
        f"{action} needs role {wanted}, {proof} has role {role.value}"
        if wanted
        else f"no role may call {action}; {proof} has role {role.value}"
    )
    return PermissionDenied(words, facts={"role": role.value})
