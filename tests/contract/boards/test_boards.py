"""What boards do, in this process and over TCP: posts stay, in the order of their keys, and readers wait for them."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec, LimitExceeded, ShuttingDown, Superseded
from ps_protocol.roles.board import KEPT_BYTES, BoardRequest, Boards, Found, Key, PostHeader
from ps_protocol.rpc.board import GrpcBoards
from ps_server import boards as registry
from ps_server.boards import BoardRegistry
from ps_server.config import ParameterServerConfig
from ps_server.numbers.memory import MemoryBudget
from tests.support.parameter_servers.shards import open_server

LIMIT = 200 << 20


@pytest.fixture(params=["in process", "gRPC"])
def boards(request: pytest.FixtureRequest) -> Iterator[Boards]:
    if request.param == "in process":
        yield BoardRegistry(owner="ps 0", budget=MemoryBudget(LIMIT, owner="ps 0", lock=threading.Lock()), process_incarnation=7)
        return
    with open_server(ParameterServerConfig(index=0, max_memory_bytes=LIMIT)) as server:
        with contextlib.closing(GrpcBoards(server.address)) as client:
            client.handshake()
            yield client


def post(boards: Boards, *numbers: int, content: bytes = b"", author: int = 1, incarnation: int = 1, **more: Any) -> int:
    header = PostHeader(board="b", author=author, incarnation=incarnation, key=Key(*numbers), content_bytes=len(content), **more)
    return boards.post(header, np.frombuffer(content, np.uint8))


def read(boards: Boards, *since: int, author: int = 1, max_wait_s: float = 0.0) -> Found:
    key = Key(*since) if since else None
    return boards.read(BoardRequest(board="b", author=author, since=key, max_wait_s=max_wait_s))


def content(found: Found) -> bytes | None:
    return None if found.post is None else found.post.content.tobytes()


def test_a_post_is_read_by_all_and_stays(boards: Boards) -> None:
    post(boards, 1, content=b"one")
    assert [content(read(boards, 1)) for _ in range(2)] == [b"one"] * 2


def test_the_first_post_from_a_key_on_is_given_or_the_newest(boards: Boards) -> None:
    for numbers in ((2, 0, 5), (1, 9), (2, 1)):
        post(boards, *numbers, content=repr(numbers).encode())
    assert [content(read(boards, *since)) for since in ((0,), (1, 9), (1, 9, 0, 1), (2, 0, 6))] == [
        b"(1, 9)",
        b"(1, 9)",
        b"(2, 0, 5)",
        b"(2, 1)",
    ]
    beyond = read(boards, 3)
    assert (content(beyond), beyond.newest) == (None, Key(2, 1))
    assert content(read(boards)) == b"(2, 1)"
    assert read(boards, author=2).newest is None


def test_the_first_post_at_a_key_stays_as_it_is(boards: Boards) -> None:
    post(boards, 1, content=b"first")
    post(boards, 1, content=b"second")
    assert content(read(boards, 1)) == b"first"


def test_an_authors_earlier_posts_go_when_it_no_longer_needs_them(boards: Boards) -> None:
    for number in (1, 2, 3):
        post(boards, number, content=b"x", author=1)
        post(boards, number, content=b"y", author=2)
    post(boards, 4, keeps_from=Key(3))
    assert content(read(boards, 1)) == b"x"
    assert read(boards, 1).post is not None and read(boards, 1).post.key == Key(3)  # type: ignore[union-attr]
    assert read(boards, 1, author=2).post.key == Key(1)  # type: ignore[union-attr]


def test_beyond_64_mib_the_oldest_posts_go_but_never_the_newest(boards: Boards) -> None:
    large = bytes(KEPT_BYTES // 2)
    for number in (1, 2, 3):
        post(boards, number, content=large)
    assert read(boards, 1).post.key == Key(2)  # type: ignore[union-attr]
    post(boards, 4, content=bytes(KEPT_BYTES + 1))
    assert read(boards, 1).post.key == Key(3)  # type: ignore[union-attr]


def test_a_post_beyond_the_servers_memory_is_refused_and_what_was_posted_counts_until_it_goes(boards: Boards) -> None:
    post(boards, 1, content=bytes(LIMIT // 2 + 1))
    with pytest.raises(LimitExceeded, match="a post on board 'b'"):
        post(boards, 1, content=bytes(LIMIT // 2 + 1), author=2)
    post(boards, 2, keeps_from=Key(2))
    post(boards, 1, content=bytes(LIMIT // 2 + 1), author=2)


def test_a_process_whose_place_another_has_taken_cannot_post(boards: Boards) -> None:
    post(boards, 5, content=b"of the first", incarnation=1)
    post(boards, 4, content=b"of the second", incarnation=2)
    with pytest.raises(Superseded, match="incarnation 2 of author 1 has posted"):
        post(boards, 6, incarnation=1)
    found = read(boards, 4)
    assert (content(found), found.newest) == (b"of the second", Key(5))
    assert found.post is not None and found.post.incarnation == 2


def test_a_reader_waits_for_a_post_and_every_answer_names_the_servers_process(boards: Boards) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, boards, 1, max_wait_s=5.0)
        post(boards, 0, content=b"too early")
        incarnation = post(boards, 1, content=b"it")
        found = waiting.result(30)
    assert (content(found), found.process_incarnation) == (b"it", incarnation)
    assert read(boards, 9, max_wait_s=0.01).process_incarnation == incarnation


def test_a_large_post_arrives_unchanged(boards: Boards) -> None:
    whole = np.random.default_rng(0).bytes(5 << 20)
    post(boards, 1, content=whole)
    assert content(read(boards, 1)) == whole


@pytest.mark.parametrize("wrong", [{"author": -1}, {"incarnation": -1}, {"keeps_from": Key(0, -1)}])
def test_numbers_beyond_their_range_are_refused(wrong: dict[str, Any], boards: Boards) -> None:
    with pytest.raises(InvalidSpec, match="want 0 to 2"):
        post(boards, 1, **wrong)


def test_where_too_many_calls_wait_one_more_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_WAITING", 0)
    boards = BoardRegistry(owner="ps 0", budget=MemoryBudget(None, owner="ps 0"), process_incarnation=7, clock=lambda: 0.0)
    assert content(read(boards, 1, max_wait_s=5.0)) is None


def test_a_server_that_ends_wakes_who_waits() -> None:
    boards = BoardRegistry(owner="ps 0", budget=MemoryBudget(None, owner="ps 0"), process_incarnation=7)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, boards, 1, max_wait_s=5.0)
        boards.begin_shutdown("asked to")
        with pytest.raises(ShuttingDown):
            waiting.result(30)
    with pytest.raises(ShuttingDown):
        post(boards, 1)
