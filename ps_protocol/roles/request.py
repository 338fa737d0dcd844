"""A request: a value that names its RPC, who may ask it, and the type of its answer. Knows no message and no transport."""

import enum
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, dataclass_transform

from ps_protocol.model.light_dataclass import light_dataclass


class CallerRole(enum.Enum):
    """The role of a caller, by its token or certificate. The value is the word in token files and certificates."""

    CHIEF = "chief"
    WORKER = "worker"
    OBSERVER = "observer"
    ADMIN = "admin"
    PS = "ps"


# Roles that look at a model, and roles that take part: a worker may do everything that an observer may.
CHIEF = frozenset({CallerRole.CHIEF})
WORKER = frozenset({CallerRole.WORKER})
ADMIN = frozenset({CallerRole.ADMIN})
READERS = WORKER | ADMIN | {CallerRole.OBSERVER}
OPERATORS = WORKER | ADMIN
EVERYBODY = frozenset(CallerRole)


Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class Request(Protocol[Answer_co]):
    """A value that something is asked with. One that may wait has `max_wait_s`."""

    @property
    def answer(self) -> type[Answer_co]:
        """The type of the answer."""

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """What carries a request: an RPC with one message each way; or, with a `field`, a stream, whose messages have it there."""

    service: str
    name: str
    callers: frozenset[CallerRole]
    field: str = ""

    @property
    def path(self) -> str:
        """The RPC as gRPC has it."""
        return f"/ps_protocol.v1.{self.service}/{self.name}"


_RPCS: dict[type, Rpc] = {}
# What carries each kind of request. A module that reads it must import the modules of `roles` that declare them.
RPCS: Mapping[type, Rpc] = _RPCS

Declared = TypeVar("Declared")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def asks(service: str, name: str, *, by: frozenset[CallerRole], field: str = "") -> Callable[[type[Declared]], type[Declared]]:
    """Declares a class, a value, as what an RPC is asked with, and by whom. Its messages have its fields, and those of its answer."""

    def declare(declared: type[Declared]) -> type[Declared]:
        request = light_dataclass(frozen=True, slots=True, kw_only=True)(declared)
        _RPCS[request] = Rpc(service=service, name=name, callers=by, field=field)
        return request

    return declare


def requests_of(service: str) -> dict[str, type]:
    """Returns what the RPCs of a service with one message each way are asked with, by their names."""
    return {rpc.name: request for request, rpc in RPCS.items() if rpc.service == service and not rpc.field}


def requests_on(service: str, stream: str) -> dict[str, type]:
    """Returns what is asked on a stream, by the fields of its messages."""
    return {rpc.field: request for request, rpc in RPCS.items() if (rpc.service, rpc.name) == (service, stream) and rpc.field}
