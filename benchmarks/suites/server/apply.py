"""Measures each optimizer's apply against a copy of the same number of bytes. Knows the server's core; no process, no network."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness.arguments import WrongArguments, add_json, at_least_one, parse_bytes, show
from benchmarks.harness.one_server import OneServer
from benchmarks.report.figures import human_bytes
from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec, constant
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_server.config import default_apply_threads
from ps_server.numbers.apply import FusedApply, StepMemory, share
from ps_server.optimizers.rule import UpdateRule
from ps_server.threads import ApplyThreads
from worker_client import custom_optimizer

OPTIMIZERS = GRADIENT_OPTIMIZERS
# The same formula as "adam", as text.
CUSTOM = {
    "custom adam": custom_optimizer(
        "m = m + (g - m) * (1 - b1); s = s + (g * g - s) * (1 - b2); v = v - lr * sqrt(1 - b2 ** t) / (1 - b1 ** t) * m / (sqrt(s) + eps)",
        0.001,
        slots={"m": 0.0, "s": 0.0},
        b1=0.9,
        b2=0.999,
        eps=1e-8,
    ),
}
# The same formula as an update of buffers.
UPDATE = "adam update"
_ADAM_UPDATE = "m = m + (g - m) * c1; s = s + (g * g - s) * c2; v = v - lr * m / (sqrt(s) + eps)"
_COPY_PART_BYTES = 1 << 20
_SMALL_BYTES, _SMALL_VARIABLES = 4096, 4
NUM_CONTRIBUTIONS = 2

DESCRIPTION = "Measures each optimizer's apply against a copy that reads and writes as many bytes in as many threads, by turns."


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures; returns the exit code."""
    if options.bytes < 64:
        raise WrongArguments(f"--bytes: got {options.bytes}, want 64 or more")
    report = {
        "bytes": options.bytes,
        "contributions": NUM_CONTRIBUTIONS,
        "rounds": options.rounds,
        "rows": [row for num_threads in options.threads for row in _rows(options, num_threads)],
        "small_step_us": {name: small_step_us(name, num_steps=options.small_steps) for name in ("sgd", "adam") if options.small_steps},
    }
    show(report, in_words, options)
    return 0


def _rows(options: argparse.Namespace, num_threads: int) -> list[dict[str, Any]]:
    threads = ApplyThreads(num_threads)
    try:
        return [_compare(name, options.bytes // 64 * 64, threads, num_rounds=options.rounds) for name in options.optimizers]
    finally:
        threads.stop()


def _compare(name: str, nbytes: int, threads: ApplyThreads, *, num_rounds: int) -> dict[str, Any]:
    """Applies and copies alternately; each figure is the median of the rounds."""
    apply, moved = _update(nbytes, threads) if name == UPDATE else _apply(name, nbytes, threads)
    copy = _copy(moved // 2, threads)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(num_rounds + 1):
        for act, found in zip((apply, copy), seconds, strict=True):
            started = time.perf_counter()
            act()
            if turn:  # the first touches the memory
                found.append(time.perf_counter() - started)
    apply_s, copy_s = (statistics.median(found) for found in seconds)
    ratio = statistics.median(a / c for a, c in zip(*seconds, strict=True))
    return {
        "optimizer": name,
        "threads": threads.num_threads,
        "moved_bytes": moved,
        "apply_ms": round(apply_s * 1e3, 3),
        "copy_ms": round(copy_s * 1e3, 3),
        "ratio": round(ratio, 2),
        "apply_gb_s": round(moved / apply_s / 1e9, 1),
        "copy_gb_s": round(moved / copy_s / 1e9, 1),
    }


def _apply(name: str, nbytes: int, threads: ApplyThreads) -> tuple[Callable[[], object], int]:
    """Returns an apply of float32 variables, and the bytes that it has to read and write."""
    variable = VariableSpec(name="v", data_type=DataType.FLOAT32, shape=(nbytes // 4,))
    layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows)])
    rule = UpdateRule(CUSTOM[name] if name in CUSTOM else OptimizerSpec(name=name, learning_rate=constant(0.001)))
    fused = FusedApply(layout, [rule], stripes=threads)
    generator = np.random.default_rng(0)
    value, out, *gradients = (_random(nbytes, generator) for _ in range(2 + NUM_CONTRIBUTIONS))
    slots = {slot: aligned_bytes(nbytes) for slot in rule.slots}
    for slot, initial in rule.slots.items():
        layout.arena(slots[slot], layout.arenas[0]).fill(initial)
    memory = StepMemory(value=value, out=out, slots=slots, gradients=gradients, step=0)

    def act() -> None:
        rule.begin(0)
        fused.run(memory)

    return act, nbytes * (NUM_CONTRIBUTIONS + 2 + 2 * len(slots))


def _update(nbytes: int, threads: ApplyThreads) -> tuple[Callable[[], object], int]:
    """Returns a step of one formula over three buffers, and the bytes that it has to read and write."""
    rule = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0))
    specs = [VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(nbytes // 4,), optimizer=rule) for name in "vms"]
    layout = Layout([VariableSlice(variable=spec, start=0, stop=spec.num_rows) for spec in specs])
    fused = FusedApply(layout, [UpdateRule(rule)], stripes=threads)
    update = FormulaUpdate(
        text=_ADAM_UPDATE, variables={"v": 0, "m": 1, "s": 2}, arrays={"g": 0}, numbers={"c1": 0.1, "c2": 0.001, "lr": 0.001, "eps": 1e-8}
    )
    generator = np.random.default_rng(0)
    value, out, gradient = (_random(layout.nbytes, generator) for _ in range(3))
    layout.view(value, 2)[:] = 1.0
    memory = StepMemory(value=value, out=out, gradients=[gradient], absent=[(0, 1, 2)], step=0, formulas=[(0, update)])
    # All three buffers are copied, and then read and written; the array is only read.
    return lambda: fused.run(memory), nbytes * (3 * 2 + 3 * 2 + 1)


def _copy(nbytes: int, threads: ApplyThreads) -> Callable[[], object]:
    """Returns a function that copies `nbytes`, which reads and writes `nbytes` each, in the same threads."""
    source, target = _random(nbytes, np.random.default_rng(1)), aligned_bytes(nbytes)
    starts = range(0, nbytes, _COPY_PART_BYTES)

    def copy(start: int, _: int) -> int:
        np.copyto(target[start : start + _COPY_PART_BYTES], source[start : start + _COPY_PART_BYTES])
        return 0

    if threads.num_threads == 1:
        return lambda: np.copyto(target, source)
    return lambda: share(threads, starts, copy, num_threads=threads.num_threads, within=np.errstate)


def _random(nbytes: int, generator: np.random.Generator) -> Array:
    memory = aligned_bytes(nbytes)
    memory.view(np.float32)[:] = generator.standard_normal(nbytes // 4, dtype=np.float32)
    return memory


def small_step_us(name: str, *, num_steps: int) -> float:
    """Returns the microseconds that a parameter server's core takes to apply a step of 4 KiB in 4 variables."""
    shape = (_SMALL_BYTES // 4 // _SMALL_VARIABLES,)
    variables = [VariableSpec(name=f"v{index}", data_type=DataType.FLOAT32, shape=shape) for index in range(_SMALL_VARIABLES)]
    server = OneServer(*variables, optimizer=name, rate=0.001)
    seconds = [server.step(*[bytes(_SMALL_BYTES)] * NUM_CONTRIBUTIONS) for _ in range(num_steps)]
    server.stop()
    return round(statistics.median(seconds[num_steps // 10 :]) * 1e6, 1)


def in_words(report: dict[str, Any]) -> str:
    """Returns the report for a reader."""
    lines = [
        f"{human_bytes(report['bytes'])} of float32, {report['contributions']} contributions, medians of {report['rounds']} rounds",
        f"{'optimizer':18}{'threads':>8}{'apply ms':>10}{'copy ms':>10}{'ratio':>8}{'apply GB/s':>12}{'copy GB/s':>11}",
    ]
    for row in report["rows"]:
        figures = f"{row['apply_ms']:10.2f}{row['copy_ms']:10.2f}{row['ratio']:8.2f}{row['apply_gb_s']:12.1f}{row['copy_gb_s']:11.1f}"
        lines.append(f"{row['optimizer']:18}{row['threads']:8}{figures}")
    small = ", ".join(f"{name} {microseconds:g} us" for name, microseconds in report["small_step_us"].items())
    if small:
        lines.append(f"a step of {human_bytes(_SMALL_BYTES)} in 4 variables, in the store: {small}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    default_threads = sorted({1, default_apply_threads()})
    parser.add_argument("--bytes", type=parse_bytes, default=64 << 20, help="bytes of all variables (default 64 MiB)")
    parser.add_argument("--threads", type=at_least_one, nargs="+", default=default_threads, help=f"default: {default_threads}")
    parser.add_argument(
        "--optimizers", nargs="+", choices=(*OPTIMIZERS, *CUSTOM, UPDATE), default=OPTIMIZERS, metavar="NAME", help="which (default: all)"
    )
    parser.add_argument("--rounds", type=at_least_one, default=9, help="number of times that each optimizer is measured (default 9)")
    parser.add_argument(
        "--small-steps", type=int, default=2000, help="steps of 4 KiB that are measured in the store; 0: none (default 2000)"
    )
    add_json(parser)
