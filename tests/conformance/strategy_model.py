"""A model in NumPy of a strategy's operations by the original's rules, and cases made of them. Knows the format; not our strategies.

A case is what the original was recorded with: mirrored variables, whose copies are kept the same, and operations on them.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ps_protocol.model.variables import Array

Case = dict[str, Any]
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
_REFUSED = {"error": "ValueError"}
# What may be called in a replica, and what may not.
_IN_REPLICAS = {
    **{what: {"error": "RuntimeError"} for what in ("reduce_to", "batch_reduce_to", "update_non_slot", "reduce")},
    **dict.fromkeys(("update", "experimental_local_results"), "accepted"),
}


class Model:
    """The variables of a case, each with a copy for every replica."""

    def __init__(self, case: Case) -> None:
        self._num = case["num_replicas"]
        self._specs = {spec["name"]: spec for spec in case["variables"]}
        self._copies = {name: [_array(spec["initial"])] * self._num for name, spec in self._specs.items()}

    def act(self, op: Case) -> Any:
        """Does an operation and returns what is seen."""
        if op["op"] in ("assign", "assign_add", "assign_sub"):
            return self._assign(op)
        seen: Any = getattr(self, "_" + op["op"])(op)
        return seen

    def _reduced(self, reduce: str, value: Case) -> Array | None:
        """The sum or mean; None for the sum of what is the same for several replicas."""
        if "one" in value:
            return _array(value["one"]) if reduce == "MEAN" or self._num == 1 else None
        total = sum((_array(one) for one in value["per_replica"][1:]), _array(value["per_replica"][0]))
        return total / np.float32(self._num) if reduce == "MEAN" else total

    def _reduce_to(self, op: Case) -> Any:
        result = self._reduced(op["reduce"], op["value"])
        return _REFUSED if result is None else {"one": result}

    def _batch_reduce_to(self, op: Case) -> Any:
        # What is the same for all replicas counts once here.
        return [{"one": _array(one["one"]) if "one" in one else self._reduced(op["reduce"], one)} for one in op["values"]]

    def _run(self, op: Case) -> Any:
        x = [_array(one) for one in op["x"]]
        return {
            "list": [
                {"one": _array(op["same"])},
                self._merged([2 * one for one in x]),
                {"dict": {"k": self._merged([1 + one for one in x])}},
            ]
        }

    def _merged(self, values: list[Array]) -> Case:
        return {"per_replica": values} if self._num > 1 else {"one": values[0]}

    def _assign(self, op: Case) -> Any:
        name = op["variable"]
        aggregation, is_on_read, change = self._specs[name]["aggregation"], self._is_on_read(name), _CHANGES[op["op"]]
        if op["in"] == "cross_replica":
            if is_on_read and aggregation == "SUM":
                if op["op"] != "assign":
                    return _REFUSED
                new = [_array(op["value"]) / np.float32(self._num)] * self._num
            else:
                new = [_array(op["value"])] * self._num
        elif is_on_read:
            new = [_array(one) for one in op["values"]]
        elif aggregation == "NONE" and self._num > 1:
            return _REFUSED
        elif aggregation in ("NONE", "ONLY_FIRST_REPLICA"):
            new = [_array(op["values"][0])] * self._num
        else:
            total = self._reduced(aggregation, {"per_replica": op["values"]})
            assert total is not None
            new = [total] * self._num
        self._copies[name] = [change(old, one) for old, one in zip(self._copies[name], new, strict=True)]
        # The copies change, and what they are together cannot be said.
        is_unknown = op["in"] == "cross_replica" and is_on_read and aggregation == "NONE"
        return _REFUSED if is_unknown else self._look(name)

    def _update(self, op: Case) -> Any:
        name, rate = op["variable"], np.float32(op["rate"])
        if op["reduce"] is None and "per_replica" in op["value"]:
            gradients = [_array(one) for one in op["value"]["per_replica"]]
        else:
            one = _array(op["value"]["one"]) if op["reduce"] is None else self._reduced(op["reduce"], op["value"])
            if one is None:
                return _REFUSED
            gradients = [one] * self._num
        self._copies[name] = [old - rate * one for old, one in zip(self._copies[name], gradients, strict=True)]
        return self._look(name)

    def _four_steps(self, op: Case) -> Any:
        for name, values in op["updates"].items():
            total = self._reduced("SUM", {"per_replica": values})
            assert total is not None
            self._copies[name] = [old - np.float32(op["rate"]) * total for old in self._copies[name]]
        return {name: self._look(name) for name in op["updates"]}

    def _all_reduce(self, op: Case) -> Any:
        return {"one": self._reduced(op["reduce"], {"per_replica": op["values"]})}

    def _in_wrong_context(self, op: Case) -> Any:
        return _IN_REPLICAS[op["what"]]

    def _contexts(self, op: Case) -> Any:
        return {
            "outside [cross, replica context is None]": [False, False],
            "in scope": [True, True],
            "in run [cross, id, of]": [[False, replica, self._num] for replica in range(self._num)],
        }

    def _variable_created_in_scope(self, op: Case) -> Any:
        return {**dict.fromkeys(self._specs, True), "made outside": False}

    def _value_container(self, op: Case) -> Any:
        return {
            "of a replica's part of the variable is the variable": True,
            "of something else is itself": True,
            "num_local_results": self._num,
        }

    def _is_on_read(self, name: str) -> bool:
        return bool(self._specs[name]["synchronization"] == "ON_READ")

    def _look(self, name: str) -> Case:
        copies, aggregation = self._copies[name], self._specs[name]["aggregation"]
        across: Any = copies[0]
        if self._is_on_read(name) and aggregation in ("SUM", "MEAN"):
            across = self._reduced(aggregation, {"per_replica": copies})
        elif self._is_on_read(name) and aggregation == "NONE":
            across = _REFUSED
        return {"across": across, "in_replicas": list(copies)}


_CHANGES: dict[str, Callable[[Array, Array], Array]] = {
    "assign": lambda old, new: new,
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}


def _array(value: Any) -> Array:
    return np.asarray(value, np.float32)


def make_case(rng: random.Random) -> Case:
    """Returns a case of the families of the recorded ones, with what the model says of each operation."""
    case = _Maker(rng).case()
    model = Model(case)
    for op in case["operations"]:
        op["expect"] = _plain(model.act(op))
    return case


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng, self._num = rng, rng.choice([1, 2, 2, 3, 4])
        self._shape = rng.choice([(), (3,), (2, 2)])
        self._specs = [
            {
                "name": f"v{index}",
                "initial": self._number(),
                "aggregation": rng.choice(AGGREGATIONS),
                "synchronization": rng.choice(["AUTO", "ON_WRITE", "ON_READ"]),
            }
            for index in range(rng.randint(1, 3))
        ]

    def case(self) -> Case:
        """Returns a case without what is expected."""
        operations = [self._operation() for _ in range(self._rng.randint(2, 8))]
        return {"num_replicas": self._num, "variables": self._specs, "operations": operations}

    def _number(self) -> Any:
        count = int(np.prod(self._shape, dtype=int))
        return np.asarray([self._rng.randint(-500, 500) / 100 for _ in range(count)], np.float32).reshape(self._shape).tolist()

    def _numbers(self) -> list[Any]:
        return [self._number() for _ in range(self._num)]

    def _value(self) -> Case:
        if self._rng.random() < 0.7:
            return {"per_replica": self._numbers()}
        return {"one": self._number() if self._rng.random() < 0.6 else np.zeros(self._shape).tolist()}

    def _operation(self) -> Case:
        rng = self._rng
        name, reduce = rng.choice(self._specs)["name"], rng.choice(["SUM", "MEAN"])
        of_all = [spec["name"] for spec in self._specs if spec["synchronization"] != "ON_READ"]
        change = rng.choice(["assign", "assign_add", "assign_sub"])
        made: list[Case] = [
            {"op": "reduce_to", "reduce": reduce, "value": self._value(), "destination": rng.choice(["value", name])},
            {"op": "batch_reduce_to", "reduce": reduce, "values": [self._value() for _ in range(rng.randint(1, 4))], "destination": name},
            {"op": "run", "same": self._number(), "x": self._numbers()},
            {"op": change, "in": "replicas", "variable": name, "values": self._numbers()},
            {"op": change, "in": "cross_replica", "variable": name, "value": self._number()},
            {
                "op": "update",
                "variable": name,
                "rate": rng.choice([0.1, 1.0]),
                "reduce": rng.choice([None, "SUM", "MEAN", "SUM", "MEAN"]),
                "value": self._value(),
                "group": rng.random() < 0.7,
            },
            {"op": "all_reduce", "reduce": reduce, "values": self._numbers()},
            {"op": "in_wrong_context", "what": rng.choice(sorted(_IN_REPLICAS)), "variable": name},
            {"op": "contexts"},
            {"op": "variable_created_in_scope"},
            {"op": "value_container", "variable": name},
        ]
        if of_all:
            made.append({"op": "four_steps", "rate": 0.5, "updates": {one: self._numbers() for one in of_all}})
        return rng.choice(made)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
