"""Checks running roles from this machine: whether they answer, their versions, how long a call takes. Calls handshakes and status only."""

import statistics
import time
from collections.abc import Iterator

from lockstep import __version__
from lockstep.doctor.findings import Finding, fail, ok, warn
from lockstep.doctor.link import Measured, NoDoctor, measure
from ps_protocol.errors import DeadlineExceeded, PsError, Unavailable
from ps_protocol.roles.chief import ClusterState, ParticipantKind
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Role, check_versions, parse_address
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.shard import SERVICE as SHARD_SERVICE

_TIMEOUT_S = 3.0
_NUM_CALLS = 20
_SLOW_CALL_S, _SLOW_BYTES_PER_S, _CLOCK_S = 0.005, 100e6, 1.0
_START = "start it, check the address, and whether a firewall lets this port through"


def peer_findings(address: str, *, cluster: str, access: Access) -> Iterator[Finding]:
    """Yields findings about the server at an address: another doctor, or a role and, from the chief on, all parameter servers."""
    parsed = parse_address(address)
    if not parsed.is_unix:
        try:
            yield from _link(address, measure(parsed, timeout_s=_TIMEOUT_S))
            return
        except NoDoctor:
            pass  # not a doctor, so it is a role
        except OSError as error:
            yield fail("connection", f"{address}: {error.strerror or error}", _START)
            return
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


def _link(address: str, found: Measured) -> Iterator[Finding]:
    latency = f"{address}: {found.round_trip_s * 1e3:.3f} ms there and back, one in twenty over {found.slow_round_trip_s * 1e3:.3f} ms"
    slow = found.round_trip_s > _SLOW_CALL_S
    advice = "a step takes at least two round trips: place chief, servers and workers in one network"
    yield warn("latency", latency, advice) if slow else ok("latency", latency)
    rates = f"{found.up_bytes_per_s / 1e6:,.0f} MB/s there, {found.down_bytes_per_s / 1e6:,.0f} MB/s back"
    slow = min(found.up_bytes_per_s, found.down_bytes_per_s) < _SLOW_BYTES_PER_S
    advice = "send fewer bytes: LOCKSTEP_WIRE=bfloat16, or another format of docs/how-to/compression.md"
    yield warn("bandwidth", rates, advice) if slow else ok("bandwidth", rates)
    clock = f"the other host's clock is {abs(found.clock_ahead_s) * 1e3:.1f} ms {'ahead' if found.clock_ahead_s > 0 else 'behind'}"
    advice = "training does not depend on it; run an NTP client on both hosts, so that their logs and certificates agree"
    yield warn("clocks", clock, advice) if abs(found.clock_ahead_s) > _CLOCK_S else ok("clocks", clock)


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
    chief = GrpcChief(address, cluster=cluster, access=access)
    try:
        status = chief.status()
    except PsError as error:
        yield _refused(address, error)
        return
    finally:
        chief.close()
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    live = sum(one.state == "live" for one in workers)
    expected = f" of {status.total_num_replicas}" if status.total_num_replicas else ""
    text = f"{status.state.name.lower()}, step {status.global_step}, {live}{expected} workers live"
    if status.state is ClusterState.FAILED:
        yield fail("cluster", f"{text}: {status.reason}", "fix what is named, and start the cluster again")
    elif status.waiting_for:
        yield warn("cluster", text, f"it waits: {status.waiting_for}")
    else:
        yield ok("cluster", text)
    for shard in status.shards:
        for where in filter(None, (shard.address, shard.standby)):
            try:
                found = _called(Connection(where, name=f"ps {shard.index}", service=SHARD_SERVICE, access=access), cluster=cluster)
            except PsError as error:
                yield _refused(where, error)
            else:
                yield from _role(where, found[0], call_s=found[1])
