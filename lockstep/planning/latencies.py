"""Computing times of workers: named distributions with parameters, or measured times. Draws numbers; knows no cluster, clock or file."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass

Times = NDArray[np.float64]


class Latency(Protocol):
    """The time that one gradient computation of a worker takes, in seconds."""

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""

    @property
    def text(self) -> str:
        """The distribution in a few words."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Always the same time."""

    time_s: float

    def __post_init__(self) -> None:
        _check(time_s=self.time_s)

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""
        return np.full(count, self.time_s)

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""
        return self.time_s

    @property
    def text(self) -> str:
        """The distribution in a few words."""
        return f"constant {self.time_s:g} s"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """The logarithm is normal: around `median_s`, with standard deviation `sigma` (0.1: about 10 % of the time)."""

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        _check(median_s=self.median_s)
        if not (math.isfinite(self.sigma) and 0 <= self.sigma <= 5):
            raise InvalidSpec(f"sigma of the lognormal times: got {self.sigma:g}, want 0 to 5")

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""
        return self.median_s * np.exp(self.sigma * random.standard_normal(count))

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""
        return self.median_s * math.exp(self.sigma**2 / 2)

    @property
    def text(self) -> str:
        """The distribution in a few words."""
        return f"lognormal, median {self.median_s:g} s, sigma {self.sigma:g}"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedExponential:
    """`least_s` plus an exponential time with the mean `extra_s`."""

    least_s: float
    extra_s: float

    def __post_init__(self) -> None:
        _check(extra_s=self.extra_s)
        if not (math.isfinite(self.least_s) and self.least_s >= 0):
            raise InvalidSpec(f"least time of the exponential times: got {self.least_s:g}, want 0 or more seconds")

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""
        return self.least_s + self.extra_s * random.standard_exponential(count)

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""
        return self.least_s + self.extra_s

    @property
    def text(self) -> str:
        """The distribution in a few words."""
        return f"{self.least_s:g} s and exponential {self.extra_s:g} s more"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class WithStragglers:
    """The times of `usual`, but each computation of any worker takes `factor` times as long with `probability`."""

    usual: Latency
    probability: float
    factor: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InvalidSpec(f"probability of a straggler: got {self.probability:g}, want 0 to 1")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise InvalidSpec(f"factor of a straggler: got {self.factor:g}, want 1 or more")

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""
        times = self.usual.draw(random, count, worker=worker)
        return np.where(random.random(count) < self.probability, self.factor * times, times)

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""
        return self.usual.mean_s(worker) * (1 + self.probability * (self.factor - 1))

    @property
    def text(self) -> str:
        """The distribution in a few words."""
        return f"{self.usual.text}; {100 * self.probability:g} % of them take {self.factor:g} times as long"


class Measured:
    """Measured times: each worker draws at random from its own.

    If there are more workers than were measured, those are reused in order.
    """

    def __init__(self, times: Mapping[int, Sequence[float]]) -> None:
        if not times or not all(times.values()):
            raise InvalidSpec("no times: want at least one computation of each worker")
        self._times = [np.asarray(times[worker], np.float64) for worker in sorted(times)]
        self._means = [float(own.mean()) for own in self._times]

    @property
    def num_workers(self) -> int:
        """Workers that were measured."""
        return len(self._times)

    @property
    def num_times(self) -> int:
        """Computations that were measured."""
        return sum(len(own) for own in self._times)

    def draw(self, random: np.random.Generator, count: int, *, worker: int) -> Times:
        """Returns the times of `count` computations of a worker."""
        own = self._times[worker % len(self._times)]
        return own[random.integers(len(own), size=count)]

    def mean_s(self, worker: int) -> float:
        """Returns their mean."""
        return self._means[worker % len(self._means)]

    @property
    def text(self) -> str:
        """The distribution in a few words."""
        return f"{self.num_times} measured times of {self.num_workers} workers"


def latency_of(text: str) -> Latency:
    """Returns the distribution that words like "lognormal:1.9,0.1" name. Raises InvalidSpec."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise InvalidSpec(f"latency {text[:40]!r}: want {' or '.join(usage for usage, _, _ in _KINDS.values())}")
    usage, num_numbers, make = _KINDS[kind]
    return make(*numbers_of(rest, count=num_numbers, what=f"latency {text[:40]!r}", usage=usage))


def numbers_of(text: str, *, count: int, what: str, usage: str) -> list[float]:
    """Returns the numbers of words like "1.9,0.1". Raises InvalidSpec unless there are `count`, all finite."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise InvalidSpec(f"{what}: want {usage}")
    return numbers


_KINDS: dict[str, tuple[str, int, Callable[..., Latency]]] = {
    "constant": ("constant:SECONDS", 1, lambda time_s: Constant(time_s=time_s)),
    "lognormal": ("lognormal:MEDIAN,SIGMA", 2, lambda median_s, sigma: LogNormal(median_s=median_s, sigma=sigma)),
    "exponential": (
        "exponential:LEAST,MEAN_OF_THE_REST",
        2,
        lambda least_s, extra_s: ShiftedExponential(least_s=least_s, extra_s=extra_s),
    ),
}


def _check(**times: float) -> None:
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise InvalidSpec(f"{name.removesuffix('_s')} of the computing times: got {value:g}, want more than 0 seconds")
