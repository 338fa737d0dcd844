"""Checks running roles from this machine: whether they answer, their versions, how long a call takes. Changes nothing that lasts."""

import secrets
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing

from lockstep import __version__
from lockstep.doctor.findings import Finding, fail, ok, warn
from ps_protocol.checkpoint.trial import TRIAL
from ps_protocol.errors import DeadlineExceeded, PsError, Unavailable
from ps_protocol.roles.chief import ClusterState, Level, ParticipantKind
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Role, check_versions
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.shard import SERVICE as SHARD_SERVICE

_TIMEOUT_S = 3.0
_NUM_CALLS = 20
_SLOW_CALL_S = 0.005
_STORAGE_TIMEOUT_S = 20.0
_START = "start it, check the address, and whether a firewall lets this port through"


def peer_findings(address: str, *, cluster: str, access: Access) -> Iterator[Finding]:
    """Yields findings about the role at an address and, if it is the chief, about all parameter servers."""
    reply = None
    try:
        connection = Connection(address, name="the process", service=SHARD_SERVICE, access=access)
        reply, call_s = _called(connection, cluster=cluster)
    except PsError as error:
        yield _refused(address, error)
    if reply is None:
        return
    yield from _role(address, reply, call_s=call_s)
    if reply.identity.role is Role.CHIEF:
        yield from _cluster(address, cluster=reply.identity.cluster, access=access)


def _called(connection: Connection, *, cluster: str) -> tuple[HandshakeReply, float]:
    """Returns the handshake's answer, and how long such a call takes."""
    try:
        reply = connection.handshake(None, index=None, cluster=cluster, timeout_s=_TIMEOUT_S)
        times = []
        for _ in range(_NUM_CALLS):
            start = time.perf_counter()
            connection.handshake(None, index=None, cluster=cluster, timeout_s=_TIMEOUT_S)
            times.append(time.perf_counter() - start)
        return reply, statistics.median(times)
    finally:
        connection.channel.close()


def _refused(address: str, error: PsError) -> Finding:
    if isinstance(error, Unavailable | DeadlineExceeded):
        return fail("connection", error.message, _START)
    return fail("connection", f"{address}: {error.message}", "give the token and the TLS files of the cluster: docs/how-to/tls.md")


def _role(address: str, reply: HandshakeReply, *, call_s: float) -> Iterator[Finding]:
    identity = reply.identity
    text = f"{identity.name} of cluster {identity.cluster!r} at {address}: protocol {reply.version}, a call takes {call_s * 1e3:.2f} ms"
    caution = reply.warning or check_versions(client=PROTOCOL_VERSION, server=reply.version)
    if reply.version != PROTOCOL_VERSION:
        yield warn("role", text, f"protocol here: {PROTOCOL_VERSION}; install lockstep-ps {__version__} there too. {caution}".strip())
    elif call_s > _SLOW_CALL_S:
        yield warn("role", text, "a step takes at least two calls; is the host busy, or far away?")
    else:
        yield ok("role", text)


def _cluster(address: str, *, cluster: str, access: Access) -> Iterator[Finding]:
    try:
        with closing(GrpcChief(address, cluster=cluster, access=access)) as chief:
            status = chief.status()
    except PsError as error:
        yield _refused(address, error)
        return
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    live = sum(one.state == "live" for one in workers)
    expected = f" of {status.total_num_replicas}" if status.total_num_replicas else ""
    text = f"{status.state.name.lower()}, step {status.global_step}, {live}{expected} workers live"
    if status.state is ClusterState.FAILED:
        yield fail("cluster", f"{text}: {status.reason}", "fix what is named, and start the cluster again")
    else:
        yield ok("cluster", text)
    for one in status.conditions:
        if one.level is not Level.GREEN and status.state is not ClusterState.FAILED:
            yield warn("cluster", one.line, " ".join(filter(None, [one.advice, *(f"`{command}`" for command in one.commands)])))
    roles = {"chief": address}
    for shard in status.shards:
        for where, words in ((shard.address, ""), (shard.standby, " (standby)")):
            if not where:
                continue
            try:
                found = _called(Connection(where, name=f"ps {shard.index}", service=SHARD_SERVICE, access=access), cluster=cluster)
            except PsError as error:
                yield _refused(where, error)
            else:
                roles[f"ps {shard.index}{words}"] = where
                yield from _role(where, found[0], call_s=found[1])
    yield from checkpoint_findings(roles, access=access)


def checkpoint_findings(roles: Mapping[str, str], *, access: Access) -> Iterator[Finding]:
    """Has every role write a file to its place for checkpoints, look for those of the others, and read and remove its own."""
    if access.role is not CallerRole.ADMIN:
        yield warn("checkpoints", "not tried: only an admin may", "give an admin's token: --token-file admin.token")
        return
    with ExitStack() as stack:
        connections: dict[str, Connection] = {}
        trial = f"{TRIAL}{secrets.token_hex(4)}"
        tags = {name: f"{trial}-{number}" for number, name in enumerate(roles)}
        places: dict[str, str] = {}
        seen: dict[str, set[str]] = {}
        failed: set[str] = set()
        for is_last in (False, True):
            for name, where in roles.items():
                if places.get(name) == "":
                    continue
                try:
                    if name not in connections:
                        connections[name] = Connection(where, name=name, service=SHARD_SERVICE, access=access)
                        stack.callback(connections[name].channel.close)
                    # The last call is for one whose first one failed, too: nobody else removes what that has left.
                    place, found = connections[name].try_checkpoints(tags[name], is_last=is_last, timeout_s=_STORAGE_TIMEOUT_S)
                except PsError as error:
                    places.pop(name, None)
                    if name not in failed:
                        yield fail("checkpoints", f"{name}: {error.message}", "every checkpoint fails until this is mended")
                    failed.add(name)
                else:
                    if name not in failed:
                        places[name], seen[name] = place, seen.get(name, set()).union(found)
    yield from _sharing(places, seen, tags)


def _sharing(places: Mapping[str, str], seen: Mapping[str, set[str]], tags: Mapping[str, str]) -> Iterator[Finding]:
    """Yields whether all roles have a place, and the same one. `places`, `seen`: of those that could write."""
    without = [name for name, place in places.items() if not place]
    writing = [name for name, place in places.items() if place]
    if not writing:
        if places:
            yield warn("checkpoints", "no role has a --checkpoint-dir", "without one, a lost server costs all steps: docs/how-to/resume.md")
        return
    if without:
        yield fail("checkpoints", f"{', '.join(without)}: no --checkpoint-dir, but {', '.join(writing)} have one", "give it to all roles")
    written = {tags[name] for name in writing}
    apart = [name for name in writing if not written <= seen[name]]
    where = " and ".join(sorted({places[name] for name in writing}))
    if apart:
        words = f"{where}: {', '.join(apart)} cannot see what the other roles write there"
        yield fail("checkpoints", words, "give all roles the same --checkpoint-dir, on storage that they share")
    elif not without:
        yield ok("checkpoints", f"{where}: {len(writing)} of {len(tags)} roles can write and read there, and share it")
