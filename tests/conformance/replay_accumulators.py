"""Replays recorded gradient accumulators on parameter servers. Knows the format of their cases; starts no process."""

from typing import Any

import numpy as np

from tests.conformance.checking import check_close, check_equal
from worker_client import ConditionalAccumulator, Observer, SparseConditionalAccumulator

Case = dict[str, Any]


def replay_dense(case: Case, *, target: Observer, name: str) -> None:
    """Replays one case of dense_accumulator on the parameter servers of `target`. Raises Mismatch."""
    dtype = case["dtype"]
    with ConditionalAccumulator(target, dtype, case["shape"], shared_name=name, reduction_type=case["reduction"]) as accumulator:
        for place, op in enumerate(case["ops"]):
            what = f"ops[{place}] {op['op']}"
            if op["op"] == "apply":
                accepted = accumulator.apply_grad(np.array(op["gradient"], dtype), op["local_step"])
                check_equal(f"{what}: accepted", accepted, op["accepted"])
            elif op["op"] == "take":
                check_close(what, accumulator.take_grad(op["num_required"], timeout_s=30), op["expect"], dtype=dtype)
            else:
                _replay_plain(accumulator, op, what)
        accumulator.delete()


def replay_sparse(case: Case, *, target: Observer, name: str) -> None:
    """Replays one case of sparse_accumulator on the parameter servers of `target`. Raises Mismatch."""
    dtype, shape = case["dtype"], case["shape"]
    with SparseConditionalAccumulator(target, dtype, shape, shared_name=name, reduction_type=case["reduction"]) as accumulator:
        for place, op in enumerate(case["ops"]):
            what = f"ops[{place}] {op['op']}"
            if op["op"] == "apply":
                values = np.array(op["values"], dtype).reshape(len(op["indices"]), *_tail(op["values"], shape))
                accepted = accumulator.apply_grad(op["indices"], values, shape, op["local_step"])
                check_equal(f"{what}: accepted", accepted, op["accepted"])
            elif op["op"] == "take":
                indices, values, whole = accumulator.take_grad(op["num_required"], timeout_s=30)
                check_equal(f"{what}: indices", indices.tolist(), op["expect"]["indices"])
                check_close(f"{what}: values", values, op["expect"]["values"], dtype=dtype)
                check_equal(f"{what}: shape", whole.tolist(), op["expect"]["shape"])
            else:
                _replay_plain(accumulator, op, what)
        accumulator.delete()


def _replay_plain(accumulator: ConditionalAccumulator | SparseConditionalAccumulator, op: Case, what: str) -> None:
    if op["op"] == "set_global_step":
        accumulator.set_global_step(op["step"])
    elif op["op"] == "num_accumulated":
        check_equal(what, accumulator.num_accumulated(), op["expect"])
    else:
        raise ValueError(f"{what}: unknown operation")


def _tail(values: list[Any], shape: list[int] | None) -> tuple[int, ...]:
    # Of no rows at all the list does not say what a row looks like.
    return np.shape(values)[1:] if values else tuple(shape or (0,))[1:]
