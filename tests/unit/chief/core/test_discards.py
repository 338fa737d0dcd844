"""The contributions that shards are told to drop: single ones, and whole incarnations; bounded, and none that is still to be applied."""

from chief.core.epoch.training import Discards
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.contribution import PushId


def push(worker: int, sequence: int = 1, incarnation: int = 1) -> PushId:
    return PushId(worker=worker, incarnation=incarnation, sequence=sequence)


def test_a_refused_contribution_is_passed_to_the_shards_once() -> None:
    discards = Discards()
    discards.add(push(1))
    discards.add(push(0))
    assert discards.take(()) == (push(0), push(1))
    assert (discards.take(()), bool(discards)) == ((), False)


def test_an_incarnation_is_dropped_as_a_whole_once_none_of_its_contributions_can_be_applied() -> None:
    discards = Discards()
    discards.add_incarnation(0, 1)
    discards.add(push(0, 2))
    assert discards.take([ChosenPush(push_id=push(0, 1), step=3)]) == (push(0, 2),)
    discards.add(push(0, 3))
    assert discards.take([ChosenPush(push_id=push(0, 1, incarnation=2), step=3)]) == (push(0, 0),)


def test_invented_contributions_of_a_caller_take_bounded_memory() -> None:
    discards = Discards()
    for number in range(20_000):
        discards.add(push(number))
        discards.add_incarnation(number, 1)
    assert len(discards.take(())) <= 20_000
