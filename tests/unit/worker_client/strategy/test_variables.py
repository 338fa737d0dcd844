"""Variables of a strategy: aggregation, synchronisation, reductions to them, updates of them, and where they lie."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import DtypeMismatch, InvalidSpec, ShapeMismatch
from worker_client.strategy import (
    CollectiveHints,
    Mirrored,
    ParameterServerStrategy,
    PerReplica,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)

NONE, SUM, MEAN = VariableAggregation.NONE, VariableAggregation.SUM, VariableAggregation.MEAN
ON_READ = VariableSynchronization.ON_READ


def _variable(strategy: ParameterServerStrategy, initial: Any = 0.0, *, name: str = "v", **options: Any) -> Variable:
    with strategy.scope():
        return Variable(np.asarray(initial, np.float64), name=name, **options)


def _per_replica(*values: Any) -> PerReplica:
    return PerReplica({replica: np.asarray(value, np.float64) for replica, value in enumerate(values)})


def _across(strategy: ParameterServerStrategy, variable: Variable) -> Any:
    with strategy.scope():
        return variable.read_value().tolist()


def _in_replicas(strategy: ParameterServerStrategy, variable: Variable) -> list[Any]:
    seen: list[Any] = []
    strategy.run(lambda: seen.append(variable.read_value().tolist()))
    return seen


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_list_that_replicas_write_is_an_array_as_one_that_is_written_across_them(is_mirrored: bool) -> None:
    strategy = ParameterServerStrategy(2, mirrored=is_mirrored)
    with strategy.scope():
        v = Variable([1.0, 2.0], name="v", aggregation=MEAN)
    v.assign([3.0, 4.0])

    def step() -> None:
        context = get_replica_context()
        assert context is not None
        v.assign_add([2.0 * context.replica_id_in_sync_group, 1.0])
        with pytest.raises(ValueError, match="inhomogeneous"):
            v.assign_add([[1.0], 2.0])

    strategy.run(step)
    assert v.read_value().tolist() == [4.0, 5.0]


def test_rule_76_a_value_that_is_the_same_for_all_replicas_is_its_mean_and_has_no_sum() -> None:
    strategy, ones = ParameterServerStrategy(2), np.ones(3)
    v, extended = _variable(strategy, np.zeros(3)), strategy.extended
    assert extended.reduce_to("MEAN", ones, v) is ones
    for zero in (0, 0.0):
        assert extended.reduce_to("SUM", zero, v) == 0
    for same in (ones, np.zeros(3), 5.0, Mirrored({0: ones, 1: ones})):
        with pytest.raises(ValueError, match="the same for all 2 replicas cannot be reduced with SUM"):
            extended.reduce_to("SUM", same, v)
    mirrored = Mirrored({0: ones, 1: ones})
    assert extended.reduce_to("MEAN", mirrored, v) is mirrored
    alone = ParameterServerStrategy(1)
    assert alone.extended.reduce_to("SUM", ones, ones) is ones


@pytest.mark.parametrize("device", ["ps:1", "worker:1/replica:0", "worker:0/replica:2"])
def test_rule_80_there_is_no_reducing_to_a_place_that_this_worker_does_not_have(device: str) -> None:
    strategy = ParameterServerStrategy(2)
    assert float(strategy.extended.reduce_to("SUM", _per_replica(1, 2), "worker:0/replica:1")) == 3
    with pytest.raises(ValueError, match=f"there is no device '{device}'"):
        strategy.extended.reduce_to("SUM", _per_replica(1, 2), device)


@pytest.mark.parametrize("reduce", ["reduce_to", "batch_reduce_to"])
def test_invalid_destinations_and_hints_are_refused(reduce: str) -> None:
    strategy, other = ParameterServerStrategy(2), ParameterServerStrategy(2)
    v, foreign = _variable(strategy), _variable(other, name="foreign")

    def reduced(destinations: Any, hints: Any = None) -> Any:
        if reduce == "reduce_to":
            return strategy.extended.reduce_to("SUM", _per_replica(1, 2), destinations, hints)
        return strategy.extended.batch_reduce_to("SUM", [(_per_replica(1, 2), destinations)], hints)[0]

    assert float(reduced(v, CollectiveHints())) == float(reduced(v.copies[0])) == 3
    with pytest.raises(ValueError, match="destinations: got a list"):
        reduced([v])
    for variable in (foreign, foreign.copies[0]):
        with pytest.raises(ValueError, match='destinations: variable "foreign" was not created in the scope of this strategy'):
            reduced(variable)
    with pytest.raises(InvalidSpec, match=r"batch_reduce_to\(\): got a PerReplica among the pairs"):
        strategy.extended.batch_reduce_to("SUM", [_per_replica(1, 2)])  # type: ignore[list-item]
    for wrong in ({"timeout_seconds": 5}, {}, 5, "float16"):
        with pytest.raises(InvalidSpec, match=r"experimental_hints: got a .*, want CollectiveHints"):
            reduced(v, wrong)


def test_a_value_for_other_replicas_is_refused() -> None:
    strategy = ParameterServerStrategy(3)
    with pytest.raises(ValueError, match="a PerReplica has values of replicas 0, 1; want one of each of 0, 1, 2"):
        strategy.extended.reduce_to("SUM", _per_replica(1, 2), "ps:0")
    with pytest.raises(ValueError, match="nothing for replica 2"):
        strategy.run(lambda x: x, args=(_per_replica(1, 2),))


def test_rule_77_an_update_runs_once_where_there_is_one_copy_and_on_each_of_several() -> None:
    for is_mirrored, times in ((False, 1), (True, 3)):
        strategy, seen = ParameterServerStrategy(3, mirrored=is_mirrored), list[str]()
        v = _variable(strategy)

        def add(copy: Any, delta: Any, *, scale: float, seen: list[str] = seen) -> Any:
            seen.append(copy.device)
            return copy.assign_add(delta * scale)

        result = strategy.extended.update(
            v, add, args=(Mirrored(dict.fromkeys(range(3), np.float64(2))),), kwargs={"scale": 3.0}, group=False
        )
        assert [float(one) for one in result] == [6] * times
        assert seen == (list(strategy.extended.worker_devices) if is_mirrored else ["ps:0"])
        assert _across(strategy, v) == 6


def test_rule_77_the_results_of_an_update_are_merged_or_lists() -> None:
    strategy = ParameterServerStrategy(2, mirrored=True)
    v = _variable(strategy)
    shared = object()
    merged = strategy.extended.update(v, lambda copy: (copy, shared, {"own": object()}))
    assert merged[0] is v
    assert merged[1] is shared
    assert isinstance(merged[2]["own"], PerReplica)
    lists = strategy.extended.update(v, lambda copy: (copy, shared, {"own": copy.device}), group=False)
    assert lists[0] == list(v.copies.values())
    assert lists[1:] == ([shared], {"own": ["worker:0/replica:0", "worker:0/replica:1"]})


def test_rule_77_variables_as_arguments_of_an_update_are_their_copies_there() -> None:
    strategy = ParameterServerStrategy(2, mirrored=True)
    v, slot = _variable(strategy), _variable(strategy, 4.0, name="slot")
    strategy.extended.update(v, lambda copy, other: copy.assign(other.assign_add(1.0)), args=(slot,))
    assert (_in_replicas(strategy, v), _in_replicas(strategy, slot)) == ([5, 5], [5, 5])


def test_a_variable_with_one_copy_takes_no_per_replica_arguments() -> None:
    strategy = ParameterServerStrategy(2)
    v = _variable(strategy)
    for given_arguments in ({"args": (_per_replica(1, 2),)}, {"kwargs": {"delta": [_per_replica(1, 2)]}}):
        with pytest.raises(ValueError, match=r'update\(\) of variable "v" was given a per-replica value'):
            strategy.extended.update(v, lambda copy, delta: copy.assign(delta), **given_arguments)
    with pytest.raises(ValueError, match="per-replica value"):
        strategy.extended.update_non_slot(v, lambda delta: delta, args=(_per_replica(1, 2),))
    assert _across(strategy, v) == 0


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_an_update_that_fails_leaves_the_variable_as_it_was(is_mirrored: bool) -> None:
    strategy = ParameterServerStrategy(2, mirrored=is_mirrored)
    v, calls = _variable(strategy, 1.0), list[Any]()

    def fails(copy: Any) -> None:
        calls.append(copy.assign(9.0))
        if len(calls) == len(v.copies):
            raise KeyError("late")

    with pytest.raises(KeyError):
        strategy.extended.update(v, fails)
    assert _in_replicas(strategy, v) == [1, 1]


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_an_update_within_an_update_fails_by_itself_and_with_the_outer_one(is_mirrored: bool) -> None:
    strategy = ParameterServerStrategy(1, mirrored=is_mirrored)
    v = _variable(strategy, 1.0)

    def add(copy: Any, delta: float, *, fails: bool) -> None:
        copy.assign_add(delta)
        if fails:
            raise KeyError("inner" if delta == 10 else "outer")

    def outer(copy: Any, *, inner_fails: bool) -> None:
        copy.assign_add(1.0)
        try:
            strategy.extended.update(v, add, args=(10.0,), kwargs={"fails": inner_fails})
        except KeyError:
            return
        raise KeyError("outer")

    with pytest.raises(KeyError, match="outer"):
        strategy.extended.update(v, outer, kwargs={"inner_fails": False})
    assert _across(strategy, v) == 1
    strategy.extended.update(v, outer, kwargs={"inner_fails": True})
    assert _across(strategy, v) == 2


def test_an_update_takes_no_variable_of_another_strategy() -> None:
    strategy, other = ParameterServerStrategy(2), ParameterServerStrategy(2)
    v, foreign = _variable(strategy), _variable(other, 1.0, name="foreign")
    for fn in (lambda copy, s: s.assign(7.0), "s = s + 1; v = s"):
        with pytest.raises(ValueError, match='"foreign" was not created in the scope of this strategy'):
            strategy.extended.update(v, fn, kwargs={"s": foreign})
    assert _across(other, foreign) == 1


def test_an_update_in_a_replica_waits_for_the_others_and_happens_once() -> None:
    strategy = ParameterServerStrategy(3)
    v, calls = _variable(strategy), list[float]()
    strategy.run(lambda: strategy.extended.update(v, lambda copy: calls.append(float(copy.assign_add(1.0)))))
    assert calls == [1]


def test_rule_78_what_belongs_to_no_variable_lies_at_the_variable_with_the_smallest_name() -> None:
    strategy = ParameterServerStrategy(2)
    b, a = _variable(strategy, name="b"), _variable(strategy, name="a")
    place = strategy.extended.non_slot_devices([b, a])
    assert place is a
    with strategy.scope(), strategy.extended.colocate_vars_with(place):
        beta = Variable(0.5, name="beta1_power")
    assert beta.device == a.device
    result = strategy.extended.update_non_slot(place, lambda power, factor: power.assign(power.read_value() * factor), args=(beta, 0.5))
    assert float(result) == 0.25
    assert [float(one) for one in strategy.extended.update_non_slot(place, beta.read_value, group=False)] == [0.25]
    with pytest.raises(ValueError, match="no variables"):
        strategy.extended.non_slot_devices([])


def test_rule_78_only_the_strategys_own_variables_are_colocated_with_and_updated() -> None:
    strategy, other = ParameterServerStrategy(2), ParameterServerStrategy(2)
    foreign, outside = _variable(other, name="foreign"), Variable(0.0, name="outside")
    for variable in (foreign, outside):
        with strategy.scope(), pytest.raises(ValueError, match="not created in the scope of this strategy"):
            strategy.extended.colocate_vars_with(variable).__enter__()
        with pytest.raises(ValueError, match="not created in the scope of this strategy"):
            strategy.extended.update(variable, lambda copy: None)
    with pytest.raises(RuntimeError, match=r"only inside of strategy\.scope"):
        strategy.extended.colocate_vars_with(_variable(strategy)).__enter__()


def test_rule_78_devices_are_tuples_of_names_one_for_each_replica() -> None:
    shared, mirrored = ParameterServerStrategy(2), ParameterServerStrategy(2, mirrored=True)
    assert shared.extended.worker_devices == ("worker:0/replica:0", "worker:0/replica:1")
    assert shared.extended.parameter_devices == ("ps:0",)
    assert mirrored.extended.parameter_devices == mirrored.extended.worker_devices
    assert (_variable(shared).device, _variable(mirrored).device) == ("ps:0", "worker:0/replica:0")
    assert shared.extended.experimental_require_static_shapes is False


def test_all_reduce_counts_every_replica_also_where_all_give_the_same_object() -> None:
    strategy, shared = ParameterServerStrategy(3), np.ones(2)

    def step(x: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", {"shared": shared, "own": [x]})

    seen = strategy.run(step, args=(_per_replica(1, 2, 3),))
    assert (seen["shared"].tolist(), float(seen["own"][0])) == ([3, 3], 6)


def test_reduce_along_an_axis_weighs_every_element_the_same() -> None:
    strategy = ParameterServerStrategy(2)
    value = _per_replica([1, 2, 3], [6])
    assert float(strategy.reduce("SUM", value, axis=0)) == 12
    assert float(strategy.reduce("MEAN", value, axis=0)) == 3
    nested = strategy.reduce("MEAN", {"loss": (_per_replica(1, 2), 4.0)})
    assert (float(nested["loss"][0]), nested["loss"][1]) == (1.5, 4.0)
    assert float(strategy.reduce("MEAN", np.array([1.0, 3.0]), axis=0)) == 2


def test_a_sum_of_halves_along_an_axis_keeps_growing() -> None:
    strategy, halves = ParameterServerStrategy(2), np.ones((4096, 2), np.float16)
    value = PerReplica({0: halves, 1: halves})
    for op, expected in (("SUM", 8192), ("MEAN", 1)):
        result = strategy.reduce(op, value, axis=0)
        assert (result.dtype, result.tolist()) == (np.float16, [expected, expected])
    assert strategy.reduce("SUM", PerReplica({0: halves[:1], 1: halves[:1]}), axis=0).tolist() == [2, 2]


def test_a_value_that_was_read_is_read_only_and_an_assigned_array_may_change() -> None:
    strategy, mine = ParameterServerStrategy(2), np.ones(2)
    v = _variable(strategy, np.zeros(2))
    v.assign(mine)
    mine[:] = 5
    assert _across(strategy, v) == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        v.read_value()[0] = 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_that_replicas_write_take_the_variables_type(dtype: Any) -> None:
    strategy = ParameterServerStrategy(2)
    with strategy.scope():
        v, count = (Variable(np.zeros((), dtype), name=name, aggregation=SUM) for name in ("v", "count"))
        metric = Variable(np.zeros((), dtype), name="metric", aggregation=SUM, synchronization=ON_READ)

    def step(number: int) -> None:
        v.assign_add(number / 2)
        count.assign_add(number)

    strategy.run(step, args=(PerReplica({0: 1, 1: 2}),))
    assert (float(v.read_value()), float(count.read_value()), v.read_value().dtype) == (1.5, 3, dtype)
    with pytest.raises(DtypeMismatch, match="cast with"):
        metric.assign(np.zeros((), np.float16 if dtype is np.float32 else np.float32 if dtype is np.float64 else np.float64))


def test_a_value_that_does_not_fit_a_variable_is_refused_and_changes_nothing() -> None:
    strategy = ParameterServerStrategy(2)
    v = _variable(strategy, np.zeros(2))
    with pytest.raises(ShapeMismatch, match=r'variable "v" has shape \(2,\), assign_add\(\) was given \(\)'):
        v.assign_add(1.0)
    with pytest.raises(DtypeMismatch, match="cast with"):
        v.assign(np.zeros(2, np.float32))
    with pytest.raises(TypeError, match="reduce it"):
        v.copies[0].assign(_per_replica(1, 2))
    for wrong in (None, "1", [None, 1.0], 1j, 10**400, object()):
        with pytest.raises(DtypeMismatch, match=r'variable "v": assign\(\): got'):
            v.assign(wrong)
    assert _across(strategy, v) == [0, 0]


def test_an_invalid_variable_declaration_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="int64"):
        Variable(1, name="v")
    with pytest.raises(InvalidSpec, match="aggregation: got 'SUM'"):
        Variable(1.0, name="v", aggregation="SUM")  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="synchronization: got 'ON_READ'"):
        Variable(1.0, name="v", synchronization="ON_READ")  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec):
        Variable(1.0, name="")
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidSpec, match="replicas_per_worker"):
            ParameterServerStrategy(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match=r"session: got a str, want the session that lockstep.connect\(\) returns"):
        ParameterServerStrategy(session="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_formula_updates_the_variable_and_its_slots_like_the_same_function(is_mirrored: bool) -> None:
    strategy = ParameterServerStrategy(2, mirrored=is_mirrored)
    by_text, by_function = _variable(strategy, np.ones(3)), _variable(strategy, np.ones(3), name="other")
    slots = [_variable(strategy, np.full(3, 0.1), name=name) for name in ("slot", "other slot")]

    def adagrad(copy: Any, slot: Any, gradient: Any) -> None:
        total = slot.assign_add(gradient * gradient)
        copy.assign_sub(0.5 * gradient / np.sqrt(total))

    for step in range(3):
        gradient = strategy.extended.reduce_to("SUM", _per_replica([1, 2, step], [0, 1, 1]), by_text)
        text = "s = s + g * g; v = v - 0.5 * g / sqrt(s)"
        value = strategy.extended.update(by_text, text, kwargs={"s": slots[0], "g": gradient}, group=False)[0]
        strategy.extended.update(by_function, adagrad, args=(slots[1], gradient))
        assert np.asarray(value).tolist() == _across(strategy, by_text) == _across(strategy, by_function)
        assert _across(strategy, slots[0]) == _across(strategy, slots[1])


def test_a_formula_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    strategy = ParameterServerStrategy(2)
    v, slot = _variable(strategy, np.ones(2)), _variable(strategy, np.ones(2), name="slot")
    update = strategy.extended.update
    with pytest.raises(InvalidSpec, match="column 5: unknown name 'g'"):
        update(v, "v - g")
    with pytest.raises(InvalidSpec, match="'g' is an argument"):
        update(v, "g = v", kwargs={"g": 1.0})
    with pytest.raises(InvalidSpec, match="by name"):
        update(v, "v - g", args=(1.0,))
    with pytest.raises(InvalidSpec, match="'v' is the variable itself"):
        update(v, "v", kwargs={"v": 1.0})
    with pytest.raises(InvalidSpec, match="do not fit"):
        update(v, "s = s + 1; v = v - g", kwargs={"s": slot, "g": np.ones(3)})
    with pytest.raises(DtypeMismatch):
        update(v, "s = s + 1; v = v - g", kwargs={"s": slot, "g": np.ones(2, np.float32)})
    for wrong in (None, "0.5", [None, 1.0], 10**400):
        with pytest.raises(DtypeMismatch, match="with a formula: 'g': got"):
            update(v, "s = s + 1; v = v - g", kwargs={"s": slot, "g": wrong})
    with pytest.raises(InvalidSpec, match="got a NoneType, want a function"):
        update(v, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match="'v' and 's' are one variable, \"v\"; give it one name"):
        update(v, "v = v + 1; s = s + 1", kwargs={"s": v})
    with pytest.raises(InvalidSpec, match="'s' and 't' are one variable, \"slot\""):
        strategy.run(lambda: update(v, "v + s + t", kwargs={"s": slot, "t": slot}))
    assert (_across(strategy, v), _across(strategy, slot)) == ([1, 1], [1, 1])


@pytest.mark.parametrize("name", ["_", "copy", "self", "fn"])
def test_a_formula_has_any_names(name: str) -> None:
    strategy = ParameterServerStrategy(2)
    v = _variable(strategy, 1.0)
    strategy.extended.update(v, f"v - {name}", kwargs={name: 0.25, "unused": "text"})
    strategy.run(lambda: strategy.extended.update(v, f"v - {name}", kwargs={name: 0.25}))
    assert _across(strategy, v) == 0.5


@pytest.mark.parametrize(("num_replicas", "options"), [(2, {"mirrored": True}), (1, {}), (2, {})])
def test_a_formula_takes_for_each_copy_its_own_values(num_replicas: int, options: Any) -> None:
    strategy = ParameterServerStrategy(num_replicas, **options)
    kind: dict[str, Any] = {"synchronization": ON_READ, "aggregation": MEAN} if num_replicas == 2 and not options else {}
    v = _variable(strategy, 1.0, **kind)
    value = PerReplica({replica: np.float64(replica + 1) for replica in range(num_replicas)})
    strategy.extended.update(v, "v + g", kwargs={"g": value})
    assert _in_replicas(strategy, v) == [2.0, 3.0][:num_replicas]


def test_a_variable_of_another_byte_order_has_this_machines() -> None:
    strategy = ParameterServerStrategy(2)
    with strategy.scope():
        v = Variable(np.arange(3, dtype=">f8"), name="v")
    strategy.extended.update(v, "v + g", kwargs={"g": np.ones(3)})
    assert v.dtype.isnative and v.read_value().dtype.isnative
    assert _across(strategy, v) == [1, 2, 3]
