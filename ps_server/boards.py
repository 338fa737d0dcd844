"""The boards of a parameter server for many threads: who may post, what is kept, calls that wait. Knows no wire and no post's meaning."""

import threading
import time
from collections.abc import Callable

from ps_protocol.errors import ShuttingDown, Superseded
from ps_protocol.model.layout import Segments, SegmentWriter, aligned_bytes
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import MAX_WAIT_S, POST_BYTES, BoardRequest, Found, Post, PostHeader, Posts
from ps_server.numbers.memory import MemoryBudget

# Calls that may wait at a time: each of them holds one of the server's threads. One more is answered at once.
MAX_WAITING = 256


class BoardRegistry:
    """All boards of one server. Thread-safe. Implements ps_protocol.roles.board.Boards; `owner` is for texts."""

    def __init__(self, *, owner: str, budget: MemoryBudget, process_incarnation: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner, self._budget, self._process_incarnation, self._clock = owner, budget, process_incarnation, clock
        self._changed = threading.Condition()
        # By board and author.
        self._posts: dict[tuple[str, int], Posts] = {}
        self._num_waiting = 0
        self._shutdown: ShuttingDown | None = None

    def post(self, header: PostHeader, content: Array) -> int:
        """Keeps a copy of a post, unless one is there at its key."""
        return self.receive(header, lambda writer: writer.write(0, content.data))

    def receive(self, header: PostHeader, feed: Callable[[SegmentWriter], None]) -> int:
        """Keeps the post whose bytes `feed` writes, all of them (else TruncatedStream); returns the server's process incarnation.

        Bytes are always wanted: an author seldom repeats a post. Raises Superseded, LimitExceeded.
        """
        with self._changed:
            self._checked_locked(header)
        # Counted here until it is kept, and counted there.
        num_counted = header.content_bytes + POST_BYTES
        purpose = f"a post on board {header.board!r}"
        content = self._budget.allocate_by(lambda: aligned_bytes(header.content_bytes), num_counted, purpose=purpose)
        try:
            Segments([content]).receive(feed)
            return self._keep(header, content)
        finally:
            self._budget.release(num_counted)

    def read(self, request: BoardRequest) -> Found:
        """Waits for a post, and takes nothing away."""
        ends_s = self._clock() + min(request.max_wait_s, MAX_WAIT_S)
        with self._changed:
            may_wait = self._num_waiting < MAX_WAITING
            self._num_waiting += 1
            try:
                while True:
                    if self._shutdown is not None:
                        raise self._shutdown
                    posts = self._posts.get((request.board, request.author)) or Posts()
                    post, left_s = posts.first(request.since), ends_s - self._clock()
                    if post is not None or left_s <= 0 or not may_wait:
                        return Found(process_incarnation=self._process_incarnation, newest=posts.newest, post=post)
                    self._changed.wait(left_s)
            finally:
                self._num_waiting -= 1

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls from now on, and ends those that wait. Idempotent: the first reason stays."""
        with self._changed:
            self._shutdown = self._shutdown or ShuttingDown(f"{self._owner} is shutting down: {reason}")
            self._changed.notify_all()

    def _keep(self, header: PostHeader, content: Array) -> int:
        with self._changed:
            posts = self._checked_locked(header)
            before = posts.nbytes
            posts.add(Post(key=header.key, incarnation=header.incarnation, content=content), keeps_from=header.keeps_from)
            self._posts[header.board, header.author] = posts
            self._budget.release(before - posts.nbytes)
            self._changed.notify_all()
        return self._process_incarnation

    def _checked_locked(self, header: PostHeader) -> Posts:
        if self._shutdown is not None:
            raise self._shutdown
        posts = self._posts.get((header.board, header.author)) or Posts()
        if header.incarnation < posts.incarnation:
            raise Superseded(
                f"{self._owner}: board {header.board!r}: incarnation {posts.incarnation} of author {header.author} has posted, and "
                f"incarnation {header.incarnation} is replaced by it; end this process"
            )
        return posts
