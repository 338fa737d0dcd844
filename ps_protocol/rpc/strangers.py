"""Cuts connections that send more bytes than their calls explain, and makes their networks wait. Knows connections; no method.

Any host that reaches a port can send to it without a token, and gRPC reads everything: most frames cost the sender nothing, and no option
bounds them. So a thread looks at the connections that were made to the port, and at how much has come over each. A connection belongs to a
stranger until a message of an admitted call has come. From then on, the bytes received are compared with its calls and their messages: the
rest are frames that carry nothing. This costs a message an addition, and bounds everything that a stranger can send.
"""

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Iterable

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.descriptors import (
    EVERYWHERE,
    Network,
    Seen,
    caller_at,
    cut,
    descriptors,
    listening_at,
    look,
    network_of,
    shut_out,
)
from ps_protocol.process.logs import SeldomWarning
from ps_protocol.rpc.channel import MAX_MESSAGE_BYTES
from ps_protocol.rpc.server_stream import Received

log = logging.getLogger("lockstep.rpc")

# What may come before a call is let in. TLS and headers take some KiB, and the messages that gRPC takes ahead of a call 128.
BUDGET_BYTES, BUDGET_BYTES_A_S = 160 << 10, 8 << 10
# Where others had to be cut: four connections that were made at once would else take four times as much, before the first one is judged.
SUSPECT_BYTES = 24 << 10
# A call that is refused, or that anybody may make, takes the server longer than its bytes, and so does each of its headers.
CALL_BYTES, HEADER_BYTES = 1 << 10, 64
# What may come on a connection that was let in beyond its calls and their messages: what the kernel holds until gRPC reads it, and messages
# that have come in part (of tensors, each has 1 MiB), count as well. And at how much it is looked at more often. Then, what a call counts,
# with its headers; and what frames around messages and window updates take at most, as parts of the messages and of what was sent.
SURPLUS_BYTES, SURPLUS_BYTES_A_S, NOTABLE_BYTES = MAX_MESSAGE_BYTES + (1 << 20), 64 << 10, 4 << 20
_LET_IN_BYTES, _A_MESSAGE, _AN_ANSWER = 4 << 10, 8, 64

# Where everybody's calls are let in, a stranger can begin thousands and send no message. So a connection is a stranger's until the first
# message of a call that is let in is there. That may be a large one, unless so many calls have begun before it.
_MAX_SILENT = 8

# How often connections are looked at: while there are strangers that send, and else.
_BUSY_S, _CALM_S = 0.004, 0.05
# With thousands of connections a look takes long: so much of the time at most, if it can wait.
_SHARE = 0.05
# A stranger that has sent nothing for longer is looked at as seldom as admitted callers.
_YOUNG_S = 12.0
# So many of them are looked at each time, and so many of all others.
_NUM_YOUNG, _NUM_OTHERS = 256, 32
# The guard looks at descriptors that were free: at a few each time, and now and then at all of them, so many at once.
_NUM_NEW, _LISTING_S, _MAX_NEW = 8, 3.0, 256


class Turnstile:
    """Which networks have to wait before they connect again, by the number of their connections that failed. Pure."""

    # So many are free at once, and so many a second. One that had to be cut counts as several. However many there were, a wait lasts no
    # longer than four times the last one's number takes; for calls without end, no longer than this number.
    NUM, NUM_A_S, CUT, MOST = 16.0, 4.0, 4.0, 64.0
    # As many networks are remembered, and as many wait one by one. When there are more, all wait.
    _MAX_NETWORKS, _MAX_WAITING = 4_096, 64

    def __init__(self) -> None:
        # What each has left, and since when. The last one has counted last.
        self._left: dict[Network, tuple[float, float]] = {}

    def count(self, network: Network | None, number: float, now: float, *, for_calls: float = 0.0) -> None:
        """Counts failed connections; a negative number: some were let in. None: the network is unknown, probably the last one.

        `for_calls`: how much their calls count besides.
        """
        if network is None:
            network = next(reversed(self._left), EVERYWHERE[0])
        before = self._left_of(network, now)
        left = max(before - number, min(before, -4.0 * number))
        left = max(left - for_calls, min(left, -self.MOST))
        self._left.pop(network, None)
        if left < self.NUM:
            self._left[network] = left, now
        if len(self._left) > self._MAX_NETWORKS:
            del self._left[next(iter(self._left))]

    def waiting(self, now: float) -> frozenset[Network]:
        """Returns those that have to wait."""
        waiting = [network for network in self._left if self._left_of(network, now) < 1.0]
        for network in [network for network in self._left if self._left_of(network, now) >= self.NUM]:
            del self._left[network]
        return frozenset(waiting if len(waiting) <= self._MAX_WAITING and EVERYWHERE[0] not in waiting else EVERYWHERE)

    @property
    def is_counting(self) -> bool:
        """Whether any connection has failed lately."""
        return bool(self._left)

    def _left_of(self, network: Network, now: float) -> float:
        left, at = self._left.get(network, (self.NUM, now))
        return min(self.NUM, left + (now - at) * self.NUM_A_S)


@light_dataclass(slots=True)
class _Open:
    """An open descriptor. `peer`: what gRPC calls the other end of a connection that was made to the port; empty for anything else.

    `spent_at`: when more had come than at the look before. `excused`: of one that was let in, how much may have come that is no message.
    """

    number: int
    network: Network = EVERYWHERE[0]
    peer: str = ""
    since: float = 0.0
    spent_at: float = 0.0
    spent: int = 0
    is_stranger: bool = False
    excused: float = 0.0
    excused_at: float = 0.0


class _Bell:
    """A signal that a thread waits for besides readable descriptors. Any thread may ring. Knows Linux."""

    def __init__(self) -> None:
        self._descriptor, self._lock = -1, threading.Lock()

    def hang(self) -> None:
        """Makes it ready; `take_down` undoes it."""
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def take_down(self) -> None:
        """Lets go of it. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def ring(self) -> None:
        """Ends a wait."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def wait(self, seconds: float, others: Iterable[int]) -> bool:
        """Waits until it rings, until one of the others has something to read, or so long; returns whether there is something to read."""
        poll = select.poll()
        for descriptor in (self._descriptor, *others):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000.0 * seconds)}
        if self._descriptor in ready:
            os.eventfd_read(self._descriptor)
        return bool(ready - {self._descriptor})


class StrangerGuard:
    """Watches the connections made to one port of this process. Thread-safe; `admit` and `charge` never wait."""

    def __init__(self) -> None:
        self._port = 0
        self._listening: list[int] = []
        self._thread: threading.Thread | None = None
        self._is_over, self._bell = False, _Bell()
        # By peer. Any thread puts something in, and the guard's takes it out again.
        self._admitted: dict[str, Received] = {}
        self._charged: dict[str, int] = {}
        # The guard's own. By descriptor, those that are open. The lowest that is not; when all were listed, and when all listed were known.
        self._open: dict[int, _Open] = {}
        self._lowest, self._listed_at, self._all_known_at = 0, 0.0, 0.0
        # Strangers' peers, and the descriptors of those that have sent something lately.
        self._strangers: set[str] = set()
        self._young: dict[int, _Open] = {}
        # A round through all that are open.
        self._round: list[int] = []
        self._round_began_at = 0.0
        self._turnstile, self._waiting = Turnstile(), frozenset[Network]()
        self._warning, self._num_cut = SeldomWarning(log), 0

    def start(self, port: int) -> None:
        """Begins to watch a port at which the process listens already; does nothing where connections cannot be inspected."""
        self._port, self._listening = port, listening_at(port)
        if self._listening:
            self._bell.hang()
            self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends; to be called before the port is closed. Idempotent."""
        self._is_over = True
        if self._thread is not None:
            self._bell.ring()
            self._thread.join()
            self._thread = None
            self._bell.take_down()

    def admit(self, peer: str) -> Received:
        """A call of this peer has been let in: its connection is no stranger's. Returns what the call's messages count for."""
        received = self._admitted.get(peer)
        if received is None:
            received = Received(since=time.monotonic())
            if self._thread is not None:
                received = self._admitted.setdefault(peer, received)
        received.num_bytes += _LET_IN_BYTES
        received.num_calls += 1
        return received

    def charge(self, peer: str, *, num_headers: int) -> None:
        """A call of this peer was refused, or was one that anybody may make."""
        if self._thread is not None:
            self._charged[peer] = charged = self._charged.get(peer, 0) + CALL_BYTES + HEADER_BYTES * num_headers
            if charged > BUDGET_BYTES:
                self._bell.ring()

    def _run(self) -> None:
        # What a new connection brings comes at once, and may take long to work off. So one ends a calm; but it may not be accepted yet.
        is_calm, pause_s = False, 0.0
        while not self._is_over:
            is_news = self._bell.wait(pause_s, self._listening if is_calm else ())
            begin = time.monotonic()
            is_calm = not self._look(begin) and not is_news
            took_s = time.monotonic() - begin
            pause_s = max(_CALM_S if is_calm else _BUSY_S, min(took_s / _SHARE, _CALM_S))

    def _look(self, now: float) -> bool:
        """Looks at those descriptors that need it, and at some of the others; returns whether to come again soon."""
        for descriptor in [descriptor for descriptor, one in self._young.items() if now - one.spent_at > _YOUNG_S]:
            del self._young[descriptor]
        for descriptor in [*self._young][-_NUM_YOUNG:]:
            self._look_at(descriptor, now)
        has_found_all = self._find_new(now)
        if not self._round:
            if has_found_all:
                self._forget_unseen()
            self._round, self._round_began_at = [*self._open], now
        others, self._round = self._round[:_NUM_OTHERS], self._round[_NUM_OTHERS:]
        for descriptor in others:
            self._look_at(descriptor, now)
        self._charge_unseen(now)
        self._turn(now)
        return bool(self._young) or self._turnstile.is_counting or not has_found_all

    def _find_new(self, now: float) -> bool:
        """Looks at descriptors that may be open since the last look; returns whether there are no more."""
        if now - self._listed_at > _LISTING_S:
            self._listed_at = now
            unknown = descriptors() - self._open.keys()
            if len(unknown) <= _MAX_NEW:
                self._all_known_at = now
        else:
            # Whatever is opened gets the lowest number that is free. If that is closed again, a listing finds those behind it.
            free = (descriptor for descriptor in itertools.count(self._lowest) if descriptor not in self._open)
            unknown = {*itertools.islice(free, _NUM_NEW)}
        num_before = len(self._open)
        for descriptor in sorted(unknown)[:_MAX_NEW]:
            self._look_at(descriptor, now)
        return len(self._open) == num_before

    def _look_at(self, descriptor: int, now: float) -> None:
        known = self._open.get(descriptor)
        received = self._admitted.get(known.peer) if known is not None else None
        num_before = received.num_bytes if received is not None else 0
        seen = look(descriptor)
        if known is not None and (seen is None or seen.number != known.number):
            self._end(descriptor, self._open.pop(descriptor), now)
            self._lowest = min(self._lowest, descriptor)
            known = None
        if seen is None:
            return
        if known is None:
            while self._lowest in self._open or self._lowest == descriptor:
                self._lowest += 1
            known = self._open[descriptor] = self._found(descriptor, seen.number, now)
        if known.is_stranger:
            self._judge(descriptor, known, num_bytes=seen.num_received, now=now)
        elif received is not None:
            self._compare(descriptor, known, (num_before, received.num_bytes), seen, now)

    def _found(self, descriptor: int, number: int, now: float) -> _Open:
        """Returns what is known of a descriptor that was not there before, or was another file's."""
        caller = caller_at(descriptor, port=self._port) if number else None
        if caller is None:
            return _Open(number)
        host, port = caller
        if not host:
            self._turnstile.count(None, 1.0, now)
            return _Open(number)
        peer = f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._strangers.add(peer)
        one = self._young[descriptor] = _Open(number, network_of(host), peer, since=now, spent_at=now, is_stranger=True)
        return one

    def _judge(self, descriptor: int, one: _Open, *, num_bytes: int, now: float) -> None:
        """Lets a stranger be one no more, or cuts its connection if it has spent more than its budget."""
        charged = self._charged.get(one.peer, 0)
        if self._is_heard(one.peer):
            self._know(descriptor, one)
            self._turnstile.count(one.network, -1.0, now)
            return
        if num_bytes + charged != one.spent:
            one.spent, one.spent_at = num_bytes + charged, now
            self._young[descriptor] = one
        is_suspect = one.network in self._waiting or EVERYWHERE[0] in self._waiting
        budget = (SUSPECT_BYTES if is_suspect else BUDGET_BYTES) + BUDGET_BYTES_A_S * (now - one.since)
        received = self._admitted.get(one.peer)
        if received is not None and received.num_calls <= _MAX_SILENT:
            budget += MAX_MESSAGE_BYTES
        if one.spent > budget and cut(descriptor, number=one.number):
            self._know(descriptor, one)
            self._turnstile.count(one.network, Turnstile.CUT, now, for_calls=charged / BUDGET_BYTES)
            self._say_cut("no call that is let in", one, num_bytes, now)

    def _compare(self, descriptor: int, one: _Open, received: tuple[int, int], seen: Seen, now: float) -> None:
        """Cuts an admitted connection that has sent too many bytes that are neither a call nor a message.

        `received`: what calls and messages were worth before its bytes were looked at, and what they are now. Much may come in between.
        """
        most, least = (seen.num_received - num_bytes - num_bytes // _A_MESSAGE - seen.num_sent // _AN_ANSWER for num_bytes in received)
        # As time goes by more is excused, but what was not used is not saved up.
        excused = one.excused + SURPLUS_BYTES_A_S * (now - (one.excused_at or now))
        one.excused, one.excused_at = min(excused, most), now
        surplus = least - one.excused
        if surplus > NOTABLE_BYTES:
            one.spent_at, self._young[descriptor] = now, one
        if surplus > SURPLUS_BYTES and cut(descriptor, number=one.number):
            self._know(descriptor, one)
            self._admitted.pop(one.peer, None)
            self._turnstile.count(one.network, Turnstile.CUT, now, for_calls=Turnstile.MOST)
            self._say_cut("few calls and messages", one, seen.num_received, now)

    def _say_cut(self, what: str, one: _Open, num_bytes: int, now: float) -> None:
        self._turn(now)
        self._num_cut += 1
        about = num_bytes >> 10, what, one.peer, self._num_cut
        self._warning.warn("cut a connection that sent %d KiB, and %s peer=%s cut_so_far=%d", lambda: about)

    def _is_heard(self, peer: str) -> bool:
        """Whether a message of a call that was let in has come."""
        received = self._admitted.get(peer)
        return received is not None and received.num_bytes > received.num_calls * _LET_IN_BYTES

    def _know(self, descriptor: int, one: _Open) -> None:
        """Notes that a stranger was let in or cut."""
        one.is_stranger = False
        self._young.pop(descriptor, None)
        self._strangers.discard(one.peer)
        self._charged.pop(one.peer, None)

    def _end(self, descriptor: int, one: _Open, now: float) -> None:
        """A descriptor was closed."""
        is_in_vain = one.is_stranger and not self._is_heard(one.peer)
        self._admitted.pop(one.peer, None)
        self._know(descriptor, one)
        if is_in_vain:
            self._turnstile.count(one.network, 1.0, now)

    def _turn(self, now: float) -> None:
        waiting = self._turnstile.waiting(now)
        for network in waiting ^ self._waiting:
            for listening in self._listening:
                shut_out(listening, network, is_out=network in waiting)
        self._waiting = waiting

    def _charge_unseen(self, now: float) -> None:
        """Charges networks for calls of connections that have ended: one that is cut may have sent many calls."""
        for peer in self._charged.keys() - self._strangers:
            charged, host = self._charged.pop(peer), peer.partition(":")[2].rpartition(":")[0]
            if not self._is_heard(peer):
                network = network_of(host.removeprefix("%5B").removesuffix("%5D").partition("%25")[0])
                self._turnstile.count(network, 0.0, now, for_calls=charged / BUDGET_BYTES)

    def _forget_unseen(self) -> None:
        """Forgets callers that were admitted before the last round and not seen in it.

        Only if all descriptors were known since: one behind a gap of free ones is found by a listing alone, and without what its messages
        count for, the connection would be cut.
        """
        seen = {one.peer for one in self._open.values()}
        for peer, received in self._admitted.copy().items():
            if peer not in seen and received.since < min(self._round_began_at, self._all_known_at):
                self._admitted.pop(peer, None)
