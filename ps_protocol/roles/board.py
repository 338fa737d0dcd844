"""Boards on which participants leave posts for each other: the calls to their holder, and the values of those calls. Knows no transport."""

from collections import OrderedDict
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple, Protocol

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import MAX_TENSOR_BYTES, Array, check_name

# Of an author's posts, the newest is kept, and others of so many bytes in all.
KEPT_BYTES = 64 << 20
# A post without content counts as so many bytes.
POST_BYTES = 1 << 10
# The longest that a call waits for a post; a longer wait is several calls.
MAX_WAIT_S = 5.0
_LARGEST = 1 << 62


class Key(NamedTuple):
    """The place of a post among those of its author: four numbers from 0 to 2^62, of which the first that differs decides."""

    first: int = 0
    second: int = 0
    third: int = 0
    fourth: int = 0

    @property
    def next(self) -> "Key":
        """The key that comes right after this one."""
        return self._replace(fourth=self.fourth + 1)


FIRST_KEY = Key()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PostHeader:
    """A post without its content: the `author` is a number on this board, and `incarnation` grows with each process in its place.

    The author's posts before `keeps_from` are dropped.
    """

    board: str
    author: int
    incarnation: int
    key: Key
    keeps_from: Key = FIRST_KEY
    content_bytes: int

    def __post_init__(self) -> None:
        check_name(self.board)
        for name, number in (("author", self.author), ("incarnation", self.incarnation)):
            _check_number(name, number, board=self.board)
        _check_key(self.key, board=self.board)
        _check_key(self.keeps_from, board=self.board)
        _check_size(self.content_bytes, what=f"board {self.board!r}: a post")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class BoardRequest:
    """Asks for the author's first post at `since` or after it (None: for the newest), and waits for one up to `max_wait_s`, at most 5 s."""

    board: str
    author: int
    since: Key | None
    max_wait_s: float

    def __post_init__(self) -> None:
        check_name(self.board)
        _check_number("author", self.author, board=self.board)
        if self.since is not None:
            _check_key(self.since, board=self.board)


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Post:
    """A post as it is kept: its bytes are not changed any more."""

    key: Key
    incarnation: int
    content: Array

    @property
    def nbytes(self) -> int:
        """Bytes that it counts."""
        return self.content.nbytes + POST_BYTES


@light_dataclass(frozen=True, slots=True, kw_only=True)
class FoundHeader:
    """What was found, without the post's content; `key` None: there is no post."""

    process_incarnation: int
    newest: Key | None = None
    key: Key | None = None
    incarnation: int = 0
    content_bytes: int = 0

    def __post_init__(self) -> None:
        _check_size(self.content_bytes, what="a post")


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The post that was asked for, if it is there, and the key of its author's newest; `process_incarnation` is the server's.

    A server of another process incarnation has none of the earlier one's posts.
    """

    process_incarnation: int
    newest: Key | None = None
    post: Post | None = None

    @property
    def header(self) -> FoundHeader:
        """All of this but the content."""
        if self.post is None:
            return FoundHeader(process_incarnation=self.process_incarnation, newest=self.newest)
        return FoundHeader(
            process_incarnation=self.process_incarnation,
            newest=self.newest,
            key=self.post.key,
            incarnation=self.post.incarnation,
            content_bytes=self.post.content.nbytes,
        )


class Boards(Protocol):
    """The boards of one parameter server. Thread-safe. Both calls are idempotent: what ends as Unavailable can be repeated."""

    def post(self, header: PostHeader, content: Array) -> int:
        """Keeps a post, unless one is there at its key; returns the server's process incarnation. Raises Superseded, LimitExceeded."""

    def read(self, request: BoardRequest) -> Found:
        """Waits for a post, and takes nothing away."""


class Posts:
    """The posts of one author, in the order of their keys: the newest, and others of up to 64 MiB. Not thread-safe."""

    def __init__(self) -> None:
        self._posts: OrderedDict[Key, Post] = OrderedDict()
        # Of all posts.
        self.nbytes = 0
        # Of the latest process that has posted.
        self.incarnation = 0

    def __iter__(self) -> Iterator[Post]:
        return iter(list(self._posts.values()))

    @property
    def newest(self) -> Key | None:
        """The last key; None if there are no posts."""
        return next(reversed(self._posts), None)

    def add(self, post: Post, *, keeps_from: Key) -> None:
        """Keeps a post, unless one is there at its key. Drops those before `keeps_from`, and the oldest where they are too many."""
        self.incarnation = max(self.incarnation, post.incarnation)
        newest = self.newest
        if post.key not in self._posts:
            self._posts[post.key] = post
            self.nbytes += post.nbytes
            if newest is not None and post.key < newest:  # seldom: an author posts in order, and there may be many posts
                self._posts = OrderedDict(sorted(self._posts.items(), key=itemgetter(0)))
        while self._posts and next(iter(self._posts)) < keeps_from:
            self._drop_oldest()
        while self._posts and self.nbytes - self._posts[next(reversed(self._posts))].nbytes > KEPT_BYTES:
            self._drop_oldest()

    def remove(self, key: Key) -> None:
        """Drops the post at this key, if there is one."""
        post = self._posts.pop(key, None)
        self.nbytes -= post.nbytes if post is not None else 0

    def first(self, since: Key | None) -> Post | None:
        """Returns the first post at this key or after it; None: the newest."""
        found = None
        for key in reversed(self._posts):  # most readers ask for one of the last
            if since is not None and key < since:
                break
            found = self._posts[key]
            if since is None:
                break
        return found

    def _drop_oldest(self) -> None:
        _, post = self._posts.popitem(last=False)
        self.nbytes -= post.nbytes


def _check_key(key: Key, *, board: str) -> None:
    for number in key:
        _check_number("key", number, board=board)


def _check_size(nbytes: int, *, what: str) -> None:
    if nbytes > MAX_TENSOR_BYTES:
        raise LimitExceeded(f"{what} of {nbytes} bytes, limit {MAX_TENSOR_BYTES}; split it")


def _check_number(what: str, number: int, *, board: str) -> None:
    if not 0 <= number <= _LARGEST:
        raise InvalidSpec(f"board {board!r}: {what}: got {number}, want 0 to 2^62")
