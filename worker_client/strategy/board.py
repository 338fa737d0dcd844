"""A board on a parameter server as one participant uses it: it posts again what a server has lost. Knows no replica and no closure.

The name of a board decides which parameter server has it.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ps_protocol.errors import InvalidSpec, LimitExceeded, PsError, Superseded
from ps_protocol.process import waiting
from ps_protocol.roles.board import FIRST_KEY, BoardRequest, Boards, Found, Key, Post, PostHeader, Posts
from worker_client.accumulators import Access, open_boards
from worker_client.session.observer import Observer
from worker_client.session.session import Session

log = logging.getLogger("lockstep.worker")

# A server without room is tried again for so long.
LIMIT_S = 3.0
# A parameter server that does not answer is given up for so long.
_SERVER_S = 5.0
_PAUSE_S = 0.2
# An answer that comes so soon was not waited for.
_AT_ONCE_S = 0.05

Result = TypeVar("Result")


class Board:
    """One board. For one thread at a time."""

    def __init__(self, target: Session | Observer, name: str) -> None:
        self._target, self._name = target, name
        self._access: Access[Boards] | None = None
        # By author, what is to be there; and the server's process that has all of it, None: not known.
        self._kept: dict[int, Posts] = {}
        self._holder: int | None = None

    def post(self, author: int, post: Post, *, keeps_from: Key = FIRST_KEY, timeout_s: float = 0.0) -> None:
        """Posts, and keeps the post: if it cannot be sent, or is lost later, `read` posts it again. Tries for so long to send it.

        Raises LimitExceeded after 3 s, and Superseded if another process has this author's place: then there is no post.
        """
        begin_s = time.monotonic()
        self.keep(author, post, keeps_from=keeps_from)
        while True:
            try:
                return self._hold(self._send(author, post, keeps_from))
            except (LimitExceeded, Superseded) as error:
                # Other callers' posts and gradients fill the server for a moment; it does not say when it has room.
                if isinstance(error, Superseded) or time.monotonic() >= begin_s + LIMIT_S:
                    self._kept[author].remove(post.key)
                    raise
                time.sleep(_PAUSE_S)
            except InvalidSpec:
                raise
            except PsError as error:
                self._fail(error)
                if time.monotonic() >= begin_s + timeout_s:
                    return None

    def keep(self, author: int, post: Post, *, keeps_from: Key) -> None:
        """Has a post of any author posted again if the server loses it."""
        self._kept.setdefault(author, Posts()).add(post, keeps_from=keeps_from)

    def read(self, author: int, since: Key | None, wait_s: float) -> Found | None:
        """Returns what the board has of an author, waiting up to `wait_s` for it; None if no server answers.

        Raises LimitExceeded, once, for a post that a server has lost and that no longer has room.
        """
        request = BoardRequest(board=self._name, author=author, since=since, max_wait_s=wait_s)
        begin_s = time.monotonic()
        try:
            found = self._ask("read", lambda boards: boards.read(request), wait_s=wait_s)
        except InvalidSpec:
            raise
        except PsError as error:
            self._fail(error)
            return None
        try:
            self._hold(found.process_incarnation)
        except LimitExceeded:
            raise
        except PsError as error:
            self._fail(error)
            return None
        if found.post is None and wait_s and time.monotonic() < begin_s + _AT_ONCE_S:
            time.sleep(min(wait_s, _PAUSE_S))  # too many calls wait there
        return found

    def close(self) -> None:
        """Closes the connection; later calls connect again, also if servers have moved. Idempotent."""
        access, self._access = self._access, None
        if access is not None:
            access.close()

    def _hold(self, process_incarnation: int) -> None:
        """Posts all again if the server's process is another than the one that has them."""
        if self._holder == process_incarnation:
            return
        for author, posts in self._kept.items():
            for post in posts:
                try:
                    self._send(author, post, FIRST_KEY)
                except Superseded as error:
                    log.debug("%s: %s", self._name, error)
                except LimitExceeded:
                    posts.remove(post.key)
                    raise
        self._holder = process_incarnation

    def _send(self, author: int, post: Post, keeps_from: Key) -> int:
        header = PostHeader(
            board=self._name,
            author=author,
            incarnation=post.incarnation,
            key=post.key,
            keeps_from=keeps_from,
            content_bytes=post.content.nbytes,
        )
        return self._ask("post", lambda boards: boards.post(header, post.content), wait_s=0.0)

    def _ask(self, what: str, question: Callable[[Boards], Result], *, wait_s: float) -> Result:
        access = self._access
        if access is None:
            access = self._access = open_boards(self._target, self._name, timeout_s=_SERVER_S)
        subject = f"board {self._name!r} on {access.server}: {what}"
        with access.watching(subject, wait_s):
            return waiting.call(lambda _: question(access.calls), what=subject, timeout_s=access.timeout_s + wait_s)

    def _fail(self, error: PsError) -> None:
        log.debug("%s: %s", self._name, error)
        # What was posted may be lost.
        self._holder = None
        self.close()  # it may be elsewhere now
        time.sleep(_PAUSE_S)  # the server may be lost: without a pause, the caller would call it again and again
