"""Replays recorded operations of tf.distribute.StrategyExtended on a strategy. Knows the format of their cases; starts no process."""

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

import worker_client
from ps_protocol.errors import PsError
from tests.conformance.checking import Mismatch, check_close, check_equal
from tests.conformance.clusters import Start
from tests.support.cluster.shape import Cluster, Shape
from worker_client.strategy import (
    ParameterServerStrategy,
    PerReplica,
    ReduceOp,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    in_cross_replica_context,
)

Case = dict[str, Any]

# How many workers share so many replicas in a cluster.
WORKERS = {1: 1, 2: 2, 3: 3, 4: 2}
CASE_TIMEOUT_S = 100.0

# Errors of the kinds that were recorded.
_RECORDED = (ValueError, TypeError, RuntimeError, PsError)


def open_strategies(stack: ExitStack, start: Start, cases: Sequence[Case]) -> Callable[[Case], None]:
    """Returns what replays one of these cases: in this process, and then with its replicas in several workers of a cluster.

    Alone, each replica has a copy of each variable, as when it was recorded, and then all share one. In a cluster, variables have one copy
    on a parameter server. Where a case gives copies different values, each replica has its own. Cases with as many replicas
    share a cluster. The replay raises Mismatch.
    """
    by_replicas: dict[int, dict[int, Case]] = {}
    for number, case in enumerate(cases):
        if isinstance(case, dict) and case.get("num_replicas") in WORKERS:
            by_replicas.setdefault(case["num_replicas"], {})[number] = case
    clusters = {count: stack.enter_context(_Workers(count, start, own)) for count, own in by_replicas.items()}

    def replay(case: Case) -> None:
        num_replicas = case["num_replicas"]
        play_alone(case)
        clusters[num_replicas].play(next(number for number, known in by_replicas[num_replicas].items() if known is case))

    return replay


def play_alone(case: Case) -> None:
    """Replays a case in this process, where each replica has copies of its own and, if it can, where all share one. Raises Mismatch."""
    for is_mirrored in (True,) if _has_different_copies(case) else (True, False):
        _Play(case, ParameterServerStrategy(case["num_replicas"], mirrored=is_mirrored)).play()


def _has_different_copies(case: Case) -> bool:
    return any(op["op"] == "update" and op["reduce"] is None and "per_replica" in op["value"] for op in case["operations"])


class _Workers:
    """A cluster and its workers, each a thread with a session of its own, that play cases together."""

    def __init__(self, num_replicas: int, start: Start, cases: dict[int, Case]) -> None:
        self._num_workers, self._per_worker = WORKERS[num_replicas], num_replicas // WORKERS[num_replicas]
        self._start, self._cases = start, cases
        self._stack = ExitStack()
        self._jobs: list[queue.SimpleQueue[tuple[int, Future[None]] | None]] = [queue.SimpleQueue() for _ in range(self._num_workers)]

    def __enter__(self) -> Self:
        cluster = self._stack.enter_context(self._start(Shape(num_ps=2, num_workers=self._num_workers)))
        threads = [
            threading.Thread(target=self._work, args=(index, cluster), name=f"worker-{index}", daemon=True)
            for index in range(self._num_workers)
        ]
        for thread in threads:
            thread.start()
            self._stack.callback(thread.join, CASE_TIMEOUT_S)
        for jobs in self._jobs:
            self._stack.callback(jobs.put, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, number: int) -> None:
        """Has all workers play a case. Raises Mismatch, or the error of the first worker that failed."""
        played: list[Future[None]] = [Future() for _ in self._jobs]
        for jobs, done in zip(self._jobs, played, strict=True):
            jobs.put((number, done))
        wait(played, CASE_TIMEOUT_S)
        for done in played:
            done.result(0)

    def _work(self, index: int, cluster: Cluster) -> None:
        jobs = self._jobs[index]
        try:
            with ExitStack() as stack:
                session = stack.enter_context(cluster.session(index))
                plays = self._prepared(stack, session)
                while (job := jobs.get()) is not None:
                    _settle(job[1], plays[job[0]].play)
        except BaseException as error:
            failure = error  # every case fails of it
            while (job := jobs.get()) is not None:
                job[1].set_exception(failure)

    def _prepared(self, stack: ExitStack, session: worker_client.Session) -> dict[int, "_Play"]:
        """The cases by number, with all their variables: a cluster has one model."""
        shared = stack.enter_context(ParameterServerStrategy(self._per_worker, session=session))
        plays = {}
        for number, case in self._cases.items():
            strategy = shared
            if _has_different_copies(case):
                strategy = stack.enter_context(
                    ParameterServerStrategy(self._per_worker, session=session, mirrored=True, name=f"case {number}")
                )
            plays[number] = _Play(case, strategy, prefix=f"case {number} ")
        return plays


def _settle(done: "Future[None]", act: Callable[[], None]) -> None:
    try:
        act()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


class _Play:
    """One strategy with its variables, and the operations of a case."""

    def __init__(self, case: Case, strategy: ParameterServerStrategy, *, prefix: str = "") -> None:
        self._operations, self._prefix = case["operations"], prefix
        self.strategy, self.extended, self.num_replicas = strategy, strategy.extended, case["num_replicas"]
        own = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        self.own = sorted(own.values)
        self.variables: dict[str, Variable] = {}
        self.outside = Variable(0.0, name="outside")
        for spec in case["variables"]:
            made = _attempt(functools.partial(self._create, spec))
            if isinstance(made, Variable):
                self.variables[spec["name"]] = made
            check_equal(f"variable {spec['name']}", None if isinstance(made, Variable) else made, spec.get("expect"))

    def play(self) -> None:
        """Does all operations. Raises the first Mismatch at the end: other workers wait for this one's part until then."""
        mismatches: list[Mismatch] = []
        for place, op in enumerate(self._operations):
            seen = self.act(op)
            try:
                what = f"operations[{place}] {op['op']}, replicas {self.own[0]} to {self.own[-1]}"
                check_seen(what, seen, self._expected(op["expect"]))
            except Mismatch as mismatch:
                mismatches.append(mismatch)
        if mismatches:
            raise mismatches[0]

    def act(self, op: Case) -> Any:
        """Does one operation and returns what is seen, in the form of the recording."""
        acts: dict[str, Callable[[Case], Any]] = {
            **{name: getattr(self, name) for name in ("reduce_to", "batch_reduce_to", "run", "update", "four_steps", "all_reduce")},
            **{name: getattr(self, name) for name in ("in_wrong_context", "contexts", "variable_created_in_scope", "value_container")},
            **dict.fromkeys(("assign", "assign_add", "assign_sub"), self.assign),
        }
        if op["op"] not in acts:
            raise ValueError(f"unknown operation {op['op']!r}")
        return _attempt(lambda: acts[op["op"]](op))

    def reduce_to(self, op: Case) -> Any:
        value = self._value(op["value"])
        return self._seen(
            self.extended.reduce_to(op["reduce"], value, value if op["destination"] == "value" else self.variables[op["destination"]])
        )

    def batch_reduce_to(self, op: Case) -> Any:
        pairs = [(self._value(value), self.variables[op["destination"]]) for value in op["values"]]
        return [self._seen(result) for result in self.extended.batch_reduce_to(ReduceOp[op["reduce"]], pairs)]

    def run(self, op: Case) -> Any:
        same = _array(op["same"])
        return self._seen(
            self.strategy.run(lambda x: (same, x * np.float32(2), {"k": x + np.float32(1)}), args=(self._per_replica(op["x"]),))
        )

    def assign(self, op: Case) -> Any:
        variable = self.variables[op["variable"]]
        if op["in"] == "replicas":
            self.strategy.run(lambda x: getattr(variable, op["op"])(x), args=(self._per_replica(op["values"]),))
        else:
            with self.strategy.scope():
                getattr(variable, op["op"])(_array(op["value"]))
        return self._look(op["variable"])

    def update(self, op: Case) -> Any:
        variable, value, rate = self.variables[op["variable"]], self._value(op["value"]), np.float32(op["rate"])
        with self.strategy.scope():
            gradient = value if op["reduce"] is None else self.extended.reduce_to(op["reduce"], value, variable)
            self.extended.update(variable, lambda copy, grad: copy.assign_sub(rate * grad), args=(gradient,), group=op["group"])
        return self._look(op["variable"])

    def four_steps(self, op: Case) -> Any:
        names, rate = list(op["updates"]), np.float32(op["rate"])

        def merged(strategy: ParameterServerStrategy, gradients: list[Any]) -> None:
            pairs = [(gradient, self.variables[name]) for name, gradient in zip(names, gradients, strict=True)]
            for name, gradient in zip(names, strategy.extended.batch_reduce_to("SUM", pairs), strict=True):
                strategy.extended.update(self.variables[name], lambda copy, grad: copy.assign_sub(rate * grad), args=(gradient,))

        def step(*gradients: Any) -> None:
            context = get_replica_context()
            assert context is not None
            context.merge_call(merged, args=(list(gradients),))

        self.strategy.run(step, args=tuple(self._per_replica(op["updates"][name]) for name in names))
        return {name: self._look(name) for name in names}

    def all_reduce(self, op: Case) -> Any:
        def reduced(x: Any) -> Any:
            context = get_replica_context()
            assert context is not None
            return context.all_reduce(op["reduce"], x)

        return self._seen(self.strategy.run(reduced, args=(self._per_replica(op["values"]),)))

    def in_wrong_context(self, op: Case) -> Any:
        variable, one = self.variables[op["variable"]], np.float32(1)
        calls: dict[str, Callable[[], Any]] = {
            "reduce_to": lambda: self.extended.reduce_to("SUM", one, variable),
            "batch_reduce_to": lambda: self.extended.batch_reduce_to("SUM", [(one, variable)]),
            "update": lambda: self.extended.update(variable, lambda copy: copy.read_value()),
            "reduce": lambda: self.strategy.reduce("SUM", one, axis=None),
            "experimental_local_results": lambda: self.strategy.experimental_local_results(one)[0],
            "update_non_slot": lambda: self.extended.update_non_slot(self.extended.non_slot_devices([variable]), lambda: one),
        }
        self.strategy.run(calls[op["what"]])
        return "accepted"

    def contexts(self, op: Case) -> Any:
        def seen() -> list[bool]:
            return [in_cross_replica_context(), get_replica_context() is None]

        def inside() -> list[Any]:
            context = get_replica_context()
            assert context is not None
            return [in_cross_replica_context(), context.replica_id_in_sync_group, context.num_replicas_in_sync]

        outside = seen()
        with self.strategy.scope():
            scope = seen()
        found: list[Any] = []
        self.strategy.run(lambda: found.append(inside()))
        return {"outside [cross, replica context is None]": outside, "in scope": scope, "in run [cross, id, of]": sorted(found)}

    def variable_created_in_scope(self, op: Case) -> Any:
        owned = {name: self.extended.variable_created_in_scope(variable) for name, variable in self.variables.items()}
        return {**owned, "made outside": self.extended.variable_created_in_scope(self.outside)}

    def value_container(self, op: Case) -> Any:
        variable, values = self.variables[op["variable"]], [1.0] * self.num_replicas
        result = self.strategy.run(lambda x: x + 0.0, args=(self._per_replica(values),))
        part = self.strategy.experimental_local_results(variable)[0]
        return {
            "of a replica's part of the variable is the variable": self.extended.value_container(part) is variable,
            "of something else is itself": self.extended.value_container(values) is values,
            "num_local_results": len(self.strategy.experimental_local_results(result)),
        }

    def _expected(self, expect: Any, key: str = "") -> Any:
        """What this worker sees of what was recorded: of what is there for each replica, the part of its own replicas."""
        if key in ("per_replica", "in_replicas", "in run [cross, id, of]") and isinstance(expect, list):
            return [expect[replica] for replica in self.own]
        if key == "num_local_results":
            return expect - (self.num_replicas - len(self.own))
        if isinstance(expect, dict):
            return {name: self._expected(value, name) for name, value in expect.items()}
        if isinstance(expect, list) and any(isinstance(value, dict) for value in expect):
            return [self._expected(value) for value in expect]
        return expect

    def _create(self, spec: Case) -> Variable:
        with self.strategy.scope():
            return Variable(
                _array(spec["initial"]),
                name=self._prefix + spec["name"],
                aggregation=VariableAggregation[spec["aggregation"]],
                synchronization=VariableSynchronization[spec["synchronization"]],
            )

    def _per_replica(self, values: list[Any]) -> PerReplica:
        return self.strategy.experimental_distribute_values_from_function(lambda context: _array(values[context.replica_id_in_sync_group]))

    def _value(self, spec: Case) -> Any:
        return self._per_replica(spec["per_replica"]) if "per_replica" in spec else _array(spec["one"])

    def _look(self, name: str) -> Case:
        """The variable as it is read across replicas, and in each replica."""
        variable = self.variables[name]

        def across() -> Any:
            with self.strategy.scope():
                return variable.read_value()

        local = self.strategy.experimental_local_results(self.strategy.run(variable.read_value))
        # Replicas that see one array return the same object.
        return {"across": _attempt(across), "in_replicas": list(local) * (len(self.own) if len(local) == 1 else 1)}

    def _seen(self, value: Any) -> Any:
        """What came back: one value for all or one for each replica, nested."""
        if isinstance(value, tuple | list):
            return {"list": [self._seen(one) for one in value]}
        if isinstance(value, dict):
            return {"dict": {key: self._seen(one) for key, one in value.items()}}
        local = list(self.strategy.experimental_local_results(value))
        return {"per_replica": local} if isinstance(value, PerReplica) else {"one": local[0]}


def _array(value: Any) -> Any:
    return np.asarray(value, np.float32)


def _attempt(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except _RECORDED as error:
        return {"error": type(error).__name__}


def check_seen(what: str, got: Any, want: Any) -> None:
    """Raises Mismatch unless what is seen is what was recorded: numbers closely, everything else exactly."""
    if isinstance(want, dict):
        if not isinstance(got, dict):
            raise Mismatch(f"{what}: got {got}, want {want}")
        if (
            list(got) == ["per_replica"]
            and list(want) == ["one"]
            and all(np.array_equal(v, got["per_replica"][0]) for v in got["per_replica"])
        ):
            got = {"one": got["per_replica"][0]}
        check_equal(what, sorted(got), sorted(want))
        for key in want:
            check_seen(f"{what}: {key}", got[key], want[key])
    elif isinstance(want, str | bool) or want is None:
        check_equal(what, got, want)
    elif isinstance(want, list) and any(isinstance(one, dict | bool) for one in want):
        check_equal(f"{what}: length", len(got), len(want))
        for place, (one_got, one_want) in enumerate(zip(got, want, strict=True)):
            check_seen(f"{what}[{place}]", one_got, one_want)
    elif isinstance(want, list) and want and isinstance(want[0], list) and any(isinstance(one, bool) for row in want for one in row):
        check_equal(what, got, want)
    else:
        check_close(what, got, want, dtype="float32")
