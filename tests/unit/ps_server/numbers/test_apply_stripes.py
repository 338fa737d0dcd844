"""An apply that several threads share: the bits of one thread, for every kind of step and every division of the work."""

import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec
from ps_protocol.model.variables import Array, Constraint, ConstraintKind, DataType, VariableSpec
from ps_server.numbers.apply import ONE_THREAD, FusedApply, StepMemory, StripeRunner, share
from ps_server.optimizers.rule import UpdateRule
from ps_server.threads import ApplyThreads
from tests.support.examples import examples

OPTIMIZERS = [
    "sgd",
    "momentum",
    "adagrad",
    "adagrad_da",
    "adam",
    "rmsprop",
    "adadelta",
    "ftrl",
    "proximal_sgd",
    "proximal_adagrad",
    "adamw",
    "nadam",
    "delayed_nesterov",
    "lion",
    "lamb",
    "elements",
    "norms",
]
_CUSTOM = {
    "elements": "m = m * 0.5 + g; n = where(g > 0, max(n, m), n); v = v - lr * m / (1 + abs(n))",
    "norms": "m = m * 0.5 + g / (1 + norm(g)); n = n + sum(m * v); v = v - lr * norm(v) * m / (1 + norm(m)) - 0.001 * n",
}
TYPES = [DataType.FLOAT32, DataType.FLOAT64, DataType.FLOAT16, DataType.BFLOAT16]
BLOCK_BYTES = 64


class _Helpless:
    """Has threads that are never free."""

    num_threads = 3

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        work(0)


class _Backwards:
    """Does in one thread what several might, the last first."""

    num_threads = 4

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        for thread in reversed(range(num_threads)):
            work(thread)


def _spec(name: str, rate: float) -> OptimizerSpec:
    if name in _CUSTOM:
        return OptimizerSpec(name="custom", learning_rate=constant(rate), formula=_CUSTOM[name], slot_values={"m": 0.0, "n": 0.25})
    return OptimizerSpec(name=name, learning_rate=constant(rate))


def _layout(data_types: list[DataType], sizes: list[int], own: OptimizerSpec | None) -> Layout:
    limit = Constraint(kind=ConstraintKind.CLIP, low=-0.5, high=0.5)
    variables = [
        VariableSpec(
            name=f"v{index}",
            data_type=data_types[index % len(data_types)],
            shape=(size,),
            optimizer=own if index % 3 == 2 else None,
            constraint=limit if index % 4 == 1 else None,
        )
        for index, size in enumerate(sizes)
    ]
    return Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])


def _random(layout: Layout, rng: np.random.Generator) -> Array:
    memory = aligned_bytes(layout.nbytes)
    for index, piece in enumerate(layout.slices):
        layout.view(memory, index)[...] = rng.standard_normal(piece.shape)
    return memory


class _Shard:
    """All that a step reads and writes, the same each time it is made from the same numbers."""

    def __init__(self, layout: Layout, name: str, runner: StripeRunner, *, seed: int, clip: ClipSpec, averages: AverageSpec | None) -> None:
        model = _spec(name, 0.1)
        self.rules = [UpdateRule(rule or model) for rule in layout.rules]
        self.fused = FusedApply(layout, self.rules, clip=clip, averages=averages, block_bytes=BLOCK_BYTES, stripes=runner)
        rng = np.random.default_rng(seed)
        self.value, self.out, self.average = (_random(layout, rng) for _ in range(3))
        self.slots: Mapping[str, Array] = {name: aligned_bytes(layout.nbytes) for rule in self.rules for name in rule.slots}
        for arena in layout.arenas:
            for slot, initial in self.rules[arena.rule].slots.items():
                layout.arena(self.slots[slot], arena).fill(initial)

    def steps(self, gradients: list[Array], *, in_place: bool, **options: object) -> list[object]:
        """Returns all that two steps have made."""
        found: list[object] = []
        for step in range(2):
            for rule in self.rules:
                rule.begin(step)
            memory = StepMemory(
                value=self.value,
                out=self.value if in_place else self.out,
                slots=self.slots,
                average=self.average,
                gradients=gradients,
                step=step,
                **options,  # type: ignore[arg-type]
            )
            found.append(self.fused.sums_of_squares(memory))
            found.append(self.fused.run(memory))
            for rule in self.rules:
                rule.advance()
            if not in_place:
                self.value, self.out = self.out, self.value
        return [*found, self.value.tobytes(), self.average.tobytes(), *(slot.tobytes() for slot in self.slots.values())]


@pytest.fixture(scope="module")
def apply_threads() -> Iterator[list[ApplyThreads]]:
    threads = [ApplyThreads(num_threads) for num_threads in (2, 3, 7)]
    yield threads
    for each in threads:
        each.stop()


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(case=st.data())
def test_threads_do_not_change_a_bit(apply_threads: list[ApplyThreads], case: st.DataObject) -> None:
    draw = case.draw
    sizes = draw(st.lists(st.integers(0, 900), min_size=1, max_size=7))
    own = _spec(draw(st.sampled_from(OPTIMIZERS)), 0.3) if draw(st.booleans()) else None
    layout = _layout(draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=2)), sizes, own)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    gradients = [_random(layout, rng) for _ in range(draw(st.integers(1, 3)))]
    if draw(st.booleans()):
        layout.view(gradients[0], 0)[:3] = np.nan
    options = {
        "absent": draw(st.sampled_from([(), tuple((index,) if index < len(sizes) else () for index in range(len(gradients)))])),
        "weights": draw(st.sampled_from([(), tuple(0.5 + index for index in range(len(gradients)))])),
        "scales": draw(st.sampled_from([(), tuple(1.0 if index % 2 else 0.3 for index in range(len(sizes)))])),
    }
    name, in_place = draw(st.sampled_from(OPTIMIZERS)), draw(st.booleans())
    clip, averages = ClipSpec(value=draw(st.sampled_from([0.0, 0.7]))), draw(st.sampled_from([None, AverageSpec(decay=0.75)]))
    runners: list[StripeRunner] = [ONE_THREAD, *apply_threads, _Helpless(), _Backwards()]
    shards = [_Shard(layout, name, runner, seed=1, clip=clip, averages=averages) for runner in runners]
    whole, *others = [shard.steps(gradients, in_place=in_place, **options) for shard in shards]
    for other in others:
        np.testing.assert_equal(other, whole)


def test_large_apply_is_shared_and_a_small_one_is_not() -> None:
    class Counting:
        num_threads = 2
        asked = 0

        def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
            self.asked += 1
            work(0)

    for size, want in ((100, 0), (1000, 1)):
        layout, runner = _layout([DataType.FLOAT32], [size], None), Counting()
        shard = _Shard(layout, "sgd", runner, seed=1, clip=ClipSpec(), averages=None)
        memory = StepMemory(value=shard.value, out=shard.out, gradients=[shard.average], step=0)
        shard.fused.run(memory)
        assert runner.asked == want


def test_every_thread_takes_part_and_has_its_own_scratch() -> None:
    threads, meeting = ApplyThreads(3), threading.Barrier(3)
    seen: list[tuple[int, int]] = []

    def work(index: int) -> None:
        meeting.wait(10)
        seen.append((index, threading.get_ident()))

    try:
        threads.run(work, num_threads=3)
        first = dict(seen)
        threads.run(work, num_threads=3)
    finally:
        threads.stop()
    assert sorted(first) == [0, 1, 2] and first[0] == threading.get_ident()
    assert {ident for _, ident in seen[3:]} == set(first.values())


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait(10)


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_any_thread_is_raised_and_the_next_apply_works(failing: int) -> None:
    threads, meeting = ApplyThreads(2), threading.Barrier(2)

    def work(index: int) -> None:
        meeting.wait(10)
        if index == failing:
            raise ValueError("what went wrong")

    try:
        with pytest.raises(ValueError, match="what went wrong"):
            threads.run(work, num_threads=2)
        threads.run(lambda index: _meet(meeting), num_threads=2)
    finally:
        threads.stop()


def test_failing_task_ends_the_others_and_leaves_nothing_to_do() -> None:
    done: list[int] = []

    def act(task: int, thread: int) -> int:
        if task == 2:
            raise MemoryError
        done.append(task)
        return 1

    with pytest.raises(MemoryError):
        share(_Backwards(), range(10), act, num_threads=4, within=threading.Lock)
    assert done == [0, 1]


def test_an_apply_that_finds_the_threads_in_use_runs_in_its_own_thread() -> None:
    threads, inside, leave = ApplyThreads(2), threading.Event(), threading.Event()

    def hold(index: int) -> None:
        inside.set()
        leave.wait(10)

    other = threading.Thread(target=threads.run, args=(hold,), kwargs={"num_threads": 2})
    other.start()
    assert inside.wait(10)
    indices: list[int] = []
    threads.run(indices.append, num_threads=2)
    leave.set()
    other.join(10)
    threads.stop()
    assert indices == [0]


def test_stopped_threads_are_gone_and_work_is_done_by_the_caller() -> None:
    threads, meeting = ApplyThreads(2), threading.Barrier(2)
    before = threading.active_count()
    threads.run(lambda index: _meet(meeting), num_threads=2)
    assert threading.active_count() == before + 1
    threads.stop()
    threads.stop()
    indices: list[int] = []
    threads.run(indices.append, num_threads=2)
    assert threading.active_count() == before and indices == [0]
