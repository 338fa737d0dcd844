"""How a program reaches the named accumulators: through its session, or by a parameter server's address. Knows connections; no gradient."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ps_protocol import access, retry
from ps_protocol.accumulator_client import GrpcAccumulators
from ps_protocol.accumulators import Accumulators, shard_of
from ps_protocol.authorization import CallerRole
from ps_protocol.errors import InvalidSpec, Unimplemented
from ps_protocol.silence import SilenceWatch
from worker_client.observer import Observer
from worker_client.proof import access_of
from worker_client.session import Session

log = logging.getLogger("lockstep.worker")

TIMEOUT_S = 60.0

Target = Session | Observer | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The accumulators of one parameter server; `server` names it, and `timeout_s` is how long it is waited for.

    `watching(what, expected seconds)` has the enclosed call spoken for while it hangs; `close` may be called more than once.
    """

    accumulators: Accumulators
    server: str
    timeout_s: float
    watching: Callable[[str, float], AbstractContextManager[None]]
    close: Callable[[], None]


def open_access(target: Target, name: str, *, timeout_s: float | None) -> Access:
    """Returns access to the parameter server that accumulator `name` lies on; returns once it has answered.

    Of a session's several servers that is the same one for all programs. `timeout_s` None: the session's, else 60 s. Raises Unavailable,
    WrongRole, InvalidSpec.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidSpec(f"timeout_s: got {timeout_s!r}, want seconds > 0")
    if isinstance(target, str):
        return _remote(target, index=None, timeout_s=timeout_s or TIMEOUT_S, proof=access_of(os.environ, role=CallerRole.WORKER))
    target.membership.check_open()
    link, addresses = target.membership.link, target.membership.registration.shard_addresses
    index = shard_of(name, num_shards=len(addresses))
    if link.is_in_process:
        return _in_process(link.open_shard(index, addresses[index]), index, timeout_s=timeout_s or link.timeout_s)
    return _remote(addresses[index], index=index, timeout_s=timeout_s or link.timeout_s, proof=link.access)


def _in_process(shard: object, index: int, *, timeout_s: float) -> Access:
    accumulators = getattr(shard, "accumulators", None)
    if accumulators is None:
        raise Unimplemented(f"ps {index}, a {type(shard).__name__}, has no named accumulators")
    return Access(
        accumulators=accumulators,
        server=f"ps {index}",
        timeout_s=timeout_s,
        watching=lambda what, expected_s: nullcontext(),
        close=lambda: None,
    )


def _remote(address: str, *, index: int | None, timeout_s: float, proof: access.Access) -> Access:
    client, watch = GrpcAccumulators(address, index=index, access=proof), SilenceWatch()

    def close() -> None:
        watch.close()
        client.close()

    try:
        what = f"the parameter server at {address}"
        with watch.expecting(what):
            reply = retry.call(client.handshake, what=what, timeout_s=timeout_s)
    except BaseException:
        close()
        raise
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)
    server = f"ps {reply.identity.index} at {address}"
    return Access(
        accumulators=client,
        server=server,
        timeout_s=timeout_s,
        watching=lambda text, expected_s: watch.expecting(text, expected_s=expected_s),
        close=close,
    )
