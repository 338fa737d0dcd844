"""The strategy and its `extended`: running replicas, reducing what they return, updating variables. Knows contexts and where copies lie."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.expressions import Formula
from ps_protocol.model.programs import Names, compute, parsed
from ps_protocol.model.variables import Array, check_name
from worker_client.accumulators import whole_number
from worker_client.model.declarations import IndexedSlices
from worker_client.session.session import Session
from worker_client.strategy import contexts
from worker_client.strategy.group import Cell, CollectiveHints, Combination, Group, LocalGroup, MemoryCell
from worker_client.strategy.reduction import ReduceOp, frozen, reduce_one, reduce_op_of, sum_along
from worker_client.strategy.replicas import one_function, run_replicas
from worker_client.strategy.values import Mirrored, PerReplica, arguments, check_alike, check_function, leaves, map_nested, regroup, select
from worker_client.strategy.variables import Variable, VariableCopy, as_array, container_of
from worker_client.strategy.workers import WorkerGroup


@dataclass(frozen=True, slots=True)
class ValueContext:
    """For which replica a value is wanted."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class ReplicaContext:
    """One replica, as its function sees it: `get_replica_context()` returns it."""

    def __init__(self, strategy: "ParameterServerStrategy", replica: int, call: contexts.Replica | None) -> None:
        self._strategy, self._replica, self._call = strategy, replica, call

    @property
    def strategy(self) -> "ParameterServerStrategy":
        """The strategy that the replica belongs to."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number, from 0, among those of all workers."""
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._strategy.num_replicas_in_sync

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` once, across replicas, and returns this replica's part of the result.

        Waits for all replicas. The arguments are those of all replicas, merged as `run()` merges its results. If `merge_fn`
        raises, or some replicas never call this, all replicas end here, and `run()` raises that error or RuntimeError. Raises
        RuntimeError anywhere but in this replica.
        """
        check_function("merge_call()", merge_fn)
        given_args, given_kwargs = arguments("merge_call()", args, kwargs)
        if self._call is not None:
            mode = contexts.current()
            if mode is None or mode.replica is not self._call:
                raise RuntimeError(
                    "merge_call() works only in the replica whose context this is, while it runs; call get_replica_context() there, not "
                    "in a merge, in another replica or thread, or after run()"
                )
            return self._call.merge(merge_fn, given_args, given_kwargs)
        with self._strategy.scope():
            return merge_fn(self._strategy, *given_args, **given_kwargs)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Returns the sum or mean of `value` over all replicas: an array, an IndexedSlices, or tuples, lists and dicts of them.

        Every replica contributes, also if all give the same object. Waits for all replicas.
        """
        op = reduce_op_of(reduce_op)

        def all_reduce(strategy: ParameterServerStrategy, values: Any, one_op: Any) -> Any:
            check_alike(one_op, "all_reduce()")
            found = leaves(values)
            results = iter(strategy.extended.batch_reduce_to(op, [(one, one) for one in found]))
            return map_nested(lambda _: next(results), values)

        return self.merge_call(all_reduce, args=(map_nested(_own, value), op))


class StrategyExtended:
    """The calls of a strategy for programs with replicas: reductions, updates, places. `strategy.extended` returns it."""

    def __init__(self, strategy: "ParameterServerStrategy", group: Group, *, is_mirrored: bool) -> None:
        self._strategy, self._group, self._is_mirrored = strategy, group, is_mirrored
        # Where the block that creates variables has them lie.
        self._beside: list[Variable] = []

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: replicas may return and reduce values of another shape each time. A variable's shape is fixed."""
        return False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of all replicas, by id: where replica functions run."""
        return self._group.worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the places where variables lie: those of the replicas if each has a copy."""
        return self.worker_devices if self._is_mirrored else self._group.parameter_devices

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, experimental_hints: CollectiveHints | None = None) -> Any:
        """Returns the sum or mean of a per-replica value, at `destinations`: a variable, a value, or a device's name.

        `destinations` the value itself: a Mirrored, with the result for each replica. A value that is the same for all replicas is its own
        mean, and 0 stays 0. Call it across replicas, else RuntimeError. Raises ValueError for the sum of a value that is the same for
        several replicas, for another `reduce_op`, and for a list of destinations.
        """
        contexts.check_cross_replica(self._strategy, "reduce_to()")
        op = reduce_op_of(reduce_op)
        hints = _hints(experimental_hints)
        self._check_destination(destinations)
        if isinstance(value, PerReplica):
            (result,) = self._combined(f"reduce_to() of {op.name}", [(op, value)], hints, [destinations])
            return self._sent_to(destinations, result)
        if isinstance(value, Mirrored) and op is ReduceOp.MEAN:
            return value
        return self._sent_to(destinations, reduce_one(op, value, num_replicas=self._group.num_replicas))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        experimental_hints: CollectiveHints | None = None,
    ) -> list[Any]:
        """Returns the results of `reduce_to()` for all pairs of a value and its destinations; over processes, in one exchange.

        As in the original, a value that is the same for all replicas counts as one contribution here, so its sum is itself.
        """
        contexts.check_cross_replica(self._strategy, "batch_reduce_to()")
        op, hints = reduce_op_of(reduce_op), _hints(experimental_hints)
        if not isinstance(value_destination_pairs, Iterable):
            raise InvalidSpec(
                f"batch_reduce_to(): got a {type(value_destination_pairs).__name__}, want a list of pairs (value, destinations)"
            )
        pairs = list(value_destination_pairs)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InvalidSpec(f"batch_reduce_to(): got a {type(pair).__name__} among the pairs; want pairs (value, destinations)")
            self._check_destination(pair[1])
        of_replicas = [pair for pair in pairs if isinstance(pair[0], PerReplica)]
        what, values, places = f"batch_reduce_to() of {op.name}", [(op, value) for value, _ in of_replicas], [one for _, one in of_replicas]
        reduced = iter(self._combined(what, values, hints, places) if values else ())
        return [self._sent_to(destinations, next(reduced) if isinstance(value, PerReplica) else value) for value, destinations in pairs]

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(copy, *args, **kwargs)` for each copy of the variable and returns the merged result, or with `group` False lists.

        `copy` has the variable's methods; Mirrored arguments and variables are unwrapped for it. `fn` may be a formula as text, such as
        "v - lr * g", in which the variable is `v` and `kwargs` are the other names; it may assign to variables among them, and its result
        is the variable. A variable with one copy takes no per-replica arguments. If `fn` fails, the variable and those among the
        arguments are what they were. In a replica, waits for the others and updates once.

        Raises ValueError for a variable of another strategy and for per-replica arguments, InvalidSpec for a formula, RuntimeError in
        another strategy's context.
        """
        given = arguments("update()", args, kwargs)
        if not callable(fn) and not isinstance(fn, str):
            raise InvalidSpec(f"update(): got a {type(fn).__name__}, want a function, or a formula as text")
        formula = _parsed(fn, given) if isinstance(fn, str) else None
        called = fn if callable(fn) else _computing(formula)
        mode = contexts.current()
        if mode is not None and mode.replica is not None:
            contexts.check_same(mode, self._strategy)

            def update(_: Any, variable: Any, functions: Any, /, *merged_args: Any, **merged_kwargs: Any) -> Any:
                check_alike(variable, "update()")
                if isinstance(functions, PerReplica):
                    one_function(functions.values, "update()")
                one_args, one_kwargs = map_nested(_one_of_all, (merged_args, merged_kwargs))
                return self.update(var, fn, one_args, one_kwargs, group)

            return mode.replica.merge(update, (self.value_container(var), fn, *given[0]), given[1])
        with self._strategy.scope():
            variable = self._own_variable(var, "update()")
            if not self._is_mirrored and not variable.is_on_read and self._group.num_replicas > 1:
                _check_not_per_replica(given, f'update() of variable "{variable.name}"')
            others = (self._own_variable(leaf, "update()") for leaf in leaves(given) if isinstance(leaf, Variable))
            touched = dict.fromkeys((variable, *others))
            if formula is not None:
                _check_named_once(variable, given[1])
            copies = [copy for one in touched for copy in one.copies.values()]
            for copy in copies:
                copy.stage()
            try:
                results = {index: self._call_at(index, copy, called, given) for index, copy in variable.copies.items()}
            except BaseException:
                for copy in copies:
                    copy.drop()
                raise
            with self._group.writing():
                for copy in copies:
                    copy.commit()
        merged_results = regroup(results, container_of)
        return merged_results if group else map_nested(lambda leaf: list(self._strategy.experimental_local_results(leaf)), merged_results)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(*args, **kwargs)` once for each place that `non_slot_devices()` returned, and returns the result as `update()` does.

        Call it across replicas, else RuntimeError. Raises ValueError for per-replica arguments.
        """
        contexts.check_cross_replica(self._strategy, "update_non_slot()")
        check_function("update_non_slot()", fn)
        with self._strategy.scope():
            variable = self._own_variable(colocate_with, "update_non_slot()")
            given = arguments("update_non_slot()", args, kwargs)
            _check_not_per_replica(given, "update_non_slot()")
            results = {index: self._call_at(index, None, fn, given) for index in variable.copies}
        merged = regroup(results, container_of)
        return merged if group else map_nested(lambda leaf: list(self._strategy.experimental_local_results(leaf)), merged)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """Returns the place for values of no single variable: the variable with the smallest name, the same for all programs.

        It is for `colocate_vars_with()` and `update_non_slot()`. Raises ValueError for an empty list.
        """
        if not isinstance(var_list, Iterable):
            raise InvalidSpec(f"non_slot_devices(): got a {type(var_list).__name__}, want a list of variables")
        if not var_list:
            raise ValueError("non_slot_devices(): got no variables; pass those that are optimized")
        return min((self._own_variable(var, "non_slot_devices()") for var in var_list), key=lambda var: var.name)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Has variables that are created in the block lie where this variable lies. Raises ValueError if it is another strategy's.

        Only in `scope()`, else RuntimeError.
        """
        mode = contexts.current()
        if mode is None:
            raise RuntimeError("colocate_vars_with() works only inside of strategy.scope()")
        contexts.check_cross_replica(self._strategy, "colocate_vars_with()")
        self._beside.append(self._own_variable(colocate_with_variable, "colocate_vars_with()"))
        try:
            yield
        finally:
            self._beside.pop()

    def value_container(self, value: Any) -> Any:
        """Returns the variable that a copy belongs to; any other value itself."""
        container = container_of(value)
        return value if container is None else container

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable, or the variable of this copy, was created in this strategy's scope."""
        variable = self.value_container(v)
        return isinstance(variable, Variable) and variable.strategy is self._strategy

    # -- for variables

    def place(self, name: str, value: Array, *, is_on_read: bool) -> dict[int, Cell]:
        """Returns the cells of a new variable, by the index of its copies."""
        if self._is_mirrored or is_on_read:
            return {replica: MemoryCell(self.worker_devices[replica], value) for replica in self._group.replicas}
        beside = self._beside[-1] if self._beside and not self._beside[-1].is_on_read else None
        return {self._group.replicas[0]: self._group.place(name, value, beside=None if beside is None else beside.device)}

    def reduce_copies(self, op: ReduceOp, variable: Variable) -> Any:
        """Returns the sum or mean of the copies of all replicas."""
        copies = PerReplica({index: copy.read_value() for index, copy in variable.copies.items()})
        (value,) = self._combined(f'reading variable "{variable.name}"', [(op, copies)], CollectiveHints(), [variable])
        return value

    def first_copy(self, variable: Variable) -> Any:
        """Returns the value of the one copy, or of replica 0's."""
        if self._is_mirrored or variable.is_on_read:
            return self.first_of(PerReplica({index: copy.read_value() for index, copy in variable.copies.items()}), variable)
        return next(iter(variable.copies.values())).read_value()

    def first_of(self, value: Any, variable: Variable) -> Any:
        """Returns replica 0's value for a variable."""
        if not isinstance(value, PerReplica):
            return value
        (first,) = self._combined("the value of replica 0", [(None, value)], CollectiveHints(), [variable])
        return first

    def _combined(
        self, what: str, values: Sequence[tuple[ReduceOp | None, PerReplica]], hints: CollectiveHints, places: Sequence[Any]
    ) -> list[Any]:
        own = self._group.replicas
        for _, value in values:
            if set(value.values) != set(own):
                known = ", ".join(map(str, sorted(value.values)))
                raise ValueError(f"a PerReplica has values of replicas {known}; want one of each of {', '.join(map(str, own))}")
        variables = ["" if (variable := container_of(place)) is None else variable.name for place in places]
        combinations = [
            Combination(op=op, contributions=value.values, variable=name) for (op, value), name in zip(values, variables, strict=True)
        ]
        return self._group.combine(what, combinations, hints=hints)

    def _sent_to(self, destinations: Any, result: Any) -> Any:
        if isinstance(destinations, Variable):
            places = list(destinations.copies)
        elif isinstance(destinations, PerReplica | Mirrored):
            places = list(destinations.values)
        else:
            return result
        return Mirrored(dict.fromkeys(places, result)) if len(places) > 1 and not isinstance(result, Mirrored) else result

    def _check_destination(self, destinations: Any) -> None:
        if isinstance(destinations, tuple | list):
            raise ValueError(f"destinations: got a {type(destinations).__name__}; want one variable, value or device")
        if container_of(destinations) is not None:
            self._own_variable(destinations, "destinations")
        # Not to another worker: it makes the same call and has the result itself.
        known = dict.fromkeys((*self._group.parameter_devices, *(self.worker_devices[replica] for replica in self._group.replicas)))
        if isinstance(destinations, str) and destinations not in known:
            raise ValueError(f"destinations: there is no device {destinations!r} to reduce to from here; there are {', '.join(known)}")

    def _own_variable(self, var: Any, what: str) -> Variable:
        variable = self.value_container(var)
        if not isinstance(variable, Variable):
            raise ValueError(f"{what}: got a {type(var).__name__}, want a Variable")
        if variable.strategy is not self._strategy:
            raise ValueError(f'{what}: variable "{variable.name}" was not created in the scope of this strategy')
        return variable

    def _call_at(self, index: int, copy: VariableCopy | None, fn: Callable[..., Any], given: tuple[Any, Any]) -> Any:
        """Calls `fn` with the values of its arguments at the copy with this index."""

        def here(value: Any) -> Any:
            return value.copies[index] if isinstance(value, Variable) and index in value.copies else value

        args, kwargs = map_nested(here, select(index, given))
        with contexts.entered(contexts.Mode(self._strategy, copy=index)):
            return fn(*(() if copy is None else (copy,)), *args, **kwargs)


class ParameterServerStrategy:
    """Runs a function in replicas, and keeps the variables that they share. A context manager; its end releases resources of `session`.

    A worker has `replicas_per_worker` replicas: threads of its process that run in turn, each until it merges with the others. Without
    `session` there is this process alone. With it, the strategy spans all workers of the session's cluster: each makes the same calls in
    the same order, with as many replicas. Strategies that use one cluster at a time have names of their own, and only one of them has
    variables with one copy: they are the session's model.

    A variable has one copy, which with `session` lies on a parameter server; or with `mirrored` one for each replica, kept the same, in the
    replica's process. For the thread that the session belongs to.
    """

    def __init__(self, replicas_per_worker: int = 1, *, session: Session | None = None, mirrored: bool = False, name: str = "main") -> None:
        if isinstance(replicas_per_worker, bool) or not isinstance(replicas_per_worker, int) or replicas_per_worker < 1:
            raise InvalidSpec(f"replicas_per_worker: got {replicas_per_worker!r}, want an int from 1")
        check_name(name)
        if session is not None and not isinstance(session, Session):
            raise InvalidSpec(f"session: got a {type(session).__name__}, want the session that lockstep.connect() returns")
        self._group: Group = LocalGroup(replicas_per_worker) if session is None else WorkerGroup(session, replicas_per_worker, name=name)
        self._extended = StrategyExtended(self, self._group, is_mirrored=mirrored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of connections; the session stays. Idempotent."""
        self._group.close()

    @property
    def extended(self) -> StrategyExtended:
        """Reductions, updates and places."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._group.num_replicas

    @contextmanager
    def scope(self) -> Iterator["ParameterServerStrategy"]:
        """Puts the thread across the replicas of this strategy: variables created in the block are the strategy's.

        Raises RuntimeError in a replica and in another strategy's scope.
        """
        contexts.check_cross_replica(self, "scope()")
        mode = contexts.current()
        # Inside of an update it stays that update.
        with contexts.entered(contexts.Mode(self) if mode is None else mode):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn(*args, **kwargs)` in each replica and returns the results as one.

        PerReplica and Mirrored arguments are unwrapped, in tuples, lists and dicts too. Where all replicas return the same object, that is
        the result, else a PerReplica; tuples, lists and dicts are merged element by element. Over several workers, arrays and numbers are
        always a PerReplica. Raises the error of a replica, and RuntimeError in a replica.
        """
        contexts.check_cross_replica(self, "run()")
        check_function("run()", fn)
        given_args, given_kwargs = arguments("run()", args, kwargs)
        with self.scope(), self._group.writing():
            self._group.begin()
            results = run_replicas(self, fn, given_args, given_kwargs, replicas=self._group.replicas, merged=self._merged)
        return self._merged(results)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Returns the sum or mean of a per-replica value, also in tuples, lists and dicts; first along `axis` of each array, if given.

        The mean along an axis weighs every element the same, however many a replica has. Call it across replicas, else RuntimeError.
        """
        contexts.check_cross_replica(self, "reduce()")
        op, along = reduce_op_of(reduce_op), None if axis is None else whole_number("reduce(): axis", axis)
        with self.scope():
            return map_nested(lambda one: self._reduce_one(op, one, along), value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of this process's replicas, by id; of a variable its copies; of anything else a tuple with it alone."""
        if isinstance(value, PerReplica | Mirrored):
            return tuple(value.values[replica] for replica in sorted(value.values))
        if isinstance(value, Variable) and len(value.copies) > 1:
            return tuple(value.copies[index] for index in sorted(value.copies))
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> PerReplica:
        """Returns a PerReplica of the results of `value_fn` for each replica of this process."""
        contexts.check_cross_replica(self, "experimental_distribute_values_from_function()")
        check_function("experimental_distribute_values_from_function()", value_fn)
        return PerReplica({replica: value_fn(ValueContext(replica, self._group.num_replicas)) for replica in self._group.replicas})

    def _merged(self, results: Mapping[int, Any]) -> Any:
        return regroup(results, container_of, wraps_same=len(self._group.replicas) < self._group.num_replicas)

    def _reduce_one(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        if axis is None:
            return self._extended.reduce_to(op, value, self._extended.parameter_devices[0])
        if not isinstance(value, PerReplica):
            whole = np.asarray(value)
            total = sum_along(whole, axis)
            along = whole.mean(axis) if op is ReduceOp.MEAN else total.astype(whole.dtype) if whole.dtype == np.float16 else total
            return self._extended.reduce_to(op, along, self._extended.parameter_devices[0])
        parts = {replica: np.asarray(part) for replica, part in value.values.items()}
        totals = PerReplica({replica: sum_along(part, axis) for replica, part in parts.items()})
        device, dtype = self._extended.parameter_devices[0], parts[min(parts)].dtype
        if op is ReduceOp.SUM:
            total = self._extended.reduce_to(op, totals, device)
            return frozen(total.astype(dtype)) if dtype == np.float16 else total
        counts = PerReplica({replica: np.float64(part.shape[axis]) for replica, part in parts.items()})
        total, count = self._extended.batch_reduce_to(ReduceOp.SUM, [(totals, device), (counts, device)])
        return np.asarray(total / count, dtype if dtype.kind == "f" else None)


@functools.cache
def default_strategy() -> ParameterServerStrategy:
    """Returns the strategy that applies outside of every scope: one replica."""
    return ParameterServerStrategy()


def get_strategy() -> ParameterServerStrategy:
    """Returns the strategy of this thread's context, or the default one."""
    mode = contexts.current()
    strategy: ParameterServerStrategy = default_strategy() if mode is None else mode.strategy
    return strategy


def has_strategy() -> bool:
    """Whether this thread is in a strategy's context."""
    return contexts.current() is not None


def in_cross_replica_context() -> bool:
    """Whether this thread is across replicas: in `scope()`, in a merge or in an update, but not in a replica."""
    mode = contexts.current()
    return mode is not None and mode.replica is None


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica that this thread runs; the one of the default strategy outside of every strategy, and None across replicas."""
    mode = contexts.current()
    if mode is None:
        return ReplicaContext(default_strategy(), 0, None)
    if mode.replica is None:
        return None
    assert mode.copy is not None
    return ReplicaContext(mode.strategy, mode.copy, mode.replica)


def _hints(hints: CollectiveHints | None) -> CollectiveHints:
    if hints is not None and not isinstance(hints, CollectiveHints):
        raise InvalidSpec(f"experimental_hints: got a {type(hints).__name__}, want CollectiveHints(…) or None")
    return hints or CollectiveHints()


def _own(value: Any) -> Any:
    """Returns a new object with the same value, so that a value given by several replicas counts once for each."""
    if isinstance(value, IndexedSlices):
        return IndexedSlices(value.indices, value.values, value.dense_shape)
    return np.asarray(value).view()


def _one_of_all(value: Any) -> Any:
    """Returns the object that all replicas gave, if it is one and the same; any other value itself."""
    if isinstance(value, PerReplica) and len(value.values) > 1:
        first, *others = value.values.values()
        return first if all(one is first for one in others) else value
    return value


def _parsed(text: str, given: tuple[Any, Mapping[str, Any]]) -> Formula:
    args, kwargs = given
    if args:
        raise InvalidSpec("update() with a formula takes its values by name: kwargs={'g': …}; the variable is 'v'")
    if "v" in kwargs:
        raise InvalidSpec("update() with a formula: 'v' is the variable itself; give the argument another name")
    variables = sorted(name for name, value in kwargs.items() if isinstance(value, Variable))
    return parsed(text, Names(("v", *variables), in_place=("v", *variables), numbers=tuple(sorted(kwargs.keys() - set(variables)))))


def _check_named_once(variable: Variable, kwargs: Mapping[str, Any]) -> None:
    names = {variable: "v"}
    for name, value in kwargs.items():
        container = container_of(value)
        if container is not None and names.setdefault(container, name) != name:
            raise InvalidSpec(
                f'update() with a formula: {names[container]!r} and {name!r} are one variable, "{container.name}"; give it one name'
            )


def _computing(formula: Formula | None) -> Callable[..., Any]:
    """Returns a function that computes this formula and assigns to the copies that it writes."""
    assert formula is not None

    def update(copy: VariableCopy, /, **values: Any) -> VariableCopy:
        copies = {"v": copy, **{name: value for name, value in values.items() if isinstance(value, VariableCopy)}}
        given = {name: _given(name, value, copy) for name, value in values.items() if name in formula.reads}
        for name, result in compute(formula, {**given, "v": copy.read_value()}).items():
            copies[name].assign(result)
        return copy

    return update


def _given(name: str, value: Any, variable: Variable | VariableCopy) -> Array | float:
    """Returns an argument of a formula: a number, or an array of the variable's type unless it has one of its own."""
    if isinstance(value, VariableCopy):
        return value.read_value()
    array = as_array(value, variable.dtype, what=f"update() with a formula: {name!r}")
    return array if array.ndim or array.dtype.kind not in "fiub" else float(value if isinstance(value, int | float) else array)


def _check_not_per_replica(given: Any, what: str) -> None:
    if any(isinstance(leaf, PerReplica) for leaf in leaves(given)):
        raise ValueError(
            f"{what} was given a per-replica value, of which there is none for a variable with one copy; reduce it first, with reduce_to()"
        )
