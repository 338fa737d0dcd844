"""A chief that has moved: the worker learns its address from the parameter servers, and moves only to a chief that answers."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import pytest

from ps_protocol.errors import Cancelled, DeadlineExceeded, InvalidSpec, Unavailable
from ps_protocol.roles.chief import GetModelRequest
from ps_protocol.roles.shard import ShardReport, ShardStatus, ShardStatusRequest
from tests.support.chief.eras import fence
from tests.support.waiting import wait_until
from worker_client.cluster.chief import ChiefLink


class FakeChief:
    """Answers its name, or fails."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.is_closed = False
        self.limits: list[float | None] = []
        # What happens during the next call.
        self.meanwhile: Callable[[], object] = lambda: None

    def close(self) -> None:
        self.is_closed = True

    def call(self, request: object, *, timeout_s: float | None = None) -> Any:
        self.limits.append(timeout_s)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if self.error is not None:
            raise self.error
        return self.name


def status(address: str, incarnation: int) -> ShardStatus:
    return ShardStatus(shard=0, process_incarnation=0, fence=fence(1, incarnation), step=None, report=ShardReport(), chief_address=address)


class FakeServer:
    """Answers its status, or is not there."""

    def __init__(self, status: ShardStatus | None) -> None:
        self.status = status

    def call(self, request: ShardStatusRequest) -> ShardStatus:
        if self.status is None:
            raise Unavailable("nobody there")
        return self.status

    def close(self) -> None:
        """Nothing is open."""


class Town:
    """Chiefs by address, and what each server says of them."""

    def __init__(self, old: FakeChief, statuses: dict[str, ShardStatus | None], **chiefs: FakeChief) -> None:
        self.old, self.chiefs, self.statuses, self.num_looks = old, chiefs, statuses, 0
        seam: Any = self
        self.link = ChiefLink(old, seam, address="old", silence_s=0.0)  # type: ignore[arg-type]
        self.link.know_servers(list(statuses))

    def watching(self, what: str, **_: Any) -> Any:
        return nullcontext()

    def open_chief(self, address: str) -> Any:
        chief = self.chiefs[address]
        chief.call(GetModelRequest())
        return chief

    def open_replica(self, index: None, address: str) -> "FakeServer":
        self.num_looks += 1
        return FakeServer(self.statuses[address])

    def ask(self, before: Callable[[], None] | None = None) -> Any:
        return self.link.ask_once(GetModelRequest(), before=before)

    def fail(self, times: int = 2) -> None:
        for _ in range(times):
            with pytest.raises(Unavailable):
                self.ask()


def test_a_worker_moves_to_the_newest_chief_that_the_servers_know() -> None:
    old, new = FakeChief("old", Unavailable("nobody there")), FakeChief("new")
    town = Town(old, {"a": status("older", 2), "b": status("new", 3), "c": None}, new=new)
    town.fail(1)
    assert (town.ask(), town.link.address, old.is_closed) == ("new", "new", True)


def test_the_search_for_another_chief_begins_while_the_chief_hangs() -> None:
    old, new = FakeChief("old"), FakeChief("new")
    town = Town(old, {"a": status("new", 3)}, new=new)
    town.link.look_around()
    wait_until(lambda: old.is_closed, what="the old connection is closed, which ends what hangs there")
    assert (town.ask(), town.link.address) == ("new", "new")


def test_a_search_that_may_not_ask_the_servers_any_more_finds_nothing() -> None:
    """Once `lockstep up` has ended, the file of its tokens is gone."""
    town = Town(FakeChief("old", Unavailable("nobody there")), {"a": status("new", 3)})
    town.open_replica = _refuse  # type: ignore[method-assign]
    town.fail()


def _refuse(index: None, address: str) -> NoReturn:
    raise InvalidSpec("cannot read the tokens")


def test_attempts_are_bounded_by_what_their_caller_has_left() -> None:
    town = Town(FakeChief("old"), {})
    for left_s in (None, 0.5):
        assert town.link.ask_once(GetModelRequest(), left_s) == "old"  # type: ignore[comparison-overlap]
    assert town.old.limits == [None, 1.5]  # a chief that is there may still say what is waited for


def test_a_worker_does_not_search_for_a_chief_that_answers() -> None:
    town = Town(FakeChief("old"), {"a": status("new", 3)}, new=FakeChief("new"))
    assert (town.ask(), town.num_looks) == ("old", 0)


def test_a_chief_that_stays_at_its_address_is_waited_for() -> None:
    town = Town(FakeChief("old", Unavailable("nobody there")), {"a": status("old", 3)})
    town.fail(4)
    town.old.error = None
    assert town.ask() == "old"


@pytest.mark.parametrize("named", [("old", "new"), ("old", "gone", "gone", "new")])
def test_of_two_chiefs_with_one_incarnation_a_worker_moves_to_the_one_that_answers(named: tuple[str, ...]) -> None:
    """Two that began at once, after everything was lost; one has given up, and a server still names it."""
    statuses: dict[str, ShardStatus | None] = {f"server {place}": status(address, 2) for place, address in enumerate(named)}
    gone = FakeChief("gone", Unavailable("nobody there"))
    town = Town(FakeChief("old", Unavailable("nobody there")), statuses, new=FakeChief("new"), gone=gone)
    town.fail(1)
    assert town.ask() == "new"


def test_a_worker_does_not_move_to_a_chief_that_does_not_answer_at_its_new_address() -> None:
    town = Town(FakeChief("old", Unavailable("x")), {"a": status("new", 3)}, new=FakeChief("new", Unavailable("not yet")))
    town.fail(3)
    assert town.link.address == "old"
    town.chiefs["new"].error = None
    assert town.ask() == "new"


@pytest.mark.parametrize("error", [DeadlineExceeded("too late"), Cancelled("closed")])
def test_a_call_that_hung_at_the_old_chief_is_repeated_at_the_new_one(error: Exception) -> None:
    old = FakeChief("old", Unavailable("nobody there"))
    town = Town(old, {"a": status("new", 3)}, new=FakeChief("new"))

    def hang() -> None:
        town.fail(1)
        assert town.ask() == "new"  # another thread finds it
        raise error

    old.meanwhile = hang
    assert town.ask() == "new"


def test_the_call_before_a_question_is_repeated_too_at_the_new_chief() -> None:
    old, new = FakeChief("old", Unavailable("nobody there")), FakeChief("new")
    town = Town(old, {"a": status("new", 3)}, new=new)
    order: list[str] = []

    def move() -> None:
        order.append("question to old")
        town.fail(1)
        assert town.ask() == "new"  # another thread finds it, and may be taking the worker's place there
        new.meanwhile = lambda: order.append("question to new")
        raise Unavailable("gone")

    old.meanwhile = move
    assert town.ask(before=lambda: order.append("place is held")) == "new"
    assert order == ["place is held", "question to old", "place is held", "question to new"]
