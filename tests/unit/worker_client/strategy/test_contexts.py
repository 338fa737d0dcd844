"""Contexts of a strategy: in a replica, across replicas, in an update; and replicas that merge."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from worker_client.strategy import (
    ParameterServerStrategy,
    PerReplica,
    Variable,
    VariableAggregation,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)


def _context() -> Any:
    context = get_replica_context()
    assert context is not None
    return context


def _replica() -> int:
    number: int = _context().replica_id_in_sync_group
    return number


def _variable(strategy: ParameterServerStrategy, **options: Any) -> Variable:
    with strategy.scope():
        return Variable(np.zeros(2, np.float32), name="v", **options)


def test_rule_75_a_program_begins_in_the_one_replica_of_the_default_strategy() -> None:
    assert not in_cross_replica_context()
    assert not has_strategy()
    assert (_replica(), _context().num_replicas_in_sync) == (0, 1)
    assert get_strategy() is _context().strategy
    assert _context().merge_call(lambda strategy, x: (strategy is get_strategy(), in_cross_replica_context(), x), args=(3,)) == (
        True,
        True,
        3,
    )
    assert float(_context().all_reduce("SUM", 2.5)) == 2.5


def test_the_strategy_of_a_thread_is_that_whose_scope_it_is_in() -> None:
    strategy = ParameterServerStrategy(2)
    with strategy.scope(), strategy.scope() as inner:
        assert get_strategy() is inner is strategy
        assert strategy.run(has_strategy) is True
    assert not has_strategy()


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy, v: strategy.extended.colocate_vars_with(v).__enter__(),
        lambda strategy, v: strategy.run(lambda: None),
        lambda strategy, v: strategy.scope().__enter__(),
        lambda strategy, v: strategy.experimental_distribute_values_from_function(lambda context: 1),
        lambda strategy, v: Variable(0.0, name="late"),
    ],
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_rule_75_what_works_across_replicas_is_a_runtime_error_in_one(call: Any, num_replicas: int) -> None:
    strategy = ParameterServerStrategy(num_replicas)
    v = _variable(strategy)
    with pytest.raises(RuntimeError, match=r"across replicas|before run"):
        strategy.run(lambda: call(strategy, v))
    # The same works in a merge.
    assert strategy.run(lambda: _context().merge_call(lambda strategy: in_cross_replica_context())) is True


def test_rule_75_the_scope_of_another_strategy_is_a_runtime_error() -> None:
    one, other = ParameterServerStrategy(2), ParameterServerStrategy(2)
    v = _variable(one)
    with other.scope():
        for call in (
            lambda: one.extended.reduce_to("MEAN", 1.0, v),
            lambda: one.run(lambda: None),
            lambda: v.assign(np.zeros(2)),
            v.read_value,
        ):
            with pytest.raises(RuntimeError, match="another strategy"):
                call()


def test_rule_75_an_update_is_a_context_of_its_own_across_replicas() -> None:
    strategy = ParameterServerStrategy(2)
    v = _variable(strategy)
    assert strategy.extended.update(v, lambda copy: (in_cross_replica_context(), get_replica_context() is None)) == (True, True)


def test_contexts_belong_to_a_thread() -> None:
    found: list[bool] = []
    with ParameterServerStrategy(2).scope():
        thread = threading.Thread(target=lambda: found.append(has_strategy()))
        thread.start()
        thread.join()
    assert found == [False]


def test_replicas_run_in_turn_each_until_it_merges() -> None:
    strategy, order = ParameterServerStrategy(3), list[str]()

    def step() -> None:
        order.append(f"{_replica()} begins")
        _context().merge_call(lambda strategy: order.append("merge"))
        order.append(f"{_replica()} ends")

    strategy.run(step)
    assert order == ["0 begins", "1 begins", "2 begins", "merge", "0 ends", "1 ends", "2 ends"]


def test_a_merge_gets_what_all_replicas_give_as_one_and_each_gets_its_part() -> None:
    strategy, shared = ParameterServerStrategy(2), object()

    def merged(strategy: ParameterServerStrategy, x: Any, *, same: Any) -> Any:
        assert same is shared
        return PerReplica({replica: value * 10 for replica, value in x.values.items()}), "all"

    seen = strategy.run(lambda: _context().merge_call(merged, args=(_replica() + 1,), kwargs={"same": shared}))
    assert (seen[0].values, seen[1]) == ({0: 10, 1: 20}, "all")


def test_an_exception_in_one_replica_ends_all_replicas_and_the_run() -> None:
    strategy, ended = ParameterServerStrategy(3), list[int]()

    def step() -> None:
        try:
            if _replica() == 1:
                raise KeyError("lost")
            _context().merge_call(lambda strategy: None)
        finally:
            ended.append(_replica())

    before = threading.active_count()
    with pytest.raises(KeyError, match="lost"):
        strategy.run(step)
    assert sorted(ended) == [0, 1]  # replica 2 had not begun
    assert threading.active_count() == before
    assert not has_strategy()


def test_an_exception_in_a_merge_ends_all_replicas_even_those_that_would_merge_again() -> None:
    strategy = ParameterServerStrategy(2)

    def fails(strategy: ParameterServerStrategy) -> None:
        raise KeyError("merge")

    def step() -> None:
        try:
            _context().merge_call(fails)
        finally:
            _context().merge_call(lambda strategy: None)

    before = threading.active_count()
    with pytest.raises(KeyError, match="merge"):
        strategy.run(step)
    assert threading.active_count() == before


def test_replicas_that_merge_a_different_number_of_times_are_refused() -> None:
    strategy = ParameterServerStrategy(3)

    def step() -> None:
        if _replica() != 1:
            _context().merge_call(lambda strategy: None)

    with pytest.raises(RuntimeError, match="replica 0 calls merge_call, replica 1 has returned"):
        strategy.run(step)


def test_a_context_that_was_kept_is_refused_outside_of_its_replica() -> None:
    strategy, kept = ParameterServerStrategy(2), list[Any]()

    def merges_again() -> None:
        context = _context()
        kept.append(context)
        context.merge_call(lambda strategy: context.all_reduce("SUM", np.ones(1)))

    def takes_the_others() -> None:
        kept[0].all_reduce("SUM", np.ones(1))

    for step in (merges_again, takes_the_others):
        with pytest.raises(RuntimeError, match="only in the replica whose context this is"):
            strategy.run(step)
    with pytest.raises(RuntimeError, match="only in the replica whose context this is"):
        kept[0].merge_call(lambda strategy: None)


def test_the_refusal_of_replicas_that_merge_with_different_functions_names_both() -> None:
    strategy = ParameterServerStrategy(3)
    with strategy.scope():
        v, other = (Variable(np.zeros(2), name=name, aggregation=VariableAggregation.SUM) for name in ("v", "other"))
    update = strategy.extended.update
    ones = np.ones(2)

    def first(strategy: ParameterServerStrategy, value: Any) -> None:
        raise AssertionError

    def second(strategy: ParameterServerStrategy, value: Any) -> None:
        raise AssertionError

    calls: list[tuple[Any, Any, str]] = [
        (lambda: _context().merge_call(first, (1,)), lambda: _context().merge_call(second, (1,)), r"'second' \(line .*'first' \(line"),
        (lambda: _context().merge_call(first, (1,)), lambda: v.assign(ones), r"replica 2 is at 'write' .* replica 0 at 'first'"),
        (lambda: v.assign(ones), lambda: other.assign(ones), 'replica 2 has Variable "other" where replica 0 has Variable "v"'),
        (lambda: v.assign(ones), lambda: v.assign_add(ones), "replica 2 has 'assign_add' where replica 0 has 'assign'"),
        (lambda: _context().all_reduce("SUM", ones), lambda: _context().all_reduce("MEAN", ones), r"replica 2 has .*MEAN.* where .*SUM"),
        (lambda: update(v, "v + 1"), lambda: update(v, "v + 2"), r"update\(\): replica 2 is at 'v \+ 2', replica 0 at 'v \+ 1'"),
        (lambda: update(v, "v + 1"), lambda: update(other, "v + 1"), r'update\(\): replica 2 has Variable "other"'),
    ]
    for call, another, words in calls:
        with pytest.raises(RuntimeError, match=f"{words}.*; all replicas must make the same calls in the same order"):
            strategy.run(lambda call=call, another=another: another() if _replica() == 2 else call())
    with strategy.scope():
        assert [one.read_value().tolist() for one in (v, other)] == [[0, 0], [0, 0]]


def test_a_function_that_each_replica_makes_of_the_same_lines_is_the_same() -> None:
    class Merges:
        def __call__(self, strategy: ParameterServerStrategy, factor: Any = 1) -> Any:
            return factor

        def method(self, strategy: ParameterServerStrategy) -> Any:
            return 1

    def made(number: int) -> Any:
        return lambda strategy: number

    strategy = ParameterServerStrategy(2)
    for make in (lambda: made(1), Merges, lambda: Merges().method, lambda: functools.partial(Merges(), factor=1)):
        assert strategy.run(lambda make=make: _context().merge_call(make())) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"args": 5}, r"args: got a int, want a tuple or list of arguments; for a single one: args=\(value,\)"),
        ({"args": "ab"}, "args: got a str, want a tuple or list"),
        ({"args": {"x": 1}}, "args: got a dict, want a tuple or list"),
        ({"kwargs": 5}, "kwargs: got a int, want a dict of arguments by name"),
        ({"kwargs": {5: 1}}, "kwargs: got a dict, want a dict of arguments by name"),
    ],
)
def test_every_call_that_passes_on_arguments_refuses_malformed_ones(given: dict[str, Any], words: str) -> None:
    strategy = ParameterServerStrategy(2)
    variable = _variable(strategy)
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: strategy.run(lambda *_: 1, **given),
        "merge_call": lambda: strategy.run(lambda: _context().merge_call(lambda *_: 1, **given)),
        "update": lambda: strategy.extended.update(variable, lambda *_: 1, **given),
        "update_non_slot": lambda: strategy.extended.update_non_slot(variable, lambda *_: 1, **given),
    }
    for what, call in calls.items():
        with strategy.scope(), pytest.raises(InvalidSpec, match=rf"{what}\(\): {words}"):
            call()


def test_arguments_that_cannot_be_called_or_iterated_or_are_no_axis_are_refused_with_a_reason() -> None:
    strategy = ParameterServerStrategy(2)
    variable, extended = _variable(strategy), strategy.extended
    wrong: Any = 5
    calls: dict[str, Callable[[], Any]] = {
        "run\\(\\): got a int, want a function": lambda: strategy.run(wrong),
        "merge_call\\(\\): got a int, want a function": lambda: strategy.run(lambda: _context().merge_call(wrong)),
        "update_non_slot\\(\\): got a int, want a function": lambda: extended.update_non_slot(variable, wrong),
        "_from_function\\(\\): got a int, want a function": lambda: strategy.experimental_distribute_values_from_function(wrong),
        "batch_reduce_to\\(\\): got a int, want a list of pairs": lambda: extended.batch_reduce_to("SUM", wrong),
        "non_slot_devices\\(\\): got a int, want a list of variables": lambda: extended.non_slot_devices(wrong),
        "axis: got 1.5, want a whole number": lambda: strategy.reduce("SUM", PerReplica({0: 1.0, 1: 2.0}), axis=wrong * 0.3),
    }
    for words, call in calls.items():
        with strategy.scope(), pytest.raises(InvalidSpec, match=words):
            call()
